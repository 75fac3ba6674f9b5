"""The tree of every exit, and an export that never makes anyone wait."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from telemetry import genai, trace_context
from telemetry.record import FAILURES, Outcome, RequestRecord
from telemetry.tracing import FileSink, SpanData, SpanExport, child_spans, error_type, spans_of
from tests.fakes import records

ATTEMPT = "chat gpt-4o"


def tree(record: RequestRecord) -> tuple[SpanData, dict[str, SpanData]]:
    """The root and its children by name (the last one of a name)."""
    root, *children = spans_of(record)
    return root, {child.name: child for child in children}


# --- the tree ---


@pytest.mark.parametrize("name", records.EXITS)
def test_every_exit_is_one_finished_tree(name: str) -> None:
    """One SERVER root, every parent resolves, all spans ended within the root, no id twice."""
    record = records.EXITS[name]()
    spans = spans_of(record)
    root = spans[0]
    assert [span.kind for span in spans].count("server") == 1
    assert (root.span_id, root.parent_span_id) == (record.span_id, record.parent_span_id)
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    for span in spans:
        assert span.trace_id == record.trace_id
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns
        assert span is root or span.parent_span_id in ids
        assert len(span.span_id) == 16
    assert sum(span.kind == "client" for span in spans) == len(record.attempts)
    assert sum(span.kind == "internal" for span in spans) == len(record.stages)
    assert sum(span.name == "settle" for span in spans) == any(
        stage.name == "settle" for stage in record.stages
    )


@pytest.mark.parametrize("name", records.EXITS)
def test_every_attribute_is_on_the_list(name: str) -> None:
    """No span carries a name that genai.py does not know, nor an absent value."""
    for span in spans_of(records.EXITS[name]()):
        assert span.attributes.keys() <= genai.ALLOWED
        assert None not in span.attributes.values()


@pytest.mark.parametrize("name", records.EXITS)
def test_the_tree_tells_the_outcome(name: str) -> None:
    """The root is an error exactly for failures of ours, and error.type says which."""
    record = records.EXITS[name]()
    root = spans_of(record)[0]
    assert root.is_error == (record.outcome in FAILURES)
    assert root.attributes[genai.OUTCOME] == record.outcome
    assert (genai.ERROR_TYPE in root.attributes) == (record.outcome is not Outcome.OK)


def test_spans_are_the_same_each_time() -> None:
    """Pure: a record replayed from the log gives the same ids."""
    assert spans_of(records.fell_back()) == spans_of(records.fell_back())


def test_stages_and_attempts_stand_in_order_of_time() -> None:
    """A reader sees auth, admit, route, the attempts, settle."""
    names = [span.name for span in spans_of(records.fell_back())]
    assert names == [
        *("POST /v1/chat/completions", "auth", "admit", "route", ATTEMPT, ATTEMPT, "settle"),
    ]


def test_an_attempt_says_what_the_record_says() -> None:
    """Model, usage, finish reasons, time to first chunk and exact cost of the CLIENT span."""
    _, children = tree(records.record(records.attempt()))
    span = children[ATTEMPT]
    assert span.events[0].at_ns == records.at(104)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "gpt-4o-2024-08-06",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.1,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 26,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "meterline.attempt.no": 1,
        "meterline.attempt.reason": "primary",
        "meterline.cost.amount": "0.0004975",
        "meterline.cost.currency": "USD",
        "meterline.cost.price_ids": ("openai/gpt-4o/in",),
    }
    assert expected.items() <= span.attributes.items()
    assert children["settle"].attributes[genai.COST_AMOUNT] == "0.0004975"


def test_reported_timings_are_on_the_attempt() -> None:
    """What the engine says of its own time can be read without its own spans."""
    _, children = tree(records.fell_back())
    told = children[ATTEMPT].attributes
    assert told[genai.LATENCY_IN_QUEUE] == 0.002
    assert told[genai.LATENCY_IN_PREFILL] == 0.05
    assert told[genai.LATENCY_IN_DECODE] == 0.8
    assert told[genai.DEVICE_MICROSECONDS] == 759_000


def test_whole_completions_are_named_as_the_convention_wants() -> None:
    """text_completion for the old surface; nothing of streaming on a whole answer."""
    root, children = tree(records.whole())
    assert root.name == "POST /v1/completions"
    told = children["text_completion gpt-4o"].attributes
    assert told[genai.OPERATION_NAME] == "text_completion"
    assert genai.REQUEST_STREAM not in told
    assert genai.RESPONSE_TIME_TO_FIRST_CHUNK not in told


def test_unpriced_has_no_amount() -> None:
    """An unknown price is said, and is never a number."""
    tried = records.attempt(charges=(records.charge("Output Tokens", 26, None),))
    told = tree(records.record(tried))[1][ATTEMPT].attributes
    assert told[genai.COST_UNPRICED] is True
    assert genai.COST_AMOUNT not in told


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        (Outcome.OK, 200, None),
        (Outcome.TIMEOUT, 504, "timeout"),
        (Outcome.RATE_LIMITED, 429, "429"),
        (Outcome.CLIENT_DISCONNECT, 499, "client_disconnect"),
        (Outcome.BUDGET_REFUSED, 429, "budget_exceeded"),
        (Outcome.TRUNCATED, 200, "truncated"),
        (Outcome.UPSTREAM_ERROR, 502, "502"),
        (Outcome.UPSTREAM_ERROR, None, "upstream_error"),
        (Outcome.INTERNAL_ERROR, 200, "internal_error"),
    ],
)
def test_error_types_are_few(outcome: Outcome, status: int | None, expected: str | None) -> None:
    """error.type is a status or one of our words, never a backend's text."""
    assert error_type(outcome, status) == expected


