"""Carry one node's log into the database: rows and cursor in the same transaction.

Invariant: whatever dies between two statements, replaying the log inserts nothing twice and leaves
nothing out. What happened in a month that is closed by now is booked in the hour of its arrival:
the closed month stays as it is, and the late event is a correction in the open one. Rows are
inserted with ON CONFLICT DO NOTHING on ids that the log determines; a request that arrives again
with other facts is kept apart in `usage_conflict` and never overwrites. A record
that the database refuses for its content is kept there too, so that one bad record cannot stop the
log. While the database is away nothing is lost: the log keeps it and the shipper tries again.
"""

import asyncio
import base64
import logging
from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

from msgspec import Struct
from sqlalchemy import Table, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.clock import Clock
from telemetry.ledger import rows
from telemetry.ledger.errors import CursorMoved
from telemetry.ledger.rows import Folded, Row, Settled
from telemetry.ledger.wal import START, Batch, Position, WriteAheadLog
from telemetry.record import Outcome
from telemetry.tables import (
    BillingPeriodRow,
    ChargeLineRow,
    DirtyHourRow,
    OpenIntentRow,
    RequestRow,
    SpoolCursorRow,
    UsageConflictRow,
    UsageEventRow,
)

log = logging.getLogger(__name__)

BATCH_RECORDS = 200  # keeps the event loop free: about 10 ms of row building per batch
_CONFLICTS = UUID("b0c0f9a4-6f3d-5a0e-8a51-6d2f0f7a9c33")

REQUESTS: Any = RequestRow.__table__
EVENTS: Any = UsageEventRow.__table__
LINES: Any = ChargeLineRow.__table__
DIRTY: Any = DirtyHourRow.__table__
CURSORS: Any = SpoolCursorRow.__table__
INTENTS: Any = OpenIntentRow.__table__
CONFLICTS: Any = UsageConflictRow.__table__
CLOSED: Any = BillingPeriodRow.__table__


class Shipped(Struct, frozen=True):
    """What one batch did to the database."""

    records: int = 0
    requests: int = 0  # inserted
    events: int = 0
    lines: int = 0
    duplicates: int = 0  # arrived again with the same facts: nothing to do
    conflicts: int = 0


class Cursor(Struct):
    """How far the node's log is in the database, as this shipper last committed it."""

    position: Position
    exists: bool
    counts: dict[str, int]


