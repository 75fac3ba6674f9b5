"""What a request will take is learned from what requests took."""

from decimal import Decimal

from gateway.limits.estimate import ENOUGH, TOKENS_PER_IMAGE, Estimator
from telemetry.pricing import Book, Meter, Price, PriceBook
from telemetry.record import RequestRecord
from telemetry.usage import Usage
from tests.fakes.records import attempt, record


def settled(tokens_in: int, tokens_out: int) -> RequestRecord:
    """A served request that took so much."""
    usage = Usage(in_uncached_text=tokens_in, out_text=tokens_out)
    return record(attempts=[attempt(usage=usage)], asked_model="m")


def test_input_is_learned_per_model_and_bounded_by_bytes() -> None:
    """Dense text is estimated with a margin, and never above a token per byte."""
    known = Estimator(1024)
    assert known.input_tokens("m", 900, 0) == 300
    for _ in range(200):
        known.learn(settled(200, 5), 1000, 0, 1)
    assert 200 <= known.input_tokens("m", 1000, 0) <= 210
    for number in range(200):
        known.learn(settled(200 + number % 7 * 300, 5), 1000, 0, 1)
    assert 1000 >= known.input_tokens("m", 1000, 0) > 800
    assert known.input_tokens("other", 900, 2) == 300 + 2 * TOKENS_PER_IMAGE


def test_output_without_max_tokens_is_the_95th_percentile() -> None:
    """A constant until enough answers were seen; then what 95 of 100 did not pass, per choice."""
    known = Estimator(1024)
    assert known.output_tokens("m", 3) == 3072
    for number in range(ENOUGH * 10):
        known.learn(settled(10, 2000 if number % 50 == 0 else 100), 40, 0, 1)
    assert 100 <= known.output_tokens("m", 1) <= 116
    assert known.output_tokens("m", 2) == 2 * known.output_tokens("m", 1)


def test_money_is_the_dearest_input_and_output_price() -> None:
    """A cache write or a reasoning token may cost more than its plain kind; all is held at that."""
    prices = [
        Price(
            price_id=meter,
            provider="p",
            model="m",
            match="equals",
            priority=0,
            meter=meter,
            min_input_tokens=0,
            unit=1_000_000,
            unit_price=Decimal(dollars),
        )
        for meter, dollars in (
            (Meter.INPUT, "1"),
            (Meter.CACHE_WRITE, "1.25"),
            (Meter.OUTPUT, "4"),
            (Meter.REASONING, "5"),
        )
    ]
    book = PriceBook([Book(name="l", version=1, published_ns=0, prices={"p": prices})])
    asked = {"backend": "b", "provider": "p", "input_tokens": 1000, "output_tokens": 10}
    known = Estimator(1024)
    assert known.money_nano(book, model="m", now_ns=1, **asked) == 1000 * 1250 + 10 * 5000  # type: ignore[arg-type]  # mixed values
    assert known.money_nano(book, model="unknown", now_ns=1, **asked) is None  # type: ignore[arg-type]  # as above
