"""Spans, built after the fact from the settled record, and their way out of the process.

A live SDK span costs 50 µs of the request; here the request only leaves its time stamps in the
record. `spans_of` is pure and gives the finished tree; `SpanExport` queues it, and a thread of its
own turns it into OTLP or JSON lines. No request ever waits for it: a full queue or a dead collector
loses spans and counts them. No content, no secret, and no attribute outside `genai.ALLOWED` leaves;
a child request gets our `traceparent` alone, never the caller's `tracestate` or `baggage`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telemetry import genai, trace_context
from telemetry.ids import new_span_id
from telemetry.money import EXACT, plain
from telemetry.record import FAILURES, SURFACE_PATHS, Attempt, Outcome, RequestRecord, Stage
from telemetry.redaction import mask

log = logging.getLogger("meterline.spans")

AttributeValue = str | bool | int | float | tuple[str, ...]
Kind = Literal["server", "client", "internal"]

MAX_TEXT = 256  # characters of one attribute

_OPERATIONS: Mapping[str, str] = {"completions": "text_completion", "embeddings": "embeddings"}


class SpanEvent(Struct, frozen=True, gc=False):
    """A moment within a span."""

    name: str
    at_ns: int


class SpanData(Struct, frozen=True, kw_only=True):
    """One finished span. Ids in hexadecimal, times in nanoseconds since the epoch."""

    name: str
    kind: Kind
    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int
    parent_span_id: str | None = None
    attributes: Mapping[str, AttributeValue] = {}
    events: tuple[SpanEvent, ...] = ()
    is_error: bool = False


# --- From the record ------------------------------------------------------------------------------


def spans_of(record: RequestRecord) -> list[SpanData]:
    """The tree of one settled request, root first. Pure: the same record gives the same ids.

    Every span lies within the root. An attempt that nobody closed ends with the request."""
    ended_ns = record.ended_ns
    assert ended_ns is not None, "only a settled record has a finished tree"
    children = [_stage_span(record, no, stage, ended_ns) for no, stage in enumerate(record.stages)]
    children += [_attempt_span(record, attempt, ended_ns) for attempt in record.attempts]
    children.sort(key=lambda span: span.start_ns)
    return [_root_span(record, ended_ns), *children]


class Phase(Protocol):
    """A finished phase of work that was done under a caller's span."""

    @property
    def name(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, str | int | float | bool]: ...


def child_spans(traceparent: str | None, phases: Iterable[Phase]) -> list[SpanData]:
    """The phases as spans under the incoming `traceparent`. None without a caller, or if the
    caller's trace is not sampled: alone they would tell nothing."""
    caller = trace_context.read(traceparent, sample_root=False)
    if caller.parent_span_id is None or not caller.sampled:
        return []
    return [
        SpanData(
            name=phase.name,
            kind="internal",
            trace_id=caller.trace_id,
            span_id=new_span_id(),
            parent_span_id=caller.parent_span_id,
            start_ns=phase.start_ns,
            end_ns=phase.end_ns,
            attributes=dict(phase.attributes),
        )
        for phase in phases
    ]


def error_type(outcome: Outcome | None, status: int | None) -> str | None:
    """`error.type`: few values, whatever the backend wrote. None: it did not fail."""
    match outcome:
        case Outcome.OK | None:
            return None
        case Outcome.BUDGET_REFUSED:
            return "budget_exceeded"
        case Outcome.TIMEOUT | Outcome.TRUNCATED | Outcome.CLIENT_DISCONNECT | Outcome.ABANDONED:
            return outcome.value
        case _:
            return str(status) if status is not None and status >= 400 else outcome.value


def _root_span(record: RequestRecord, ended_ns: int) -> SpanData:
    path = SURFACE_PATHS[record.surface]
    return SpanData(
        name=f"POST {path}",
        kind="server",
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_span_id=record.parent_span_id,
        start_ns=record.opened_ns,
        end_ns=max(ended_ns, record.opened_ns),
        is_error=record.outcome in FAILURES,
        attributes=_present(
            {
                genai.HTTP_METHOD: "POST",
                genai.HTTP_ROUTE: path,
                genai.URL_PATH: path,
                genai.HTTP_STATUS: record.status,
                genai.ERROR_TYPE: error_type(record.outcome, record.status),
                genai.ERROR_CODE: record.error_code,
                genai.REQUEST_ID: record.request_id,
                genai.CLIENT_REQUEST_ID: record.client_request_id,
                genai.TENANT_ID: record.tenant_id,
                genai.KEY_ID: record.key_id,
                genai.ASKED_MODEL: record.asked_model,
                genai.STREAM: record.stream,
                genai.OUTCOME: None if record.outcome is None else record.outcome.value,
                genai.ATTEMPTS: len(record.attempts),
                genai.STREAM_CHUNKS: record.chunks if record.stream else None,
                genai.STREAM_BYTES: record.content_bytes if record.stream else None,
            }
        ),
    )