class Shipper:
    """Ships one log. Plain counters: `shipped` records, `requests`, `conflicts`, `rejected`
    (refused for their content), `retries`. One at a time per log: the owner of the folder."""

    def __init__(
        self,
        engine: AsyncEngine,
        wal: WriteAheadLog,
        *,
        clock: Clock,
        batch_records: int = BATCH_RECORDS,
    ) -> None:
        self.shipped = 0
        self.requests = 0
        self.duplicates = 0
        self.conflicts = 0
        self.rejected = 0
        self.caught_up_ns = clock.now_ns()  # when the database last had everything
        self._engine = engine
        self._wal = wal
        self._clock = clock
        self._batch_records = batch_records
        self._cursor: Cursor | None = None

    @property
    def position(self) -> Position:
        return START if self._cursor is None else self._cursor.position

    @property
    def records_ever(self) -> int | None:
        """Records of this node in the database, over all restarts; None before the first look."""
        return None if self._cursor is None else self._cursor.counts["records"]

    async def ship_all(self) -> int:
        """Ship until the database has everything that is durable now. Returns records shipped;
        raises what the database raises, with every complete batch kept."""
        count = 0
        now_ns, end = self._clock.now_ns(), self._wal.end
        while batch := await self.ship_batch():
            count += batch.records
            if self.position >= end:
                break  # what came meanwhile is for the next call: small batches cost the most
        self.caught_up_ns = now_ns
        return count

    async def ship_batch(self) -> Shipped | None:
        """One batch in one transaction; None when there is nothing to ship."""
        if self._cursor is None:
            self._cursor = await self._load_cursor()
            self._wal.forget(self._cursor.position)
        if self._cursor.position >= self._wal.end:
            return None
        batch = await asyncio.to_thread(self._wal.read, self._cursor.position, self._batch_records)
        if not batch.records:
            return None
        try:
            done = await self._commit(batch)
        except (CursorMoved, DBAPIError, OverflowError, StatementError) as error:
            self._cursor = None
            if not _is_about_content(error):
                raise
            return await self._ship_one_by_one()
        return done

    async def _ship_one_by_one(self) -> Shipped:
        """Find the record that the database will not take, and set it aside."""
        cursor = self._cursor = await self._load_cursor()
        batch = self._wal.read(cursor.position, 1)
        try:
            return await self._commit(batch)
        except (DBAPIError, OverflowError, StatementError) as error:
            if not _is_about_content(error):
                raise
            log.error("the database refused a record", extra={"reason": type(error).__name__})
            self._cursor = await self._load_cursor()
        done = await self._commit(batch, refused=True)
        self.rejected += 1
        return done

    async def _commit(self, batch: Batch, *, refused: bool = False) -> Shipped:
        assert self._cursor is not None
        folded = await asyncio.to_thread(rows.fold, batch.records, self._wal.node)
        async with self._engine.begin() as db:
            done, counts = await _apply(db, folded, self._clock.now_ns(), refused=refused)
            cursor = await self._advance(db, self._cursor, batch.next, counts)
        self._cursor = cursor
        self._wal.forget(cursor.position)
        self.shipped += done.records
        self.requests += done.requests
        self.duplicates += done.duplicates
        self.conflicts += done.conflicts
        return done

    async def _load_cursor(self) -> Cursor:
        async with self._engine.connect() as db:
            found = (
                await db.execute(select(CURSORS).where(CURSORS.c.node == self._wal.node))
            ).one_or_none()
        counts = dict.fromkeys(_COUNTS, 0)
        if found is None:
            return Cursor(START, False, counts)
        counts.update({name: getattr(found, name) for name in _COUNTS})
        return Cursor(Position(found.segment, found.byte_offset), True, counts)

    async def _advance(
        self, db: AsyncConnection, old: Cursor, to: Position, added: dict[str, int]
    ) -> Cursor:
        counts = {name: old.counts[name] + added[name] for name in _COUNTS}
        values: Row = {
            "segment": to.segment,
            "byte_offset": to.offset,
            "updated_at": rows.at(self._clock.now_ns()),
            **counts,
        }
        if old.exists:
            moved = await db.execute(
                update(CURSORS)
                .where(
                    CURSORS.c.node == self._wal.node,
                    CURSORS.c.segment == old.position.segment,
                    CURSORS.c.byte_offset == old.position.offset,
                )
                .values(values)
            )
            if moved.rowcount != 1:
                raise CursorMoved(f"another process ships the log of {self._wal.node}")
        else:
            await db.execute(CURSORS.insert().values(node=self._wal.node, **values))
        return Cursor(to, True, counts)


_COUNTS = ("records", "admitted", "settled", "refused", "swept")


async def _apply(
    db: AsyncConnection, folded: Folded, now_ns: int, *, refused: bool
) -> tuple[Shipped, dict[str, int]]:
    """The whole batch on an open transaction. The first statement writes, so that SQLite takes its
    write lock at once and never fails half-way for a stale snapshot."""
    candidates = [] if refused else list(folded.settled.values())
    fresh = await _insert_requests(db, candidates)
    again = [s for s in candidates if s.request_id not in fresh]
    conflicts = await _conflicts(db, again + folded.again)
    if refused:
        conflicts = [*folded.settled.values(), *folded.again]
    kept = [_conflict_row(s.request_id, s.request["record"], now_ns) for s in conflicts]
    kept += [
        _conflict_row("unreadable", base64.b64encode(payload).decode(), now_ns)
        for payload in folded.unreadable
    ]
    await _insert(db, CONFLICTS, kept)
    new = [s for s in candidates if s.request_id in fresh]
    events = [event for s in new for event in s.events]
    lines = [line for s in new for line in s.lines]
    if events:
        book_late(events, await closed_months(db), now_ns)
    booked = {event["event_id"]: event["booked_hour"] for event in events}
    for line in lines:
        line["booked_hour"] = booked[line["event_id"]]
    await mark_dirty(db, {event["booked_hour"] for event in events}, now_ns)
    await _insert(db, EVENTS, events)
    await _insert(db, LINES, lines)
    await _close_intents(db, list(folded.settled))
    if not refused:
        await _open_intents(db, folded)
    counts = {
        "records": folded.records,
        "admitted": folded.admitted,
        "settled": len(new),
        "refused": sum(not s.admitted for s in new),
        "swept": sum(s.admitted and s.abandoned for s in new),
    }
    done = Shipped(
        folded.records,
        len(new),
        len(events),
        len(lines),
        len(again) + len(folded.again) - len(conflicts) if not refused else 0,
        len(kept),
    )
    return done, counts


def upsert(db: AsyncConnection, table: Table) -> Any:
    """INSERT of the connection's dialect, for its ON CONFLICT clause."""
    return postgresql.insert(table) if db.dialect.name == "postgresql" else sqlite.insert(table)


