"""Settled records, one for each way out of the gateway."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from telemetry.ids import KeyId, RequestId, TenantId
from telemetry.money import amount
from telemetry.record import (
    Attempt,
    AttemptReason,
    Charge,
    DeviceTime,
    Outcome,
    RequestRecord,
    Stage,
    Timings,
)
from telemetry.usage import Usage, UsageQuality, UsageSource

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN_ID = "00f067aa0ba902b7"
ROOT_SPAN_ID = "a2fb4a1d1a96d312"

USAGE = Usage(in_uncached_text=90, in_cached_read=10, out_text=21, out_reasoning=5)


def at(ms: float) -> int:
    """Milliseconds after the request was opened."""
    return START_NS + round(ms * MS)


def charge(meter: str, tokens: int, price: str | None) -> Charge:
    """One line, priced per million."""
    unit_price = None if price is None else Decimal(price)
    return Charge(
        meter=meter,
        quantity=tokens,
        unit=1_000_000,
        unit_price=unit_price,
        amount=None if unit_price is None else amount(tokens, unit_price, 1_000_000),
        price_id="openai/gpt-4o/in",
        book="seed@1",
    )


def attempt(
    no: int = 1,
    reason: AttemptReason = "primary",
    *,
    outcome: Outcome | None = Outcome.OK,
    started: float = 4,
    first: float | None = 104,
    ended: float | None = 1104,
    usage: Usage | None = USAGE,
    **more: Any,
) -> Attempt:
    """A try at `gpt-4o`; times in milliseconds after the request was opened."""
    made = Attempt(
        attempt_no=no,
        reason=reason,
        backend="openai-eu",
        provider="openai",
        model="gpt-4o",
        span_id=f"{no:016x}",
        started_ns=at(started),
        first_token_ns=None if first is None else at(first),
        ended_ns=None if ended is None else at(ended),
        outcome=outcome,
        http_status=200,
        answered_model="gpt-4o-2024-08-06",
        provider_request_id="chatcmpl-1",
        finish_reasons=("stop",),
        usage=usage,
        usage_source=UsageSource.REPORTED if usage else UsageSource.NONE,
        usage_quality=UsageQuality.EXACT,
        charges=()
        if usage is None
        else (
            charge("Input Tokens", usage.in_uncached_text, "2.5"),
            charge("Cache Read Input Tokens", usage.in_cached_read, "1.25"),
            charge("Output Tokens", usage.out_text, "10"),
            charge("Reasoning Output Tokens", usage.out_reasoning, "10"),
        ),
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def record(*attempts: Attempt, outcome: Outcome = Outcome.OK, **more: Any) -> RequestRecord:
    """A settled streamed request of 1,106 ms, with a stage for each step that it took."""
    made = RequestRecord(
        request_id=RequestId("01890a5d-ac96-774b-bcce-b302099a8057"),
        node="node-a",
        surface="chat",
        opened_ns=START_NS,
        deadline_ns=at(600_000),
        trace_id=TRACE_ID,
        span_id=ROOT_SPAN_ID,
        parent_span_id=CALLER_SPAN_ID,
        tenant_id=TenantId("acme"),
        key_id=KeyId("k1"),
        asked_model="assistant",
        stream=True,
        input_estimate=100,
        stages=[
            Stage("auth", at(0.1), at(0.5)),
            Stage("admit", at(0.5), at(1)),
            Stage("route", at(1), at(1.5)),
            Stage("settle", at(1105), at(1106)),
        ],
        attempts=list(attempts),
        chunks=26,
        content_bytes=120,
        ended_ns=at(1106),
        outcome=outcome,
        status=200,
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def refused() -> RequestRecord:
    stages = [Stage("auth", at(0.1), at(0.4)), Stage("settle", at(0.4), at(0.5))]
    return record(
        outcome=Outcome.CLIENT_ERROR,
        stages=stages,
        status=401,
        error_code="invalid_api_key",
        ended_ns=at(0.5),
        tenant_id=None,
        key_id=None,
    )


def failed_upstream() -> RequestRecord:
    tries = [
        attempt(1, outcome=Outcome.UPSTREAM_ERROR, first=None, ended=50, usage=None),
        attempt(2, "retry", outcome=Outcome.UPSTREAM_ERROR, started=80, first=None, usage=None),
    ]
    for one in tries:
        one.http_status, one.error_code, one.finish_reasons = 503, "upstream_failed", ()
    return record(*tries, outcome=Outcome.UPSTREAM_ERROR, status=502, error_code="upstream_failed")


def fell_back() -> RequestRecord:
    first = attempt(1, outcome=Outcome.TIMEOUT, first=None, ended=90, usage=None)
    second = attempt(2, "fallback", started=95, first=200, provider="meterline.engine")
    second.timings = Timings(
        queue_s=0.002,
        prefill_s=0.05,
        decode_s=0.8,
        sampling_s=0.01,
        device_us=DeviceTime(prefill=50_000, decode=700_000, sampling=9_000),
    )
    return record(first, second)


def cut() -> RequestRecord:
    tried = attempt(outcome=Outcome.TRUNCATED, finish_reasons=())
    return record(tried, outcome=Outcome.TRUNCATED, error_code="upstream_truncated")


def left_early() -> RequestRecord:
    tried = attempt(outcome=Outcome.CLIENT_DISCONNECT, first=None, usage=None)
    return record(tried, outcome=Outcome.CLIENT_DISCONNECT, status=499, chunks=0)


def left_late() -> RequestRecord:
    tried = attempt(outcome=Outcome.CLIENT_DISCONNECT, usage_source=UsageSource.ESTIMATED)
    return record(tried, outcome=Outcome.CLIENT_DISCONNECT, status=499)


def timed_out() -> RequestRecord:
    tried = attempt(outcome=Outcome.TIMEOUT, first=None, usage=None)
    return record(tried, outcome=Outcome.TIMEOUT, status=504, error_code="upstream_timeout")


def broke() -> RequestRecord:
    """A defect of ours while an attempt was open: nobody closed it."""
    tried = attempt(outcome=None, first=None, ended=None, usage=None)
    return record(tried, outcome=Outcome.INTERNAL_ERROR, status=500, error_code="internal_error")


def abandoned() -> RequestRecord:
    tried = attempt(outcome=None, ended=None, usage_source=UsageSource.ESTIMATED)
    return record(tried, outcome=Outcome.ABANDONED, stages=[], status=None, ended_ns=at(900_000))


def shed() -> RequestRecord:
    return record(outcome=Outcome.SHED, status=503, error_code="shutting_down", stages=[])


def whole() -> RequestRecord:
    return record(attempt(), stream=False, surface="completions", parent_span_id=None)


EXITS: dict[str, Callable[[], RequestRecord]] = {
    "served": lambda: record(attempt()),
    "served whole": whole,
    "refused": refused,
    "shed": shed,
    "upstream failed twice": failed_upstream,
    "fallback": fell_back,
    "stream cut": cut,
    "client left before the first token": left_early,
    "client left after it": left_late,
    "timeout": timed_out,
    "internal error": broke,
    "abandoned": abandoned,
}
