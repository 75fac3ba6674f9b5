"""One request's story, from its record alone: who asked, what was decided, which attempts were
made, where the time went, who counted the tokens, and which price made each line of the cost. Pure.

Every instant is shown from the moment the request was opened. Pipeline stages and attempts were
stamped, so their place is exact. Phases inside an engine are reported as durations; they are drawn
one after the other from the start of the attempt and marked as placed by us.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from msgspec import Struct

from telemetry.money import total
from telemetry.pricing import BUCKET_METERS, DEVICE_METERS
from telemetry.record import Attempt, Charge, Outcome, RequestRecord
from telemetry.usage import Usage, UsageQuality, UsageSource

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_COUNTED_BY = {
    UsageSource.REPORTED: "counted by the provider",
    UsageSource.ENGINE: "counted by our engine",
    UsageSource.ESTIMATED: "estimated by the gateway",
    UsageSource.NONE: "nothing to count",
}
_WORDS = {
    Outcome.OK: "answered",
    Outcome.CLIENT_ERROR: "refused: the request is wrong",
    Outcome.RATE_LIMITED: "refused: rate limit",
    Outcome.BUDGET_REFUSED: "refused: budget",
    Outcome.SHED: "refused: overload or shutdown",
    Outcome.UPSTREAM_ERROR: "failed: upstream error",
    Outcome.TIMEOUT: "failed: timeout",
    Outcome.TRUNCATED: "failed: the answer was cut",
    Outcome.INTERNAL_ERROR: "failed: internal error",
    Outcome.CLIENT_DISCONNECT: "ended by the client",
    Outcome.ABANDONED: "abandoned: the process died, settled by the sweeper",
}


class Phase(Struct, frozen=True, kw_only=True):
    """One bar of the waterfall. `start_us` counts from the request's opening."""

    name: str
    depth: int
    start_us: int
    duration_us: int
    is_placed: bool = False  # the duration was reported, the place on the axis is ours


class TokenCount(Struct, frozen=True):
    """One non-zero bucket, under the name of its meter."""

    bucket: str
    meter: str
    tokens: int


class DeviceShare(Struct, frozen=True):
    """Device time of one phase, under the name of its meter."""

    phase: str
    meter: str
    device_us: int


class AttemptStory(Struct, frozen=True, kw_only=True):
    """One attempt, in numbers and words."""

    attempt_no: int
    reason: str
    backend: str
    provider: str
    routed_model: str
    answered_model: str | None
    outcome: str | None
    http_status: int | None
    error_code: str | None
    finish_reasons: tuple[str, ...]
    start_us: int
    first_token_us: int | None
    end_us: int | None
    tokens: tuple[TokenCount, ...]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    usage_source: str
    usage_quality: str
    counted_by: str
    device: tuple[DeviceShare, ...]
    device_us: int
    preemptions: int | None
    charges: tuple[Charge, ...]
    provider_request_id: str | None = None


class Cost(Struct, frozen=True, kw_only=True):
    """The priced lines of one currency."""

    currency: str
    amount: Decimal


class Story(Struct, frozen=True, kw_only=True):
    """Everything `meterline explain` shows. The sums are over all attempts: each was paid for."""

    request_id: str
    is_settled: bool
    opened_at: datetime
    duration_us: int
    tenant_id: str | None
    tenant_name: str | None
    key_id: str | None
    surface: str
    stream: bool
    asked_model: str | None
    routed_model: str | None
    answered_model: str | None
    backend: str | None
    outcome: str | None
    summary: str
    status: int | None
    error_code: str | None
    trace_id: str
    node: str
    client_request_id: str | None
    content_chunks: int
    content_bytes: int
    decisions: tuple[str, ...]
    phases: tuple[Phase, ...]
    attempts: tuple[AttemptStory, ...]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    device_us: int
    costs: tuple[Cost, ...]  # empty: nothing was charged
    unpriced_lines: int