async def _insert(db: AsyncConnection, table: Table, values: list[Row]) -> None:
    if values:
        await db.execute(upsert(db, table).on_conflict_do_nothing(), values)


async def _insert_requests(db: AsyncConnection, settled: list[Settled]) -> set[str]:
    """Ids that were not there before. Free of races: the insert itself tells."""
    if not settled:
        return set()
    statement = upsert(db, REQUESTS).on_conflict_do_nothing().returning(REQUESTS.c.request_id)
    found = await db.execute(statement, [s.request for s in settled])
    return set(found.scalars())


async def _conflicts(db: AsyncConnection, again: list[Settled]) -> list[Settled]:
    """Of the settlements whose id is there already, those with other facts. Two sweeps of one
    request are not a conflict: both are estimates of the same crash."""
    if not again:
        return []
    found = await db.execute(
        select(REQUESTS.c.request_id, REQUESTS.c.payload_hash, REQUESTS.c.outcome).where(
            REQUESTS.c.request_id.in_([s.request_id for s in again])
        )
    )
    known = {row.request_id: row for row in found}
    return [
        s
        for s in again
        if s.request["payload_hash"] != known[s.request_id].payload_hash
        and not (s.abandoned and known[s.request_id].outcome == Outcome.ABANDONED)
    ]


def _conflict_row(request_id: str, record: str, now_ns: int) -> Row:
    facts = rows.payload_hash(record)
    return {
        "conflict_id": str(uuid5(_CONFLICTS, f"{request_id}/{facts}")),
        "request_id": request_id,
        "seen_at": rows.at(now_ns),
        "payload_hash": facts,
        "record": record,
    }


async def closed_months(db: AsyncConnection) -> frozenset[str]:
    """Months that take no more rows, held so until this transaction ends: whoever closes a month
    waits for those who are writing, and they for him. SQLite has one writer at a time anyway."""
    if db.dialect.name == "postgresql":
        await db.exec_driver_sql("LOCK TABLE billing_period IN SHARE MODE")
    return frozenset((await db.execute(select(CLOSED.c.month))).scalars())


def month_of(moment: datetime) -> str:
    """The billing month, UTC: `2026-11`."""
    return f"{moment:%Y-%m}"


def book_late(events: list[Row], closed: frozenset[str], now_ns: int) -> None:
    """Book events of closed months in the hour of their arrival."""
    for event in events:
        if month_of(event["booked_hour"]) in closed:
            event["booked_hour"] = rows.hour_of(rows.at(now_ns))


async def mark_dirty(db: AsyncConnection, hours: Collection[datetime], now_ns: int) -> None:
    """Always an update, never "do nothing": it takes the row's lock, so a roll-up that runs now
    either sees these rows or finds the hour dirty again."""
    if hours:
        statement = upsert(db, DIRTY)
        await db.execute(
            statement.on_conflict_do_update(
                index_elements=["hour"], set_={"marked_at": statement.excluded.marked_at}
            ),
            [{"hour": hour, "marked_at": rows.at(now_ns)} for hour in sorted(hours)],
        )


async def _close_intents(db: AsyncConnection, ids: list[str]) -> None:
    if ids:
        await db.execute(delete(INTENTS).where(INTENTS.c.request_id.in_(ids)))


async def _open_intents(db: AsyncConnection, folded: Folded) -> None:
    """Intents whose settlement is not in the database, and newer attempts of earlier ones."""
    if folded.opened:
        known = await db.execute(
            select(REQUESTS.c.request_id).where(REQUESTS.c.request_id.in_(list(folded.opened)))
        )
        settled = set(known.scalars())
        await _insert(
            db, INTENTS, [row for key, row in folded.opened.items() if key not in settled]
        )
    if folded.attempts:
        found = await db.execute(
            select(INTENTS.c.request_id, INTENTS.c.record).where(
                INTENTS.c.request_id.in_(list(folded.attempts))
            )
        )
        for row in found.all():
            record = rows.with_attempts(row.record, folded.attempts[row.request_id])
            await db.execute(
                update(INTENTS).where(INTENTS.c.request_id == row.request_id).values(record=record)
            )


def _is_about_content(error: Exception) -> bool:
    """Whether the database would refuse the same rows again, however often they are sent."""
    if isinstance(error, DataError | IntegrityError | OverflowError):
        return True
    cause = getattr(error, "orig", None)
    state = str(getattr(cause, "sqlstate", None) or "")
    return state[:2] in ("22", "23") or isinstance(cause, OverflowError | ValueError | TypeError)
