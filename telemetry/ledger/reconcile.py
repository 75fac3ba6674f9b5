"""Gather what the log, the rows and the roll-ups say, and hold it against the laws.

Reads only. Log folders that a running server owns are read without their lock, up to the last whole
record, after the cursor was read: what the server appends meanwhile counts on both sides.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.clock import Clock
from telemetry.ledger import entries, frames, rows
from telemetry.ledger.conservation import Facts, Law, NodeFacts, laws
from telemetry.ledger.rollups import COUNTS, METERS, ROLLUPS, hour_sums
from telemetry.ledger.rows import Row, Settled
from telemetry.ledger.shipper import CONFLICTS, CURSORS, DIRTY, EVENTS, INTENTS, LINES, REQUESTS
from telemetry.ledger.wal import START, Position, folders, node_of
from telemetry.money import EXACT
from telemetry.usage import BUCKETS

OVERDUE_S = 3600.0
_PAGE = 500


async def reconcile(
    engine: AsyncEngine, wal_dir: Path, *, clock: Clock, overdue_s: float = OVERDUE_S
) -> list[Law]:
    """Every law of the ledger, kept or broken. The answer is "no" if any does not hold."""
    return laws(await gather(engine, wal_dir, clock=clock, overdue_s=overdue_s))


async def gather(
    engine: AsyncEngine, wal_dir: Path, *, clock: Clock, overdue_s: float = OVERDUE_S
) -> Facts:
    """All facts, the rows in one transaction. Reads every row: minutes for tens of millions."""
    limit = rows.at(clock.now_ns() - round(overdue_s * 1e9))
    nodes = await _nodes(engine, wal_dir)
    snapshot = engine.execution_options(
        isolation_level="REPEATABLE READ" if engine.dialect.name == "postgresql" else "SERIALIZABLE"
    )
    async with snapshot.connect() as db, db.begin():
        if engine.dialect.name == "sqlite":
            await db.exec_driver_sql("BEGIN")
        cursors = {row.node: row for row in await db.execute(select(CURSORS))}
        events, hours_off = await _compare_hours(db)
        event_money, rollup_money = await _money(db)
        return Facts(
            nodes=nodes,
            admitted=sum(row.admitted for row in cursors.values()),
            settled=sum(row.settled for row in cursors.values()),
            refused=sum(row.refused for row in cursors.values()),
            swept=sum(row.swept for row in cursors.values()),
            open_intents=await _count(db, INTENTS),
            requests=await _count(db, REQUESTS),
            conflicts=await _ids(db, select(CONFLICTS.c.request_id).distinct()),
            overdue=await _ids(
                db, select(INTENTS.c.request_id).where(INTENTS.c.deadline_at < limit)
            ),
            dirty_hours=await _count(db, DIRTY),
            events=events,
            rollups=await _rollup_counts(db),
            event_money=event_money,
            rollup_money=rollup_money,
            hours_off=hours_off,
            requests_off=await _requests_off(db),
            corrections_off=await _corrections_off(db),
        )


async def _nodes(engine: AsyncEngine, wal_dir: Path) -> tuple[NodeFacts, ...]:
    """Logs beside cursors. A running server moves both: look until the cursors stood still."""
    facts: tuple[NodeFacts, ...] | None = None
    async with engine.connect() as db:
        for _ in range(20):
            before = {row.node: row for row in await db.execute(select(CURSORS))}
            await db.rollback()
            facts = await asyncio.to_thread(_all_node_facts, wal_dir, before)
            after = {row.node: row for row in await db.execute(select(CURSORS))}
            await db.rollback()
            if facts is not None and before == after:
                return facts
    return facts or ()


def _all_node_facts(wal_dir: Path, cursors: dict[str, Any]) -> tuple[NodeFacts, ...] | None:
    try:
        return tuple(_node_facts(folder, cursors) for folder in folders(wal_dir))
    except FileNotFoundError:  # a segment was shipped and deleted while we looked
        return None


def _node_facts(folder: Path, cursors: dict[str, Any]) -> NodeFacts:
    node = node_of(folder)
    cursor = cursors.get(node)
    position = START if cursor is None else Position(cursor.segment, cursor.byte_offset)
    shipped = 0 if cursor is None else cursor.records
    appended = pending = 0
    for path in sorted(folder.glob("*.wal")):
        found = frames.scan(path.read_bytes())
        here = [frame for frame in found.frames if frame.kind in frames.RECORDS]
        for frame in found.frames:
            if frame.kind == frames.Kind.SEGMENT:
                appended = entries.unpack_header(frame.payload).records_before
        appended += len(here)
        pending += sum(Position(int(path.stem), frame.end) > position for frame in here)
    if not any(folder.glob("*.wal")):
        appended = shipped
    return NodeFacts(node=node, appended=appended, shipped=shipped, pending=pending)


async def _count(db: AsyncConnection, table: Any) -> int:
    return int(await db.scalar(select(func.count()).select_from(table)) or 0)


async def _ids(db: AsyncConnection, statement: Any) -> tuple[str, ...]:
    return tuple((await db.execute(statement)).scalars())


async def _rollup_counts(db: AsyncConnection) -> dict[str, int]:
    found = (await db.execute(select(*(func.sum(ROLLUPS.c[name]) for name in COUNTS)))).one()
    return dict(zip(COUNTS, (int(value or 0) for value in found), strict=True))


async def _compare_hours(db: AsyncConnection) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sums over all events, and the hours whose stored roll-up is not what it must be."""
    totals = dict.fromkeys(COUNTS, 0)
    hours: set[datetime] = set()
    for column in (
        *(ROLLUPS.c.hour, METERS.c.hour),
        *(EVENTS.c.booked_hour, LINES.c.booked_hour),
    ):
        hours.update((await db.execute(select(column).distinct())).scalars())
    off: list[str] = []
    for hour in sorted(hours):
        must = await hour_sums(db, hour)
        for table, fresh in ((ROLLUPS, must.hours), (METERS, must.meters)):
            stored = await db.execute(select(table).where(table.c.hour == hour))
            if _keyed(fresh) != _keyed([dict(row._mapping) for row in stored]):
                off.append(f"{hour.isoformat()} ({table.name})")
        for sums in must.hours:
            for name in COUNTS:
                totals[name] += sums[name]
    return totals, tuple(off)


