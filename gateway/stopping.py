"""What happens upstream when a client leaves: whoever generates for it is asked to stop.

A backend that can be asked (`backends.base.Cancellable`) ends its answer early and reports what
it computed, so a client that left is billed to the token. Its answer is read on for that report, as
if the client were still there: cancelling the read would close the connection that carries it. Any
other backend is cut off at once, and its usage is an estimate. Invariant: never raises, so that
the edge can always fall back to cutting.
"""

from collections.abc import Mapping

from backends.base import Cancellable
from gateway.upstreams import Upstream
from telemetry.ledger import OpenRecord

REPORT_S = 1.0  # from the client's leaving to the end of what a backend may still say


async def ask_to_stop(record: OpenRecord, upstreams: Mapping[str, Upstream]) -> bool:
    """Tell the backend of the running attempt that nobody reads on. True: its answer will end by
    itself, soon."""
    running = [attempt for attempt in record.data.attempts if attempt.ended_ns is None]
    if len(running) != 1:  # two: a hedge, before either has an answer to report on
        return False
    backend = upstreams[running[0].backend].backend
    if not isinstance(backend, Cancellable):
        return False
    return await backend.cancel(record.data.request_id)
