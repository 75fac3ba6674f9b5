"""W3C Trace Context: read the caller's `traceparent`, write the attempt's."""

import re

from msgspec import Struct

from telemetry.ids import new_trace_id

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(Struct, frozen=True):
    """Where our SERVER span hangs. `parent_span_id` None: we start the trace."""

    trace_id: str
    parent_span_id: str | None
    sampled: bool


def read(traceparent: str | None, *, sample_root: bool) -> TraceContext:
    """The caller's context, or a new trace when there is none or it is malformed (the
    specification says: ignore it). `sample_root` decides for traces that start here."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is not None:
        version, trace_id, parent_id, flags, rest = match.groups()
        valid = version != "ff" and (version != "00" or rest is None)
        if valid and trace_id != "0" * 32 and parent_id != "0" * 16:
            return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1))
    return TraceContext(new_trace_id(), None, sample_root)


def write(trace_id: str, span_id: str, *, sampled: bool) -> str:
    """The header of a child request."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"
