"""Settle what nobody settled: requests of dead processes, and of nodes that never came back.

A swept request is settled through the log like any other, by the owner of the dead process's
folder, so it has exactly one settlement even if the sweeper dies half-way: it sweeps only what the
database shows as open after everything on the log was shipped. The estimate is deterministic: the
intent, the attempts that were started, and the progress slot that the dead process left.
"""

import logging
from pathlib import Path

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.clock import Clock
from telemetry.ledger import entries, rows
from telemetry.ledger.errors import WalUnavailable
from telemetry.ledger.estimate import end_attempts, fill_usage
from telemetry.ledger.progress import Progress, read_slots, slot_files
from telemetry.ledger.record import Rate, rate_or_unrated
from telemetry.ledger.shipper import INTENTS
from telemetry.ledger.wal import WriteAheadLog
from telemetry.record import Outcome, RequestRecord

log = logging.getLogger(__name__)


class OpenIntent(Struct, frozen=True):
    """An intent that the database shows as open."""

    request_id: str
    boot: str
    record: str


def abandoned(intent: RequestRecord, progress: Progress | None) -> RequestRecord:
    """The settlement of a request whose process died. Mutates and returns `intent`.

    Input is the estimate made at admission, billed only if content was read; output is what was
    read from the backend before the end, which the progress slot knows. Without a slot (it was on
    another machine) nothing is known to have been generated, and nothing is invented."""
    ended_ns = max(
        [intent.opened_ns, *(attempt.started_ns for attempt in intent.attempts)],
    )
    if progress is not None and progress.chunks:
        ended_ns = max(ended_ns, progress.last_ns)
        intent.chunks = progress.chunks
        intent.content_bytes = progress.content_bytes
        for attempt in intent.attempts:
            if attempt.attempt_no == progress.attempt_no:
                attempt.first_token_ns = progress.first_ns
    intent.ended_ns = ended_ns
    intent.outcome = Outcome.ABANDONED
    intent.error_code = "abandoned"
    end_attempts(intent, outcome=Outcome.ABANDONED, ended_ns=ended_ns)
    fill_usage(intent)
    return intent


class Sweeper:
    """Appends settlements for abandoned requests to the log that it was given.

    Call only after that log was shipped completely. `swept` counts."""

    def __init__(self, engine: AsyncEngine, *, rate: Rate, clock: Clock) -> None:
        self.swept = 0
        self._engine = engine
        self._rate = rate
        self._clock = clock

    async def sweep_dead(self, wal: WriteAheadLog) -> int:
        """Settle the open intents of earlier processes on this folder. Whoever holds the folder
        knows that they are gone."""
        if wal.trouble is not None:
            raise WalUnavailable(wal.trouble)
        opened = await self._open_intents(INTENTS.c.node == wal.node, INTENTS.c.boot != wal.boot)
        slots = _slots_of_dead(wal)
        for intent in opened:
            self._settle(wal, intent, slots.get(intent.request_id))
        if not opened:
            _remove_slots_of_dead(wal)
        return len(opened)

    async def sweep_overdue(
        self, wal: WriteAheadLog, *, local_nodes: frozenset[str], grace_s: float
    ) -> int:
        """Settle intents of nodes on other machines that are past their deadline by `grace_s`,
        which must be long: such a node may still have the true settlement on its own disk, and if
        it comes back later, that one is kept as a conflict."""
        limit = rows.at(self._clock.now_ns() - round(grace_s * 1e9))
        opened = await self._open_intents(
            INTENTS.c.node.not_in(sorted(local_nodes)), INTENTS.c.deadline_at < limit
        )
        for intent in opened:
            self._settle(wal, intent, None)
        return len(opened)

    async def _open_intents(self, *conditions: object) -> list[OpenIntent]:
        statement = select(INTENTS.c.request_id, INTENTS.c.boot, INTENTS.c.record)
        for condition in conditions:
            statement = statement.where(condition)  # type: ignore[arg-type]  # column expressions
        async with self._engine.connect() as db:
            found = await db.execute(statement.order_by(INTENTS.c.request_id).limit(10_000))
            return [OpenIntent(row.request_id, row.boot, row.record) for row in found]

    def _settle(self, wal: WriteAheadLog, intent: OpenIntent, progress: Progress | None) -> None:
        data = abandoned(entries.record_from_json(intent.record), progress)
        for attempt in data.attempts:
            attempt.charges, _ = rate_or_unrated(self._rate, attempt)
        wal.append_settlement(
            entries.pack(entries.Settlement(data.request_id, True, entries.to_json(data))),
            admitted=False,  # not one of this process's own: it holds no reserve
        )
        self.swept += 1
        log.warning("request abandoned", extra={"request_id": data.request_id})


def _slots_of_dead(wal: WriteAheadLog) -> dict[str, Progress]:
    found: dict[str, Progress] = {}
    for path in _files_of_dead(wal):
        found.update(read_slots(path))
    return found


def _remove_slots_of_dead(wal: WriteAheadLog) -> None:
    """Nothing of an earlier process is open in the database any more."""
    for path in _files_of_dead(wal):
        path.unlink(missing_ok=True)


def _files_of_dead(wal: WriteAheadLog) -> list[Path]:
    return [
        path for boot, paths in slot_files(wal.folder).items() if boot != wal.boot for path in paths
    ]
