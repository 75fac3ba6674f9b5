"""Spans over the wire to a real OTLP receiver, and the receiver's absence."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from telemetry import genai
from telemetry.tracing import OtlpSink, SpanData, SpanExport, spans_of
from tests import services
from tests.fakes import records

CANARY = "sk-ml-k1-CANARY7f3aCANARY7f3a"


class Receiver:
    """A receiver on loopback, and what it has received."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.spans: list[Span] = []

    async def until(self, count: int) -> list[Span]:
        deadline = time.monotonic() + 15
        while len(self.spans) < count and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self.spans


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    port = services.free_port()
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port, listen_on_all_interfaces=False)
    async with OtelTapHttpProtobufReceiver(settings) as tap:
        found = Receiver(port)

        async def collect() -> None:
            async for span in tap.stream_traces():
                found.spans.append(span)

        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        yield found
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def export(endpoint: str, name: str, dropped: dict[str, int] | None = None) -> SpanExport:
    def on_dropped(count: int, reason: str) -> None:
        if dropped is not None:
            dropped[reason] = dropped.get(reason, 0) + count

    return SpanExport(
        OtlpSink(endpoint, timeout_s=1), service_name=name, delay_s=0.05, on_dropped=on_dropped
    )


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def told(span: Span) -> dict[str, object]:
    """Attributes as Python values."""
    found: dict[str, object] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        assert kind is not None
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [one.string_value for one in value.values]
        found[pair.key] = value
    return found


async def test_one_tree_with_the_engines_spans_under_the_attempt(receiver: Receiver) -> None:
    """Two processes' exports, one trace: every parent but the caller's is in it."""
    record = records.record(records.attempt())
    gateway, engine = (
        export(receiver.endpoint, "meterline"),
        export(receiver.endpoint, "meterline-engine"),
    )
    gateway.observe(record)
    steps = [
        ("queue", 10, 12),
        ("prefill", 12, 104),
        ("decode", 104, 1090),
        ("sampling", 105, 1090),
    ]
    engine.emit(
        [
            SpanData(
                name=name,
                kind="internal",
                trace_id=record.trace_id,
                span_id=f"{no:016x}",
                parent_span_id=record.attempts[0].span_id,
                start_ns=records.at(start),
                end_ns=records.at(end),
                attributes={genai.ENGINE_TOKENS: no},
            )
            for no, (name, start, end) in enumerate(steps, 0xE0)
        ]
    )
    expected = len(spans_of(record)) + len(steps)
    spans = await receiver.until(expected)
    gateway.close()
    engine.close()
    assert len(spans) == expected
    assert {span.trace_id.hex() for span in spans} == {records.TRACE_ID}
    ids = {span.span_id.hex() for span in spans}
    outside = {span.parent_span_id.hex() for span in spans} - ids
    assert outside == {records.CALLER_SPAN_ID}
    found = by_name(spans)
    attempt = found["chat gpt-4o"]
    for name, _, _ in steps:
        assert found[name].parent_span_id == attempt.span_id
    assert attempt.parent_span_id == found["POST /v1/chat/completions"].span_id


async def test_times_kinds_and_attributes_survive_the_wire(receiver: Receiver) -> None:
    """Back-dated nanoseconds, span kinds, arrays, events and the error status arrive as given."""
    out = export(receiver.endpoint, "meterline")
    out.observe(records.failed_upstream())
    out.observe(records.record(records.attempt()))
    spans = await receiver.until(len(spans_of(records.failed_upstream())) + 6)
    out.close()
    roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert sorted(root.status.code for root in roots) == [
        Status.STATUS_CODE_UNSET,
        Status.STATUS_CODE_ERROR,
    ]
    served = [span for span in spans if "gen_ai.usage.input_tokens" in told(span)]
    (attempt,) = served
    assert attempt.kind == Span.SPAN_KIND_CLIENT
    assert attempt.start_time_unix_nano == records.at(4)
    assert attempt.end_time_unix_nano == records.at(1104)
    assert attempt.events[0].time_unix_nano == records.at(104)
    assert told(attempt)["gen_ai.response.finish_reasons"] == ["stop"]
    assert told(attempt)["meterline.cost.amount"] == "0.0004975"
    assert told(attempt)["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", records.EXITS)
async def test_every_exit_arrives_as_one_tree(receiver: Receiver, name: str) -> None:
    """Whatever way a request took out, the receiver holds one finished tree of it."""
    record = records.EXITS[name]()
    out = export(receiver.endpoint, "meterline")
    out.observe(record)
    spans = await receiver.until(len(spans_of(record)))
    out.close()
    ids = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_span_id not in ids]
    assert len(spans) == len(ids) == len(spans_of(record))
    assert [root.span_id.hex() for root in roots] == [record.span_id]
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in spans)


async def test_a_planted_key_does_not_reach_the_collector(receiver: Receiver) -> None:
    """A key that a client or a backend wrote where it does not belong is masked on the way."""
    tried = records.attempt(error_code=CANARY, answered_model=CANARY, provider_request_id=CANARY)
    out = export(receiver.endpoint, "meterline")
    out.observe(records.record(tried, asked_model=CANARY, client_request_id=CANARY))
    spans = await receiver.until(6)
    out.close()
    assert len(spans) == 6
    assert b"7f3a" not in b"".join(span.SerializeToString() for span in spans)


def test_without_a_receiver_nothing_waits_and_losses_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody listens: emitting stays instant, closing is bounded, each span is counted once."""
    dropped: dict[str, int] = {}
    out = export(f"http://127.0.0.1:{services.free_port()}", "meterline", dropped)
    record = records.record(records.attempt())
    begun = time.perf_counter()
    for _ in range(200):
        out.observe(record)
    assert time.perf_counter() - begun < 1
    begun = time.perf_counter()
    out.close(timeout_s=2)
    assert time.perf_counter() - begun < 6
    assert sum(dropped.values()) == 200 * len(spans_of(record))
    own = [one for one in caplog.records if one.name.startswith("meterline")]
    assert len(own) < 20


async def test_an_export_recovers_when_the_receiver_comes(receiver: Receiver) -> None:
    """Losses end with the outage: what is emitted afterwards arrives."""
    dropped: dict[str, int] = {}
    port = services.free_port()
    out = export(f"http://127.0.0.1:{port}", "meterline", dropped)
    out.observe(records.refused())
    assert await asyncio.to_thread(out.flush, 10)
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port, listen_on_all_interfaces=False)
    async with OtelTapHttpProtobufReceiver(settings) as tap:
        arrived = asyncio.create_task(
            tap.await_trace(lambda span: span.name == "settle", timeout=10)
        )
        await asyncio.sleep(0)
        out.observe(records.record(records.attempt()))
        assert (await arrived).name == "settle"
    out.close()
    assert dropped == {"export_failed": len(spans_of(records.refused()))}
