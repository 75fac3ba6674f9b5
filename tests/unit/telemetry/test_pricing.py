"""Rating: golden invoices, tiers, dates, fallbacks, owned hardware, and additivity."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from telemetry.money import total
from telemetry.pricing import (
    BUCKET_METERS,
    DEVICE_METERS,
    Book,
    Meter,
    Price,
    PriceBook,
    gpu_second,
    matches,
    rate,
)
from telemetry.record import Attempt, Charge
from telemetry.timings import DeviceTime, Timings
from telemetry.usage import BUCKETS, Usage
from tests.unit.telemetry.test_usage import CORPUS, normalise

NOON = 1_796_040_000 * 10**9  # 2026-11-30 12:00 UTC
HOUR = 3_600 * 10**9
counts = st.integers(0, 10**7)
usages = st.builds(Usage, **dict.fromkeys(BUCKETS, counts))


def attempt(**facts: Any) -> Attempt:
    """An attempt at noon, with what the test cares about."""
    defaults: dict[str, Any] = {
        "attempt_no": 1,
        "reason": "primary",
        "backend": "main",
        "provider": "acme",
        "model": "m",
        "span_id": "0" * 16,
        "started_ns": NOON,
    }
    return Attempt(**{**defaults, **facts})


def price(meter: str, unit_price: str, **facts: Any) -> Price:
    """A price of acme's model m."""
    defaults: dict[str, Any] = {
        "price_id": f"{meter} {unit_price}",
        "provider": "acme",
        "model": "m",
        "match": "equals",
        "priority": 0,
        "meter": meter,
        "min_input_tokens": 0,
        "unit": 1_000_000,
        "unit_price": Decimal(unit_price),
    }
    return Price(**{**defaults, **facts})


def book(*prices: Price, name: str = "list", version: int = 1, published_ns: int = 0) -> Book:
    """A published book of these prices."""
    by_provider: dict[str, list[Price]] = {}
    for one in prices:
        by_provider.setdefault(one.provider, []).append(one)
    return Book(name=name, version=version, published_ns=published_ns, prices=dict(by_provider))


def agreement(*prices: Price, version: int = 1, published_ns: int = 0) -> Book:
    """A version of the config's book for the backend `main`."""
    mine = [structs.replace(p, provider="@main", model="", match="any") for p in prices]
    return book(*mine, name="config", version=version, published_ns=published_ns)


def amounts(charges: tuple[Charge, ...]) -> dict[str, Decimal | None]:
    """What each meter costs."""
    return {charge.meter: charge.amount for charge in charges}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_recorded_reports_cost_what_was_computed_by_hand(path: Path) -> None:
    """Every line and the total of the golden invoices, to the last digit."""
    case = json.loads(path.read_text())
    found = normalise(case)
    assert found is not None
    prices = [price(meter, text) for meter, text in case["prices_per_million"].items()]
    books = (
        PriceBook(agreements=[agreement(*prices)])
        if case["shape"] == "engine"
        else PriceBook([book(*prices)])
    )
    charges = rate(attempt(usage=found.usage, timings=found.timings), books)
    invoice = {
        line["meter"]: (line["quantity"], Decimal(line["amount"])) for line in case["invoice"]
    }
    assert {c.meter: (c.quantity, c.amount) for c in charges} == invoice
    assert total([c.amount for c in charges if c.amount is not None]) == Decimal(case["cost"])


def test_a_line_names_its_price_and_book() -> None:
    """Each line can be traced to one published price."""
    (line,) = rate(attempt(usage=Usage(out_text=3)), PriceBook([book(price("Output Tokens", "2"))]))
    assert line == Charge(
        meter="Output Tokens",
        quantity=3,
        unit=1_000_000,
        unit_price=Decimal(2),
        amount=Decimal("0.000006"),
        price_id="Output Tokens 2",
        book="list@1",
    )


def test_unknown_models_are_unpriced_and_never_free() -> None:
    """No price gives lines without amount, with the tokens on them."""
    usage = Usage(in_uncached_text=5, out_text=3)
    for books in (PriceBook(), PriceBook([book(price("Input Tokens", "1", model="other"))])):
        charges = rate(attempt(usage=usage), books)
        assert amounts(charges) == {"Input Tokens": None, "Output Tokens": None}
        assert [charge.quantity for charge in charges] == [5, 3]


