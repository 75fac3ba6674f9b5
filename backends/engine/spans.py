"""The phases of one job as spans, built once at its end from stamps.

Whoever starts the engine passes an `Emit` that sends them under the incoming `traceparent`. It is
called on the engine thread and must not block. All spans lie within the job's own life, so within
the attempt of whoever sent it.
"""

from collections.abc import Callable

from msgspec import Struct

from backends.engine.types import Job
from telemetry import genai
from telemetry.tracing import SpanExport, child_spans

MAX_AWAY = 32
Attribute = str | int | float | bool


class PhaseSpan(Struct, frozen=True, kw_only=True):
    """Nanoseconds since the epoch, back-dated."""

    name: str  # queue | prefill | decode | sampling | preempted | swapped
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute]


Emit = Callable[[str | None, list[PhaseSpan]], None]
"""`emit(traceparent, spans)`."""


def discard(traceparent: str | None, spans: list[PhaseSpan]) -> None:
    """For an engine whose spans nobody wants."""


def exporting(export: SpanExport) -> Emit:
    """An `Emit` into a queue that another thread empties."""

    def emit(traceparent: str | None, spans: list[PhaseSpan]) -> None:
        export.emit(child_spans(traceparent, spans))

    return emit


def phase_spans(job: Job) -> list[PhaseSpan]:
    """The phases that happened: a job cancelled in the queue has one span. `preempted` and
    `swapped` lie within prefill or decode: time that a choice waited without its place, the first
    `MAX_AWAY` of them.

    `sampling` is an aggregate: as long as all samplings together, and it ends with the last token,
    so that it lies between admission and end."""
    clocks = job.clocks
    end = clocks.finished_ns
    admitted, first = clocks.admitted_ns or end, clocks.first_token_ns or end
    charged = clocks.device_us
    spans = [_span("queue", clocks.arrived_ns, admitted, {})]
    if clocks.admitted_ns:
        spans.append(
            _span(
                "prefill",
                admitted,
                first,
                {
                    genai.USAGE_INPUT_TOKENS: _prompt_tokens(job),
                    genai.DEVICE_MICROSECONDS: charged.get("prefill", 0)
                    + charged.get("recompute", 0),
                    genai.ENGINE_CACHED_TOKENS: job.cached_tokens,
                    genai.PREEMPTIONS: job.preemptions,
                },
            )
        )
    if clocks.first_token_ns:
        last = clocks.last_token_ns
        output = sum(sequence.n_output for sequence in job.sequences)
        spans.append(
            _span(
                "decode",
                first,
                last,
                {
                    genai.USAGE_OUTPUT_TOKENS: output,
                    genai.DEVICE_MICROSECONDS: charged.get("decode", 0),
                    genai.ENGINE_KV_BLOCK_SECONDS: round(clocks.kv_block_us / 1e6, 6),
                    genai.ENGINE_BATCH_MEAN: round(clocks.neighbours / max(1, clocks.steps), 3),
                },
            )
        )
        spans.append(
            _span(
                "sampling",
                max(admitted, last - clocks.sampling_ns),
                last,
                {
                    genai.ENGINE_AGGREGATED: True,
                    genai.DEVICE_MICROSECONDS: charged.get("sampling", 0),
                },
            )
        )
    spans += [_span(a.kind, a.start_ns, a.end_ns, {}) for a in clocks.away[:MAX_AWAY]]
    return spans


def _prompt_tokens(job: Job) -> int:
    return sum(len(prompt) for prompt in job.request.prompts)


def _span(name: str, start: int, end: int, attributes: dict[str, Attribute]) -> PhaseSpan:
    return PhaseSpan(name=name, start_ns=start, end_ns=max(start, end), attributes=attributes)
