"""Open a record for every request and settle it exactly once, whatever exit the request takes.

`Ledger.open` costs memory only. `OpenRecord.intend` is the promise: it stands in the write-ahead
log before anything happens upstream. `OpenRecord.close` is synchronous, so no cancellation can come
between the end of a request and its settlement. Nothing here knows HTTP, databases or prices:
rating and observing are functions that were passed in, and their failures never lose a settlement.
"""

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from telemetry.clock import Clock
from telemetry.ids import RequestId, new_request_id, new_span_id
from telemetry.ledger import entries
from telemetry.ledger.errors import WalUnavailable
from telemetry.ledger.estimate import end_attempts, fill_usage
from telemetry.ledger.progress import ProgressSlots, Slot
from telemetry.ledger.wal import WriteAheadLog
from telemetry.record import (
    Attempt,
    AttemptReason,
    Charge,
    Outcome,
    RequestRecord,
    Stage,
    Surface,
)
from telemetry.trace_context import TraceContext

log = logging.getLogger(__name__)

Rate = Callable[[Attempt], tuple[Charge, ...]]
Observer = Callable[[RequestRecord], None]


class Ledger:
    """The books of one process. `observers` see each settled record, in order.

    Counters: `opened`, `admitted`, `settled`, `in_flight`; `opened == settled + in_flight` always.
    `rate_errors` and `observer_errors` count defects."""

    def __init__(
        self,
        *,
        wal: WriteAheadLog,
        rate: Rate,
        clock: Clock,
        node: str | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.wal = wal
        self.node = node or wal.node
        self.opened = 0
        self.admitted = 0
        self.settled = 0
        self.rate_errors = 0
        self.observer_errors = 0
        self._rate = rate
        self._clock = clock
        self.observers = list(observers)  # called with each settled record; may be added to
        self._open: dict[str, OpenRecord] = {}
        self._slots = ProgressSlots(wal.folder, wal.boot, allocate=wal.disk.allocate)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def count(self, surface: str, *, streams: bool = False) -> int:
        """Open records of a surface; `streams`: those that have begun to stream."""
        return sum(
            record.data.surface == surface
            and (not streams or (record.data.stream and record.data.served is not None))
            for record in self._open.values()
        )

    def open(
        self,
        *,
        surface: Surface,
        trace: TraceContext,
        deadline_s: float,
        request_id: RequestId | None = None,
        client_request_id: str | None = None,
    ) -> "OpenRecord":
        """Start a record, in memory only. It must be closed; `expire` closes what was forgotten."""
        now_ns = self._clock.now_ns()
        data = RequestRecord(
            request_id=request_id or new_request_id(now_ns),
            node=self.node,
            surface=surface,
            opened_ns=now_ns,
            deadline_ns=now_ns + round(deadline_s * 1e9),
            trace_id=trace.trace_id,
            span_id=new_span_id(),
            parent_span_id=trace.parent_span_id,
            sampled=trace.sampled,
            client_request_id=entries.clip(client_request_id),
        )
        record = OpenRecord(self, data, self._clock)
        self._open[data.request_id] = record
        self.opened += 1
        return record

    def expire(self, *, grace_s: float) -> int:
        """Close records of this process that nobody closed although their deadline has passed by
        `grace_s`. Each is a defect elsewhere: it is settled as abandoned and counted."""
        limit_ns = self._clock.now_ns() - round(grace_s * 1e9)
        late = [record for record in self._open.values() if record.data.deadline_ns < limit_ns]
        for record in late:
            log.error("a record was never closed", extra={"request_id": record.data.request_id})
            record.close(outcome=Outcome.ABANDONED, status=None, error_code="abandoned")
        return len(late)

    def close(self) -> None:
        """Close the log and unmap the progress slots. What is still open, or could not be written,
        stays in them: the sweeper of the next process settles it."""
        self.wal.close()
        self._slots.close(keep=bool(self._open) or self.wal.waiting > 0)

    def claim_slot(self, request_id: RequestId) -> Slot:
        try:
            return self._slots.claim(request_id)
        except OSError as error:
            raise WalUnavailable(f"no room for progress slots: {error.strerror}") from None

    def settle(self, record: "OpenRecord", slot: Slot | None) -> None:
        """Rate, log and show a record that has just ended."""
        data = record.data
        for attempt in data.attempts:
            attempt.charges = self._rated(attempt)
        assert data.ended_ns is not None, "`close` says when it ended"
        now_ns = record.now_ns()
        data.stages.append(Stage("settle", data.ended_ns, now_ns))
        data.ended_ns = now_ns
        if record.is_logged or record.is_admitted:
            self.wal.append_settlement(
                entries.pack(
                    entries.Settlement(data.request_id, record.is_admitted, entries.to_json(data))
                ),
                admitted=record.is_admitted,
                on_written=_nothing if slot is None else slot.release,
            )
        self._open.pop(data.request_id, None)
        self.settled += 1
        for observer in self.observers:
            self._observe(observer, data)

    def _rated(self, attempt: Attempt) -> tuple[Charge, ...]:
        charges, failed = rate_or_unrated(self._rate, attempt)
        self.rate_errors += failed
        return charges

    def _observe(self, observer: Observer, data: RequestRecord) -> None:
        try:
            observer(data)
        except Exception:
            self.observer_errors += 1
            log.exception("an observer failed", extra={"request_id": data.request_id})


class OpenRecord:
    """One request until it is settled. Mutate `data` freely before `close`, never after."""

    __slots__ = (
        *("_clock", "_ledger", "_offset_ns", "_slot"),
        *("data", "is_admitted", "is_closed", "is_logged"),
    )

    def __init__(self, ledger: Ledger, data: RequestRecord, clock: Clock) -> None:
        self.data = data
        self.is_admitted = False
        self.is_closed = False
        self.is_logged = True  # False, and nothing was admitted: counted, and no row is written
        self._ledger = ledger
        self._clock = clock
        self._offset_ns = data.opened_ns - clock.monotonic_ns()
        self._slot: Slot | None = None

    def now_ns(self) -> int:
        """Nanoseconds since the epoch that never step inside a request."""
        return self._offset_ns + self._clock.monotonic_ns()

    def remaining_s(self) -> float:
        """Seconds until the deadline; negative when it has passed."""
        return (self.data.deadline_ns - self.now_ns()) / 1e9

    def stage(self, name: str) -> "_StageTimer":
        """Time one pipeline stage: `with record.stage("auth"): …`. Kept also if it raises."""
        return _StageTimer(self, name)

    def intend(self) -> None:
        """Log the intent: from here on exactly one settlement, `kill -9` included.

        Raises WalUnavailable, and then the request must be refused: nothing was promised. What is
        known by now (tenant, key, model, estimates, attempts) is what a crash would be billed by.
        """
        if self.is_admitted:
            return
        if self.is_closed:  # expired while it was waiting: a second life would be a second bill
            raise WalUnavailable("the request is settled already")
        data = self.data
        data.asked_model = entries.clip(data.asked_model)
        slot = self._ledger.claim_slot(data.request_id)
        try:
            self._ledger.wal.append_intent(
                entries.pack(
                    entries.Intent(
                        self._ledger.wal.boot,
                        data.request_id,
                        data.deadline_ns,
                        entries.to_json(data),
                    )
                )
            )
        except WalUnavailable as error:
            if not error.logged:
                slot.release()
                raise
            self._admit(slot)
            raise
        self._admit(slot)

    def _admit(self, slot: Slot) -> None:
        self._slot = slot
        self.is_admitted = True
        self._ledger.admitted += 1

    def attempt(self, *, backend: str, provider: str, model: str, reason: AttemptReason) -> Attempt:
        """Start an attempt. After `intend` it is logged, so that a crash knows who was asked."""
        data = self.data
        attempt = Attempt(
            attempt_no=len(data.attempts) + 1,
            reason=reason,
            backend=backend,
            provider=provider,
            model=model,
            span_id=new_span_id(),
            started_ns=self.now_ns(),
        )
        data.attempts.append(attempt)
        if self.is_admitted and not self.is_closed:
            self._ledger.wal.append_attempts(
                entries.pack(entries.Attempts(data.request_id, entries.to_json(data.attempts)))
            )
        return attempt

    def saw_chunk(self, content_bytes: int, attempt: Attempt | None = None) -> None:
        """Count one chunk of content as it is read from upstream (0 bytes: no content, nothing to
        count) and keep the count where a killed process leaves it. `attempt`: the one that sent
        it; default the last one."""
        if content_bytes <= 0:
            return
        data = self.data
        data.chunks += 1
        data.content_bytes += content_bytes
        if not data.attempts:
            return
        served = attempt or data.attempts[-1]
        now_ns = self._offset_ns + self._clock.monotonic_ns()
        if served.first_token_ns is None:
            served.first_token_ns = now_ns
        if self._slot is not None:
            self._slot.saw(
                served.attempt_no, data.chunks, data.content_bytes, served.first_token_ns, now_ns
            )

    def close(self, *, outcome: Outcome, status: int | None, error_code: str | None = None) -> None:
        """Settle. The first call wins; later ones do nothing. Never raises, never awaits."""
        if self.is_closed:
            return
        self.is_closed = True
        data = self.data
        data.ended_ns = self.now_ns()
        data.outcome = outcome
        data.status = status
        data.error_code = error_code
        data.asked_model = entries.clip(data.asked_model)
        for attempt in data.attempts:
            attempt.answered_model = entries.clip(attempt.answered_model)
            attempt.provider_request_id = entries.clip(attempt.provider_request_id)
        end_attempts(data, outcome=outcome, ended_ns=data.ended_ns)
        fill_usage(data)
        slot, self._slot = self._slot, None
        self._ledger.settle(self, slot)


class _StageTimer:
    __slots__ = ("_name", "_record", "_start_ns")

    def __init__(self, record: OpenRecord, name: str) -> None:
        self._record = record
        self._name = name
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = self._record.now_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        record = self._record
        record.data.stages.append(Stage(self._name, self._start_ns, record.now_ns()))


def rate_or_unrated(rate: Rate, attempt: Attempt) -> tuple[tuple[Charge, ...], bool]:
    """The attempt's charges. If rating fails, one unpriced line (alarmed, never silently zero) and
    True."""
    try:
        return rate(attempt), False
    except Exception:
        log.exception("rating failed", extra={"model": attempt.model, "backend": attempt.backend})
        tokens = 0 if attempt.usage is None else attempt.usage.total_tokens
        unrated = Charge(meter="unrated", quantity=tokens, unit=1, unit_price=None, amount=None)
        return (unrated,), True


def _nothing() -> None:
    return None