def test_a_meter_without_any_price_is_unpriced_beside_priced_ones() -> None:
    """A list with input prices only leaves the output unpriced, not free."""
    books = PriceBook([book(price("Input Tokens", "1"))])
    charges = rate(attempt(usage=Usage(in_uncached_text=1, out_text=1)), books)
    assert amounts(charges) == {"Input Tokens": Decimal("0.000001"), "Output Tokens": None}


def test_a_price_of_zero_is_a_price() -> None:
    """Free models cost 0, which is not the same as unknown."""
    books = PriceBook([book(price("Input Tokens", "0"))])
    assert amounts(rate(attempt(usage=Usage(in_uncached_text=9)), books)) == {
        "Input Tokens": Decimal(0)
    }


@pytest.mark.parametrize("bucket", BUCKETS)
def test_missing_prices_fall_back_and_say_so(bucket: str) -> None:
    """With only input and output prices, each bucket takes one of them and names it."""
    books = PriceBook([book(price("Input Tokens", "2"), price("Output Tokens", "8"))])
    (line,) = rate(attempt(usage=Usage(**{bucket: 1})), books)
    assert line.price_id == ("Input Tokens 2" if bucket.startswith("in_") else "Output Tokens 8")
    assert line.meter == dict(BUCKET_METERS)[bucket]


def test_long_cache_writes_fall_back_to_short_ones_first() -> None:
    """1h writes take the write price before the input price."""
    books = PriceBook([book(price("Input Tokens", "2"), price("Cache Write Input Tokens", "2.5"))])
    (line,) = rate(attempt(usage=Usage(in_cache_write_1h=1)), books)
    assert (line.meter, line.price_id) == (
        "Cache Write 1h Input Tokens",
        "Cache Write Input Tokens 2.5",
    )


@pytest.mark.parametrize(
    ("input_tokens", "expected"),
    [(200_000, "1.25"), (200_001, "2.50"), (500_000, "2.50"), (500_001, "4")],
)
def test_tiers_are_cliffs(input_tokens: int, expected: str) -> None:
    """Above a threshold the whole request pays the higher price; cached tokens count towards it."""
    books = PriceBook(
        [
            book(
                price("Input Tokens", "1.25"),
                price("Input Tokens", "2.50", min_input_tokens=200_001),
                price("Input Tokens", "4", min_input_tokens=500_001),
            )
        ]
    )
    usage = Usage(in_uncached_text=input_tokens - 1000, in_cached_read=1000)
    for line in rate(attempt(usage=usage), books):
        assert line.unit_price == Decimal(expected)


def test_the_price_is_that_of_the_start() -> None:
    """A price change inside a day splits that day at its instant."""
    books = PriceBook(
        [
            book(
                price("Input Tokens", "1", effective_to_ns=NOON),
                price("Input Tokens", "2", effective_from_ns=NOON),
            )
        ]
    )
    usage = Usage(in_uncached_text=1)
    for started_ns, expected in ((NOON - 1, 1), (NOON, 2), (NOON - 1, 1), (NOON + HOUR, 2)):
        (line,) = rate(attempt(usage=usage, started_ns=started_ns), books)
        assert line.unit_price == expected


def test_a_model_without_a_price_at_that_time_is_unpriced() -> None:
    """Before the first price there is none."""
    books = PriceBook([book(price("Input Tokens", "1", effective_from_ns=NOON + HOUR))])
    assert amounts(rate(attempt(usage=Usage(in_uncached_text=1)), books)) == {"Input Tokens": None}


def test_the_model_that_answered_is_priced() -> None:
    """The answered model wins; the asked one is the fallback."""
    books = PriceBook([book(price("Input Tokens", "1"), price("Input Tokens", "9", model="big"))])
    usage = Usage(in_uncached_text=1)
    for answered, expected in (("big", 9), ("m", 1), ("m-never-listed", 1), (None, 1)):
        (line,) = rate(attempt(usage=usage, answered_model=answered), books)
        assert line.unit_price == expected