def test_what_others_wrote_is_cut_and_masked() -> None:
    """Free text of clients and backends is bounded, and keys in it do not survive."""
    record = records.record(records.attempt(error_code="Bearer abcdefgh.ijk"))
    record.asked_model = "sk-ml-public-SECRETSECRET" + "x" * 1000
    root, children = tree(record)
    assert root.attributes[genai.ASKED_MODEL] == "sk-ml-***"
    assert children[ATTEMPT].attributes[genai.ERROR_CODE] == "Bearer ***"
    record.asked_model = "y" * 1000
    assert len(str(spans_of(record)[0].attributes[genai.ASKED_MODEL])) == 256


def test_an_open_record_has_no_tree() -> None:
    """Spans are made of what has ended."""
    with pytest.raises(AssertionError):
        spans_of(records.record(ended_ns=None))


def test_names_equal_the_conventions_where_they_are_published() -> None:
    """Our constants against those of the OpenTelemetry package, as far as it has them."""
    published = {
        value
        for name, value in vars(gen_ai_attributes).items()
        if name.startswith("GEN_AI_") and isinstance(value, str)
    }
    for name in (
        *(genai.OPERATION_NAME, genai.PROVIDER_NAME, genai.REQUEST_MODEL, genai.RESPONSE_MODEL),
        *(genai.RESPONSE_FINISH_REASONS, genai.USAGE_INPUT_TOKENS, genai.USAGE_OUTPUT_TOKENS),
    ):
        assert name in published


def test_phases_hang_under_the_incoming_span() -> None:
    """Another process's phases are children of the span in its traceparent."""
    record = records.record(records.attempt())
    caller = record.attempts[0].span_id
    (stage, *_) = spans_of(record)[1:]
    header = trace_context.write(record.trace_id, caller, sampled=True)
    (span,) = child_spans(header, [stage])
    assert (span.trace_id, span.parent_span_id) == (record.trace_id, caller)
    assert (span.name, span.start_ns, span.end_ns) == (stage.name, stage.start_ns, stage.end_ns)
    assert span.span_id not in (caller, stage.span_id)


@pytest.mark.parametrize("header", [None, "nonsense", f"00-{'a' * 32}-{'b' * 16}-00"])
def test_phases_without_a_sampled_caller_are_no_spans(header: str | None) -> None:
    """The caller's sampled flag is respected; nothing is exported without a trace."""
    assert child_spans(header, spans_of(records.refused())) == []


# --- the export ---