def tell(record: RequestRecord, tenant_names: Mapping[str, str] | None = None) -> Story:
    """The story of a record. `tenant_names` maps tenant ids to names."""
    attempts = tuple(_attempt(attempt, record) for attempt in record.attempts)
    served = record.served or (record.attempts[-1] if record.attempts else None)
    names = tenant_names or {}
    return Story(
        request_id=record.request_id,
        is_settled=record.outcome is not None,
        opened_at=_EPOCH + timedelta(microseconds=record.opened_ns // 1000),
        duration_us=_us(_last_ns(record) - record.opened_ns),
        tenant_id=record.tenant_id,
        tenant_name=names.get(record.tenant_id) if record.tenant_id is not None else None,
        key_id=record.key_id,
        surface=record.surface,
        stream=record.stream,
        asked_model=record.asked_model,
        routed_model=served.model if served is not None else None,
        answered_model=served.answered_model if served is not None else None,
        backend=served.backend if served is not None else None,
        outcome=record.outcome.value if record.outcome is not None else None,
        summary="still open" if record.outcome is None else _WORDS[record.outcome],
        status=record.status,
        error_code=record.error_code,
        trace_id=record.trace_id,
        node=record.node,
        client_request_id=record.client_request_id,
        content_chunks=record.chunks,
        content_bytes=record.content_bytes,
        decisions=tuple(_decisions(record)),
        phases=tuple(_phases(record)),
        attempts=attempts,
        input_tokens=sum(attempt.input_tokens for attempt in attempts),
        cached_tokens=sum(attempt.cached_tokens for attempt in attempts),
        output_tokens=sum(attempt.output_tokens for attempt in attempts),
        device_us=sum(attempt.device_us for attempt in attempts),
        costs=_costs(record.charges),
        unpriced_lines=sum(charge.amount is None for charge in record.charges),
    )


def _attempt(attempt: Attempt, record: RequestRecord) -> AttemptStory:
    usage = attempt.usage or Usage()
    device = attempt.timings.device_us if attempt.timings is not None else None
    counted_by = _COUNTED_BY[attempt.usage_source]
    if attempt.usage_quality is UsageQuality.AMBIGUOUS:
        counted_by += ", split ambiguous"
    return AttemptStory(
        attempt_no=attempt.attempt_no,
        reason=attempt.reason,
        backend=attempt.backend,
        provider=attempt.provider,
        routed_model=attempt.model,
        answered_model=attempt.answered_model,
        outcome=attempt.outcome.value if attempt.outcome is not None else None,
        http_status=attempt.http_status,
        error_code=attempt.error_code,
        finish_reasons=attempt.finish_reasons,
        start_us=_us(attempt.started_ns - record.opened_ns),
        first_token_us=_since(attempt.first_token_ns, record),
        end_us=_since(attempt.ended_ns, record),
        tokens=tuple(
            TokenCount(bucket, meter.value, getattr(usage, bucket))
            for bucket, meter in BUCKET_METERS
            if getattr(usage, bucket)
        ),
        input_tokens=usage.input_tokens,
        cached_tokens=usage.in_cached_read,
        output_tokens=usage.output_tokens,
        usage_source=attempt.usage_source.value,
        usage_quality=attempt.usage_quality.value,
        counted_by=counted_by,
        device=()
        if device is None
        else tuple(
            DeviceShare(phase, meter.value, getattr(device, phase))
            for phase, meter in DEVICE_METERS
            if getattr(device, phase)
        ),
        device_us=0 if device is None else device.total,
        preemptions=attempt.timings.preemptions if attempt.timings is not None else None,
        charges=attempt.charges,
        provider_request_id=attempt.provider_request_id,
    )


def _decisions(record: RequestRecord) -> Iterator[str]:
    if record.tenant_id is None:
        yield "nobody was identified"
    if not record.attempts and record.outcome is not None:
        code = f" ({record.error_code})" if record.error_code else ""
        yield f"no backend was asked{code}"
    if record.degraded is not None:
        rung, _, reason = record.degraded.partition(";")
        yield f"it got less than it asked for: {rung} ({reason})"
    for attempt in record.attempts:
        model = f" as {attempt.model}" if attempt.model != record.asked_model else ""
        asked = f"attempt {attempt.attempt_no}, {attempt.reason}: {attempt.backend}{model}"
        yield f"{asked} → {_result(attempt)}"
        answered = attempt.answered_model
        if answered and answered != attempt.model:
            yield f"answered by {answered}, which is the model that is priced"


def _result(attempt: Attempt) -> str:
    if attempt.outcome is None:
        return "not ended"
    words = [_WORDS[attempt.outcome]]
    if attempt.outcome is Outcome.OK and attempt.finish_reasons:
        words = [", ".join(attempt.finish_reasons)]
    if attempt.outcome is not Outcome.OK:
        if attempt.http_status is not None:
            words.append(f"HTTP {attempt.http_status}")
        if attempt.error_code:
            words.append(attempt.error_code)
    return ", ".join(words)


def _phases(record: RequestRecord) -> Iterator[Phase]:
    opened, last = record.opened_ns, _last_ns(record)
    yield _phase("request", 0, opened, last, record)
    timeline = [
        *(
            (stage.start_ns, 0, _phase(stage.name, 1, stage.start_ns, stage.end_ns, record), None)
            for stage in record.stages
        ),
        *(
            (
                a.started_ns,
                1,
                _phase(
                    f"attempt {a.attempt_no} {a.backend}",
                    1,
                    a.started_ns,
                    _end_ns(a, record),
                    record,
                ),
                a,
            )
            for a in record.attempts
        ),
    ]
    for _, _, phase, attempt in sorted(timeline, key=lambda item: item[:2]):
        yield phase
        if attempt is not None:
            yield from _inside(attempt, record)


def _inside(attempt: Attempt, record: RequestRecord) -> Iterator[Phase]:
    start, end = attempt.started_ns, _end_ns(attempt, record)
    timings = attempt.timings
    has_phases = False
    if timings is not None:
        cursor = start
        for name, seconds in (
            ("queue", timings.queue_s),
            ("prefill", timings.prefill_s),
            ("decode", timings.decode_s),
        ):
            if seconds is not None:
                has_phases = True
                duration = round(seconds * 1e9)
                yield _placed(name, cursor, duration, record)
                if name == "decode" and timings.sampling_s is not None:
                    yield _placed("sampling", cursor, round(timings.sampling_s * 1e9), record)
                cursor += duration
        if timings.decode_s is None and timings.sampling_s is not None:
            yield _placed("sampling", cursor, round(timings.sampling_s * 1e9), record)
    first = attempt.first_token_ns
    if first is not None:
        if not has_phases:
            yield _phase("first token", 2, start, first, record)
        yield _phase("stream" if record.stream else "answer", 2, first, end, record)


def _phase(name: str, depth: int, start_ns: int, end_ns: int, record: RequestRecord) -> Phase:
    start = _us(start_ns - record.opened_ns)
    end = _us(end_ns - record.opened_ns)
    return Phase(name=name, depth=depth, start_us=start, duration_us=max(end - start, 0))


def _placed(name: str, start_ns: int, duration_ns: int, record: RequestRecord) -> Phase:
    return Phase(
        name=name,
        depth=2,
        start_us=_us(start_ns - record.opened_ns),
        duration_us=_us(duration_ns),
        is_placed=True,
    )


def _costs(charges: tuple[Charge, ...]) -> tuple[Cost, ...]:
    amounts: dict[str, list[Decimal]] = {}
    for charge in charges:
        if charge.amount is not None:
            amounts.setdefault(charge.currency, []).append(charge.amount)
    return tuple(
        Cost(currency=currency, amount=total(found)) for currency, found in sorted(amounts.items())
    )


def _last_ns(record: RequestRecord) -> int:
    if record.ended_ns is not None:
        return record.ended_ns
    seen = [record.opened_ns, *(stage.end_ns for stage in record.stages)]
    for attempt in record.attempts:
        seen += [attempt.started_ns, attempt.first_token_ns or 0, attempt.ended_ns or 0]
    return max(seen)


def _end_ns(attempt: Attempt, record: RequestRecord) -> int:
    return attempt.ended_ns if attempt.ended_ns is not None else _last_ns(record)


def _since(at_ns: int | None, record: RequestRecord) -> int | None:
    return None if at_ns is None else _us(at_ns - record.opened_ns)


def _us(duration_ns: int) -> int:
    return (duration_ns + 500) // 1000