def test_agreed_prices_win_and_change_with_the_config() -> None:
    """A backend's agreed price replaces the list from the moment it was published, and a later
    version without it gives the list back."""
    books = PriceBook(
        [book(price("Input Tokens", "9"))],
        [
            agreement(price("Input Tokens", "2"), version=2, published_ns=NOON),
            agreement(price("Input Tokens", "1"), version=1, published_ns=NOON - HOUR),
            book(name="config", version=3, published_ns=NOON + HOUR),
        ],
    )
    usage = Usage(in_uncached_text=1)
    for started_ns, expected in (
        (NOON - HOUR - 1, "list@1"),
        (NOON - HOUR, "config@1"),
        (NOON - 1, "config@1"),
        (NOON, "config@2"),
        (NOON + HOUR, "list@1"),
    ):
        (line,) = rate(attempt(usage=usage, started_ns=started_ns), books)
        assert line.book == expected
    (other,) = rate(attempt(usage=usage, backend="other"), books)
    assert other.book == "list@1"


def test_owned_hardware_is_priced_by_device_time() -> None:
    """Each phase is a line in microseconds; tokens are not charged beside it."""
    books = PriceBook(agreements=[agreement(price("GPU Time", "0.001"))])
    device = DeviceTime(prefill=1, decode=2, sampling=3, recompute=4, spec_rejected=5)
    charges = rate(attempt(usage=Usage(out_text=9), timings=Timings(device_us=device)), books)
    assert amounts(charges) == {
        "GPU Prefill": Decimal("0.000000001"),
        "GPU Decode": Decimal("0.000000002"),
        "GPU Sampling": Decimal("0.000000003"),
        "GPU Recompute": Decimal("0.000000004"),
        "GPU Rejected Speculation": Decimal("0.000000005"),
    }
    assert {charge.price_id for charge in charges} == {"GPU Time 0.001"}


def test_owned_hardware_without_device_time_is_unpriced() -> None:
    """A cut answer of our engine has tokens but no times: unpriced, not free and not at list."""
    books = PriceBook([book(price("Output Tokens", "9"))], [agreement(price("GPU Time", "0.001"))])
    assert amounts(rate(attempt(usage=Usage(out_text=4)), books)) == {"Output Tokens": None}


def test_nothing_used_costs_nothing() -> None:
    """A failed attempt without usage or content has no lines."""
    assert rate(attempt(), PriceBook()) == ()


def test_content_that_nobody_counted_is_alarmed() -> None:
    """Content without usage is one unpriced line, so that it cannot pass as free."""
    (line,) = rate(attempt(first_token_ns=NOON), PriceBook())
    assert (line.meter, line.quantity, line.amount) == ("Unmetered Answer", 1, None)


def test_per_request_prices_add_a_line() -> None:
    """Lists that charge per request as well get their line."""
    books = PriceBook([book(price("Input Tokens", "1"), price("Requests", "5", unit=1000))])
    charges = rate(attempt(usage=Usage(in_uncached_text=1)), books)
    assert amounts(charges)["Requests"] == Decimal("0.005")


@pytest.mark.parametrize(
    ("rate_per_hour", "count", "second"),
    [("0.10", 1, "0.000027778"), ("3.60", 1, "0.001"), ("2.50", 8, "0.005555556"), ("0", 1, "0")],
)
def test_gpu_seconds_are_rounded_half_up_once(rate_per_hour: str, count: int, second: str) -> None:
    """The only rounding of owned hardware is in its published price."""
    assert gpu_second(Decimal(rate_per_hour), count) == Decimal(second)


@pytest.mark.parametrize(
    ("match", "pattern", "model", "is_match"),
    [
        ("equals", "m", "m", True),
        ("equals", "m", "m2", False),
        ("starts_with", "m", "m2", True),
        ("starts_with", "2", "m2", False),
        ("ends_with", "2", "m2", True),
        ("ends_with", "m", "m2", False),
        ("contains", "m", "amb", True),
        ("contains", "x", "amb", False),
        ("regex", "^a.b$", "amb", True),
        ("regex", "^b", "amb", False),
        ("any", "", "whatever", True),
    ],
)
def test_matches(match: str, pattern: str, model: str, is_match: bool) -> None:
    """Each kind of pattern means what its name says."""
    assert matches(match, pattern, model) is is_match