def _stage_span(record: RequestRecord, no: int, stage: Stage, ended_ns: int) -> SpanData:
    start_ns, end_ns = _within(record, ended_ns, stage.start_ns, stage.end_ns)
    return SpanData(
        name=stage.name,
        kind="internal",
        trace_id=record.trace_id,
        span_id=_child_id(record.span_id, no, stage.name),
        parent_span_id=record.span_id,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_cost(record.attempts) if stage.name == "settle" else {},
    )


def _attempt_span(record: RequestRecord, attempt: Attempt, ended_ns: int) -> SpanData:
    operation = _OPERATIONS.get(record.surface, "chat")
    start_ns, end_ns = _within(
        record,
        ended_ns,
        attempt.started_ns,
        ended_ns if attempt.ended_ns is None else attempt.ended_ns,
    )
    first_ns = attempt.first_token_ns
    outcome = attempt.outcome or record.outcome
    events = () if first_ns is None else (SpanEvent(genai.EVENT_FIRST_CHUNK, first_ns),)
    time_to_first_s = None if first_ns is None else (first_ns - attempt.started_ns) / 1e9
    return SpanData(
        name=f"{operation} {attempt.model}",
        kind="client",
        trace_id=record.trace_id,
        span_id=attempt.span_id,
        parent_span_id=record.span_id,
        start_ns=start_ns,
        end_ns=end_ns,
        events=events,
        is_error=outcome not in (Outcome.OK, Outcome.CLIENT_DISCONNECT),
        attributes=_present(
            {
                genai.OPERATION_NAME: operation,
                genai.PROVIDER_NAME: attempt.provider,
                genai.REQUEST_MODEL: attempt.model,
                genai.REQUEST_STREAM: True if record.stream else None,
                genai.RESPONSE_MODEL: attempt.answered_model,
                genai.RESPONSE_FINISH_REASONS: attempt.finish_reasons or None,
                genai.RESPONSE_TIME_TO_FIRST_CHUNK: time_to_first_s if record.stream else None,
                genai.OPENAI_RESPONSE_SERVICE_TIER: attempt.service_tier,
                genai.HTTP_STATUS: attempt.http_status,
                genai.ERROR_TYPE: error_type(outcome, attempt.http_status),
                genai.ERROR_CODE: attempt.error_code,
                genai.ATTEMPT_NO: attempt.attempt_no,
                genai.ATTEMPT_REASON: attempt.reason,
                genai.BACKEND: attempt.backend,
                genai.PROVIDER_REQUEST_ID: attempt.provider_request_id,
                **_usage(attempt),
                **_timings(attempt),
                **_cost([attempt]),
            }
        ),
    )


def _usage(attempt: Attempt) -> dict[str, AttributeValue | None]:
    usage = attempt.usage
    if usage is None:
        return {}
    return {
        genai.USAGE_INPUT_TOKENS: usage.input_tokens,
        genai.USAGE_OUTPUT_TOKENS: usage.output_tokens,
        genai.USAGE_CACHE_READ: usage.in_cached_read or None,
        genai.USAGE_CACHE_CREATION: (usage.in_cache_write_5m + usage.in_cache_write_1h) or None,
        genai.USAGE_REASONING: usage.out_reasoning or None,
        genai.USAGE_SOURCE: attempt.usage_source.value,
        genai.USAGE_QUALITY: attempt.usage_quality.value,
    }


def _timings(attempt: Attempt) -> dict[str, AttributeValue | None]:
    timings = attempt.timings
    if timings is None:
        return {}
    return {
        genai.LATENCY_IN_QUEUE: timings.queue_s,
        genai.LATENCY_IN_PREFILL: timings.prefill_s,
        genai.LATENCY_IN_DECODE: timings.decode_s,
        genai.PREEMPTIONS: timings.preemptions,
        genai.DEVICE_MICROSECONDS: None if timings.device_us is None else timings.device_us.total,
    }