class Sink:
    """Remembers what it was given; can be shut, or blocked."""

    def __init__(self, *, accepts: bool = True) -> None:
        self.accepts = accepts
        self.spans: list[SpanData] = []
        self.resource: Mapping[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.is_closed = False

    def write(self, spans: Sequence[SpanData], resource: Mapping[str, str], /) -> bool:
        self.entered.set()
        self.gate.wait(10)
        self.resource = resource
        if self.accepts:
            self.spans += spans
        return self.accepts

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()


class Counts:
    """The two counters of an export."""

    def __init__(self) -> None:
        self.exported = 0
        self.dropped: dict[str, int] = {}

    def on_exported(self, count: int) -> None:
        self.exported += count

    def on_dropped(self, count: int, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count


def export(sink: Sink | FileSink, counts: Counts, max_queued: int = 2048) -> SpanExport:
    return SpanExport(
        sink,
        service_name="meterline",
        service_version="1",
        instance_id="node-a",
        delay_s=0.01,
        max_queued=max_queued,
        on_exported=counts.on_exported,
        on_dropped=counts.on_dropped,
    )


def test_records_and_spans_reach_the_sink() -> None:
    """A record becomes its tree on the export thread; finished spans go through as they are."""
    sink, counts = Sink(), Counts()
    out = export(sink, counts)
    record = records.fell_back()
    out.observe(record)
    own = SpanData(
        name="queue", kind="internal", trace_id="1" * 32, span_id="2" * 16, start_ns=1, end_ns=2
    )
    assert out.emit([own])
    assert out.flush()
    assert sink.spans == [*spans_of(record), own]
    assert sink.resource == {
        "service.name": "meterline",
        "service.version": "1",
        "service.instance.id": "node-a",
    }
    out.close()
    assert counts.exported == len(sink.spans)
    assert sink.is_closed


@pytest.mark.parametrize("name", records.EXITS)
def test_only_kept_traces_are_exported(name: str) -> None:
    """With the caller's sampled flag off, failures are kept and nothing else."""
    sink, counts = Sink(), Counts()
    out = export(sink, counts)
    record = records.EXITS[name]()
    record.sampled = False
    out.observe(record)
    out.close()
    assert bool(sink.spans) == (record.outcome in FAILURES)
    assert counts.dropped == {}


def test_unknown_attributes_do_not_leave() -> None:
    """The list is enforced on spans that others made, too."""
    sink = Sink()
    out = export(sink, Counts())
    attributes = {"gen_ai.input.messages": "CANARY", genai.ENGINE_TOKENS: 3}
    out.emit(
        [
            SpanData(
                name="decode",
                kind="internal",
                trace_id="1" * 32,
                span_id="2" * 16,
                start_ns=1,
                end_ns=2,
                attributes=attributes,
            )
        ]
    )
    out.close()
    assert sink.spans[0].attributes == {genai.ENGINE_TOKENS: 3}


def test_a_full_queue_drops_and_counts_at_once() -> None:
    """With the sink stuck, emitting stays instant; what does not fit is counted."""
    sink, counts = Sink(), Counts()
    sink.gate.clear()
    out = export(sink, counts, max_queued=4)
    record = records.record(records.attempt())
    out.observe(record)
    assert sink.entered.wait(5)  # one item is with the sink, the queue is empty
    begun = time.perf_counter()
    for _ in range(10):
        out.observe(record)
    assert time.perf_counter() - begun < 0.5
    assert counts.dropped == {"queue_full": 6 * len(spans_of(record))}
    sink.gate.set()
    out.close()
    assert counts.exported == 5 * len(spans_of(record))


def test_a_refusing_sink_is_counted() -> None:
    """Spans that the destination did not take are dropped, not kept for ever."""
    counts = Counts()
    out = export(Sink(accepts=False), counts)
    out.observe(records.cut())
    assert out.flush()
    out.close()
    assert counts.dropped == {"export_failed": len(spans_of(records.cut()))}


def test_close_is_bounded_and_counts_what_is_left() -> None:
    """A sink that hangs costs the given time once; the rest is counted as lost at shutdown."""
    sink, counts = Sink(), Counts()
    sink.gate.clear()
    out = export(sink, counts)
    record = records.refused()
    out.observe(record)
    assert sink.entered.wait(5)
    out.observe(record)
    begun = time.perf_counter()
    out.close(timeout_s=0.2)
    assert time.perf_counter() - begun < 2
    assert counts.dropped == {"shutdown": len(spans_of(record))}
    out.observe(record)
    out.close()
    assert counts.dropped == {"shutdown": 2 * len(spans_of(record))}


def test_a_bad_record_does_not_end_the_thread() -> None:
    """One record that cannot be told as spans is dropped, and the next one goes out."""
    sink, counts = Sink(), Counts()
    out = export(sink, counts)
    out.observe(records.record(ended_ns=None))
    out.observe(records.refused())
    out.close()
    assert len(sink.spans) == len(spans_of(records.refused()))
    assert counts.dropped == {"export_failed": len(spans_of(records.record()))}


def test_flush_gives_up_in_time() -> None:
    """Flushing into a stuck sink returns false after its timeout."""
    sink = Sink()
    sink.gate.clear()
    out = export(sink, Counts())
    out.observe(records.refused())
    assert not out.flush(0.1)
    sink.gate.set()
    assert out.flush()
    out.close()


def test_emitting_costs_an_append() -> None:
    """What a request pays for its trace is a few microseconds of CPU."""
    out = export(Sink(), Counts(), max_queued=100_000)
    record = records.record(records.attempt())
    best_s = 1.0
    for _ in range(10):
        begun = time.thread_time()
        for _ in range(100):
            out.observe(record)
        best_s = min(best_s, (time.thread_time() - begun) / 100)
    out.close()
    assert best_s < 50e-6


# --- the file ---


def test_without_a_collector_spans_are_lines_of_a_file(tmp_path: Path) -> None:
    """One JSON object a line, folder made on the way."""
    path = tmp_path / "data" / "spans.jsonl"
    counts = Counts()
    out = export(FileSink(path), counts)
    out.observe(records.record(records.attempt()))
    out.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == counts.exported == 6
    assert {line["service"] for line in lines} == {"meterline"}
    assert lines[0]["name"] == "POST /v1/chat/completions"


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """Older files are numbered, the oldest falls off, and no file is larger than the limit."""
    sink = FileSink(tmp_path / "spans.jsonl", max_bytes=8_000, kept=2)
    batch = spans_of(records.record(records.attempt()))
    for _ in range(20):
        assert sink.write(batch, {})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["spans.jsonl", "spans.jsonl.1", "spans.jsonl.2"]
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= 8_000
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_file_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    """A folder in the file's place: the batch is dropped, nothing is raised."""
    assert not FileSink(tmp_path).write(spans_of(records.refused()), {})