def _keyed(found: list[Row]) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in sorted(row)) for row in found}


async def _money(db: AsyncConnection) -> tuple[dict[str, Decimal], dict[str, Decimal]]:
    sums: list[dict[str, Decimal]] = []
    for table in (LINES, ROLLUPS, METERS):
        total: dict[str, Decimal] = {}
        async with db.stream(select(table.c.currency, table.c.amount)) as found:
            async for row in found:
                if row.amount is not None:
                    total[row.currency] = EXACT.add(total.get(row.currency, Decimal(0)), row.amount)
        sums.append({currency: amount for currency, amount in total.items() if amount})
    lines, hours, meters = sums
    # The two roll-ups must agree: where they do not, the law is broken by the one that is off.
    return lines, hours if hours != lines else meters


async def _requests_off(db: AsyncConnection) -> tuple[str, ...]:
    """Requests whose rows are not those that their own record makes: a row was lost, doubled or
    changed, or the record itself was. Orphaned events and lines count too."""
    off: list[str] = []
    events_seen = lines_seen = 0
    async for page in _pages(db):
        ids = [row.request_id for row in page]
        events = await _by_request(db, EVENTS, ids, _EVENT_FACTS)
        lines = await _by_request(db, LINES, ids, _LINE_FACTS, LINES.c.cause.is_(None))
        for row in page:
            settled = _derived(row)
            mine, charged = events.get(row.request_id, set()), lines.get(row.request_id, set())
            events_seen += len(mine)
            lines_seen += len(charged)
            if (
                settled is None
                or row.payload_hash != rows.payload_hash(row.record)
                or any(settled.request[name] != getattr(row, name) for name in _REQUEST_FACTS)
                or mine != {_facts(event, _EVENT_FACTS) for event in settled.events}
                or charged != {_facts(line, _LINE_FACTS) for line in settled.lines}
            ):
                off.append(row.request_id)
    settled_lines = await db.scalar(
        select(func.count()).select_from(LINES).where(LINES.c.cause.is_(None))
    )
    orphans = (await _count(db, EVENTS) - events_seen, int(settled_lines or 0) - lines_seen)
    off.extend(
        f"{count} {name} without a request"
        for count, name in zip(orphans, ("events", "charge lines"), strict=True)
        if count
    )
    return tuple(off)


async def _corrections_off(db: AsyncConnection) -> tuple[str, ...]:
    """Reversals that are not the mirror of the line that they take back, and lines that were taken
    back twice."""
    wrong: list[str] = []
    seen: set[str] = set()
    original = LINES.alias()
    statement = (
        select(LINES, *(original.c[name].label(f"was_{name}") for name in _MIRRORED))
        .join(original, original.c.line_id == LINES.c.reverses_id, isouter=True)
        .where(LINES.c.reverses_id.is_not(None))
        .order_by(LINES.c.line_id)
    )
    async with db.stream(statement) as found:
        async for row in found:
            was = {name: getattr(row, f"was_{name}") for name in _MIRRORED}
            is_mirror = (
                was["quantity"] is not None
                and row.quantity == -was["quantity"]
                and (row.amount is None) == (was["amount"] is None)
                and (row.amount is None or row.amount == -was["amount"])
                and all(getattr(row, name) == was[name] for name in _MIRRORED[2:])
            )
            if not is_mirror or row.reverses_id in seen:
                wrong.append(row.line_id)
            seen.add(row.reverses_id)
    return tuple(wrong)


_MIRRORED = ("quantity", "amount", "event_id", "meter", "unit_price", "currency", "hour")
_REQUEST_FACTS = ("tenant_id", "key_id", "asked_model", "outcome", "status", "opened_at")
_EVENT_FACTS = (
    "event_id",
    "tenant_id",
    "key_id",
    "backend",
    "provider",
    "model",
    "occurred_at",
    "outcome",
    "is_final",
    "usage_source",
    *BUCKETS,
)
_LINE_FACTS = (
    "line_id",
    "event_id",
    "hour",
    "tenant_id",
    "meter",
    "quantity",
    "unit",
    "unit_price",
    "amount",
    "currency",
)


async def _pages(db: AsyncConnection) -> AsyncIterator[list[Any]]:
    last = ""
    while True:
        statement = select(REQUESTS).where(REQUESTS.c.request_id > last)
        page = list(await db.execute(statement.order_by(REQUESTS.c.request_id).limit(_PAGE)))
        if not page:
            return
        yield page
        last = page[-1].request_id


async def _by_request(
    db: AsyncConnection, table: Any, ids: list[str], names: tuple[str, ...], *only: Any
) -> dict[str, set[tuple[Any, ...]]]:
    found: dict[str, set[tuple[Any, ...]]] = {}
    for row in await db.execute(select(table).where(table.c.request_id.in_(ids), *only)):
        found.setdefault(row.request_id, set()).add(_facts(dict(row._mapping), names))
    return found


def _facts(row: Row, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _derived(row: Any) -> Settled | None:
    try:
        record = entries.record_from_json(row.record)
        text = row.record.encode()
        return rows.settlement_rows(entries.Settlement(record.request_id, True, text))
    except (ValueError, AssertionError):
        return None