def _cost(attempts: Sequence[Attempt]) -> dict[str, AttributeValue]:
    """The exact amount as text; without it, `unpriced`, if any line has no price."""
    charges = [charge for attempt in attempts for charge in attempt.charges]
    if not charges:
        return {}
    price_ids = dict.fromkeys(charge.price_id for charge in charges if charge.price_id is not None)
    told: dict[str, AttributeValue] = {genai.COST_CURRENCY: charges[0].currency}
    if price_ids:
        told[genai.COST_PRICE_IDS] = tuple(price_ids)
    total = Decimal(0)
    for charge in charges:
        if charge.amount is None:
            return {**told, genai.COST_UNPRICED: True}
        total = EXACT.add(total, charge.amount)
    return {**told, genai.COST_AMOUNT: plain(total)}


def _present(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Without the absent ones; text that others chose is cut and searched for credentials."""
    return {
        name: mask(value[:MAX_TEXT]) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }


def _within(record: RequestRecord, ended_ns: int, start_ns: int, end_ns: int) -> tuple[int, int]:
    low = min(max(start_ns, record.opened_ns), ended_ns)
    return low, max(low, min(end_ns, ended_ns))


def _child_id(root_span_id: str, no: int, name: str) -> str:
    return blake2b(f"{root_span_id}/{no}/{name}".encode(), digest_size=8).hexdigest()


# --- Out of the process ---------------------------------------------------------------------------


class SpanSink(Protocol):
    """Where batches go. Called by the export thread only, but for `close`, which may come from
    another thread while a `write` is under way and must make it return soon."""

    def write(self, spans: Sequence[SpanData], resource: Mapping[str, str], /) -> bool:
        """Whether they were all accepted. Never raises for an unreachable destination."""
        ...

    def close(self) -> None: ...


class OtlpSink:
    """OTLP over HTTP with protobuf, to `endpoint`/v1/traces. Retries within `timeout_s`."""

    def __init__(self, endpoint: str, *, timeout_s: float = 5.0) -> None:
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=timeout_s
        )
        self._resource: Resource | None = None

    def write(self, spans: Sequence[SpanData], resource: Mapping[str, str], /) -> bool:
        if self._resource is None:
            self._resource = Resource.create(dict(resource))
        readable = [_readable(span, self._resource) for span in spans]
        return self._exporter.export(readable) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # library


class FileSink:
    """JSON lines in a local file, one span a line; `path`.1 … `path`.`kept` are the older ones.

    Bounded: at most (`kept` + 1) × `max_bytes` on the disk."""

    def __init__(self, path: Path, *, max_bytes: int = 16 * 2**20, kept: int = 3) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._encoder = msgspec.json.Encoder()

    def write(self, spans: Sequence[SpanData], resource: Mapping[str, str], /) -> bool:
        service = resource.get(genai.SERVICE_NAME, "")
        lines = [
            self._encoder.encode({"service": service, **msgspec.structs.asdict(span)})
            for span in spans
        ]
        data = b"\n".join(lines) + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size + len(data) > self._max_bytes:
                self._rotate()
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            log.warning("span_file_failed", extra={"path": str(self.path), "why": error.strerror})
            return False
        return True

    def close(self) -> None:
        """Nothing is held open between writes."""

    def _rotate(self) -> None:
        for no in range(self._kept, 0, -1):
            older = self._numbered(no - 1)
            if older.exists():
                older.replace(self._numbered(no))
        self.path.unlink(missing_ok=True)

    def _numbered(self, no: int) -> Path:
        return self.path if no == 0 else self.path.with_name(f"{self.path.name}.{no}")


class SpanExport:
    """A bounded queue and the thread that empties it.

    `emit` and `observe` cost an append and never wait; they may be called from any thread.
    Items are requests, so the queue is bounded by them; what does not fit is dropped and
    counted. `close` gives the thread `timeout_s` to finish and then drops what is left."""

    def __init__(
        self,
        sink: SpanSink,
        *,
        service_name: str,
        service_version: str = "",
        instance_id: str = "",
        max_queued: int = 2048,
        items_per_batch: int = 64,
        delay_s: float = 0.5,
        on_exported: Callable[[int], None] = lambda count: None,
        on_dropped: Callable[[int, str], None] = lambda count, reason: None,
    ) -> None:
        resource = {
            genai.SERVICE_NAME: service_name,
            genai.SERVICE_VERSION: service_version,
            genai.SERVICE_INSTANCE_ID: instance_id,
        }
        self._resource = {name: value for name, value in resource.items() if value}
        self._sink = sink
        self._max_queued = max_queued
        self._items_per_batch = items_per_batch
        self._delay_s = delay_s
        self._on_exported = on_exported
        self._on_dropped = on_dropped
        self._queue: deque[Sequence[SpanData] | RequestRecord] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_urgent = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def emit(self, spans: Sequence[SpanData]) -> bool:
        """Hand over finished spans. False: dropped."""
        return self._put(spans, len(spans)) if spans else True

    def observe(self, record: RequestRecord) -> None:
        """Hand over a settled record, if its trace is kept. Its spans are built by the thread, so
        nobody may change it any more."""
        if record.keeps_trace:
            self._put(record, _span_count(record))

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that is queued has been tried. False: the time was not enough."""
        with self._changed:
            self._is_urgent = bool(self._queue)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Export what is queued, for at most about `timeout_s`, and stop. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            left = sum(_span_count(item) for item in self._queue)
            self._queue.clear()
        self._sink.close()  # interrupts an export that is waiting to try again
        self._thread.join(1.0)
        if left:
            self._on_dropped(left, "shutdown")

    def _put(self, item: Sequence[SpanData] | RequestRecord, count: int) -> bool:
        with self._changed:
            reason = "shutdown" if self._is_closed else "queue_full"
            fits = not self._is_closed and len(self._queue) < self._max_queued
            if fits:
                self._queue.append(item)
                if len(self._queue) in (1, self._items_per_batch):
                    self._changed.notify_all()
        if not fits:
            self._on_dropped(count, reason)
        return fits

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                accepted = self._sink.write(batch, self._resource)
            except Exception:
                log.warning("span_export_failed", exc_info=True)
                accepted = False
            if accepted:
                self._on_exported(len(batch))
            else:
                log.warning("spans_dropped", extra={"spans": len(batch)})
                self._on_dropped(len(batch), "export_failed")

    def _next_batch(self) -> list[SpanData]:
        """Wait for spans. Empty: closed, and nothing is left."""
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                self._changed.wait_for(self._has_reason, self._delay_s)
                if not self._queue:
                    return []
                count = min(len(self._queue), self._items_per_batch)
                items = [self._queue.popleft() for _ in range(count)]
                self._is_urgent = self._is_urgent and bool(self._queue)
                self._is_busy = True
            batch = [span for item in items for span in self._allowed(item)]
            if batch:
                return batch

    def _has_reason(self) -> bool:
        """Whether to export now rather than wait for the batch to grow."""
        return self._is_closed or self._is_urgent or len(self._queue) >= self._items_per_batch

    def _allowed(self, item: Sequence[SpanData] | RequestRecord) -> list[SpanData]:
        """The item's spans without attributes that are on no list."""
        try:
            spans = spans_of(item) if isinstance(item, RequestRecord) else item
            return [_with_allowed(span) for span in spans]
        except Exception:
            log.warning("spans_not_built", exc_info=True)
            self._on_dropped(_span_count(item), "export_failed")
            return []


def _span_count(item: Sequence[SpanData] | RequestRecord) -> int:
    if isinstance(item, RequestRecord):
        return 1 + len(item.stages) + len(item.attempts)
    return len(item)


def _with_allowed(span: SpanData) -> SpanData:
    unknown = span.attributes.keys() - genai.ALLOWED
    if not unknown:
        return span
    log.warning("span_attribute_unknown", extra={"attributes": sorted(unknown)})
    kept = {name: span.attributes[name] for name in span.attributes if name not in unknown}
    return msgspec.structs.replace(span, attributes=kept)


_KINDS: Mapping[Kind, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("meterline")


def _readable(span: SpanData, resource: Resource) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)
    parent = None
    if span.parent_span_id is not None:
        parent = _context(trace_id, span.parent_span_id, is_remote=span.kind == "server")
    return ReadableSpan(
        name=span.name,
        context=_context(trace_id, span.span_id, is_remote=False),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(event.name, timestamp=event.at_ns) for event in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR) if span.is_error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: int, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