def test_an_unknown_kind_of_pattern_is_an_error() -> None:
    """A row we cannot read must not silently match nothing."""
    with pytest.raises(ValueError, match="unknown match"):
        matches("glob", "m*", "m")


def test_the_lowest_priority_that_matches_wins() -> None:
    """Order in the list decides between patterns and names; spelling and dates are forgiven."""
    books = PriceBook(
        [
            book(
                price("Input Tokens", "1", match="starts_with", model="gpt-5", priority=5),
                price("Input Tokens", "2", model="gpt-5-mini", priority=3),
                price("Input Tokens", "3", model="gpt-5-2025-12-11", priority=4),
                price("Input Tokens", "4", match="contains", model="nano", priority=1),
                price("Input Tokens", "5", model="gpt-5-nano", priority=2),
                price("Input Tokens", "6", model="dated-2025-01-02", priority=7),
            )
        ]
    )
    for model, expected in (
        ("gpt-5", 1),
        ("GPT-5-Mini", 2),
        ("gpt-5-2025-12-11", 3),
        ("gpt-5-nano", 4),
        ("dated-20250102", 6),
    ):
        sheet = books.listed("acme", model, NOON)
        assert sheet is not None
        found = sheet.price(Meter.INPUT, 0)
        assert found is not None and found.unit_price == expected
    assert books.listed("acme", "dated-20251399", NOON) is None


def test_telemetry_names_of_providers_find_their_list() -> None:
    """OpenTelemetry's provider names are looked up under the lists' names."""
    books = PriceBook([book(price("Input Tokens", "1", provider="x-ai"))])
    assert books.listed("x_ai", "m", NOON) is not None
    assert books.listed("y_ai", "m", NOON) is None


def test_many_made_up_models_do_not_fill_the_memory() -> None:
    """The memory of look-ups is bounded."""
    books = PriceBook([book(price("Input Tokens", "1"))])
    for index in range(5000):
        books.listed("acme", f"no-such-{index}", NOON)
    assert len(books._found) <= 4096


def full_book() -> PriceBook:
    """A price of its own for every meter, all different."""
    return PriceBook(
        [book(*(price(m, f"{i + 1}.000000001") for i, (_, m) in enumerate(BUCKET_METERS)))]
    )


@given(usages, usages)
def test_rating_is_additive_inside_a_tier(first: Usage, second: Usage) -> None:
    """rate(a) + rate(b) == rate(a + b), to the last digit."""
    books = full_book()

    def cost(usage: Usage) -> Decimal:
        return total([c.amount for c in rate(attempt(usage=usage), books) if c.amount is not None])

    assert cost(first) + cost(second) == cost(first + second)


@given(usages, st.sampled_from(BUCKETS), st.integers(1, 10**6))
def test_cost_grows_with_every_bucket(usage: Usage, bucket: str, more: int) -> None:
    """More tokens in any bucket always cost more; none is ignored."""
    books = full_book()
    bigger = structs.replace(usage, **{bucket: getattr(usage, bucket) + more})
    costs = [
        total([c.amount for c in rate(attempt(usage=u), books) if c.amount is not None])
        for u in (usage, bigger)
    ]
    assert costs[0] < costs[1]


@given(usages)
def test_lines_carry_every_token_once(usage: Usage) -> None:
    """The quantities of the lines are the buckets: nothing lost, nothing twice."""
    charges = rate(attempt(usage=usage), full_book())
    assert sum(charge.quantity for charge in charges) == usage.total_tokens
    assert len({charge.meter for charge in charges}) == len(charges)


@given(st.builds(DeviceTime, **{phase: counts for phase, _ in DEVICE_METERS}))
def test_lines_carry_every_microsecond_once(device: DeviceTime) -> None:
    """The quantities of the lines are the device time."""
    books = PriceBook(agreements=[agreement(price("GPU Time", "0.000027778"))])
    charges = rate(attempt(timings=Timings(device_us=device)), books)
    assert sum(charge.quantity for charge in charges) == device.total


def test_noon_is_noon() -> None:
    """The constant of these tests is what its name says."""
    assert datetime.fromtimestamp(NOON // 10**9, UTC) == datetime(2026, 11, 30, 12, tzinfo=UTC)
