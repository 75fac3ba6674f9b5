"""The phases of one job as spans, built once at its end from stamps.

Only the conversion lives here; whoever starts the engine passes an `Emit` that knows how to send
them, under the incoming `traceparent`. It is called on the engine thread and must not block.
"""

from collections.abc import Callable

from msgspec import Struct

from backends.engine.types import Job

Attribute = str | int | float | bool


class PhaseSpan(Struct, frozen=True, kw_only=True):
    """Nanoseconds since the epoch, back-dated."""

    name: str  # queue | prefill | decode | sampling
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute]


Emit = Callable[[str | None, list[PhaseSpan]], None]
"""`emit(traceparent, spans)`."""


def discard(traceparent: str | None, spans: list[PhaseSpan]) -> None:
    """For an engine whose spans nobody wants."""


def phase_spans(job: Job) -> list[PhaseSpan]:
    """The phases that happened: a job cancelled in the queue has one span.

    `sampling` is an aggregate: it starts with the first token and is as long as all samplings."""
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
                    "gen_ai.usage.input_tokens": _prompt_tokens(job),
                    "meterline.device_us": charged.get("prefill", 0) + charged.get("recompute", 0),
                    "meterline.cached_tokens": sum(
                        s.cached_tokens for s in job.sequences[:: job.request.n]
                    ),
                    "meterline.preemptions": job.preemptions,
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
                    "gen_ai.usage.output_tokens": output,
                    "meterline.device_us": charged.get("decode", 0),
                    "meterline.batch.mean": round(clocks.neighbours / max(1, clocks.steps), 3),
                },
            )
        )
        spans.append(
            _span(
                "sampling",
                first,
                first + clocks.sampling_ns,
                {"meterline.aggregated": True, "meterline.device_us": charged.get("sampling", 0)},
            )
        )
    return spans


def _prompt_tokens(job: Job) -> int:
    return sum(len(prompt) for prompt in job.request.prompts)


def _span(name: str, start: int, end: int, attributes: dict[str, Attribute]) -> PhaseSpan:
    return PhaseSpan(name=name, start_ns=start, end_ns=max(start, end), attributes=attributes)
