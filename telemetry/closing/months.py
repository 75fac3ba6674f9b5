"""Bills, residuals, and the end of a month: what is closed never changes, and can prove it.

Closing a month writes, in one transaction that waits for every writer and makes them wait:

1. a posting for each difference between a bill and what was rated: rated + postings = billed;
2. a manifest: rows, sums and SHA-256 of every table, day by day, and the hash of the month before.

The manifest is canonical JSON of rows that do not change any more, so it can be made again at any
time, byte for byte. What comes later is booked later: the shipper, re-rating and engine hours see
the closed month, and a bill that arrives late is posted when the next month is closed.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

from msgspec import Struct, structs
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.capacity.store import HOURS as ENGINE_HOURS
from telemetry.closing.bills import BillFormat, BillLine, Difference, compare
from telemetry.ledger.rollups import METERS, ROLLUPS
from telemetry.ledger.shipper import CLOSED, DIRTY, EVENTS, INTENTS, LINES, REQUESTS, upsert
from telemetry.money import EXACT, plain
from telemetry.reports.meters import MeterSum
from telemetry.reports.statement import Residual
from telemetry.tables import BillLineRow, BillRow, PostingRow
from telemetry.usage import BUCKETS

BILLS: Any = BillRow.__table__
BILL_LINES: Any = BillLineRow.__table__
POSTINGS: Any = PostingRow.__table__
FORMAT = 1  # of the manifest

_IDS = UUID("1a2b7f4e-0d0f-5a38-8a3b-92a7b9c9d0aa")
_DAY = timedelta(days=1)


class CloseRefused(Exception):
    """The month cannot be closed; the message says what to do first."""


class Closed(Struct, frozen=True, kw_only=True):
    """A closed month."""

    month: str
    closed_at: datetime
    sha256: str
    postings: int = 0


# --- bills


async def import_bill(
    engine: AsyncEngine,
    *,
    provider: str,
    form: BillFormat,
    source: str,
    content: bytes,
    lines: Sequence[BillLine],
    now: datetime,
) -> bool:
    """Keep a bill. False: this file is there already."""
    bill_id = hashlib.sha256(content).hexdigest()
    async with engine.begin() as db:
        found = await db.execute(
            upsert(db, BILLS)
            .values(bill_id=bill_id, provider=provider, format=form, source=source, imported_at=now)
            .on_conflict_do_nothing()
            .returning(BILLS.c.bill_id)
        )
        if found.first() is None:
            return False
        rows = [
            {
                "bill_id": bill_id,
                "number": number,
                **structs.asdict(line),
                "day": _midnight(line.day),
                "model": line.model[:256],
                "meter": line.meter[:64],
            }
            for number, line in enumerate(lines)
        ]
        await db.execute(BILL_LINES.insert(), rows)
    return True


async def bill_differences(db: AsyncConnection, start: datetime, end: datetime) -> list[Difference]:
    """What the bills say of the days in [start, end), beside what was rated for them so far."""
    statement = (
        select(BILLS.c.provider, BILL_LINES)
        .join(BILLS, BILLS.c.bill_id == BILL_LINES.c.bill_id)
        .where(BILL_LINES.c.day >= start, BILL_LINES.c.day < end)
        .order_by(BILL_LINES.c.bill_id, BILL_LINES.c.number)
    )
    lines: dict[str, list[BillLine]] = {}
    for row in await db.execute(statement):
        lines.setdefault(row.provider, []).append(
            BillLine(
                day=row.day.date(),
                amount=row.amount,
                currency=row.currency,
                model=row.model,
                meter=row.meter,
                quantity=row.quantity,
            )
        )
    if not lines:
        return []
    columns = [METERS.c[name] for name in MeterSum.__struct_fields__]
    found = await db.execute(
        select(*columns).where(
            METERS.c.charge_hour >= start,
            METERS.c.charge_hour < end,
            METERS.c.provider.in_(list(lines)),
        )
    )
    rated = [MeterSum(**row._mapping) for row in found]
    return [
        difference
        for provider in sorted(lines)
        for difference in compare(provider, lines[provider], rated)
    ]


# --- closing


async def close_month(engine: AsyncEngine, month: str, now: datetime) -> Closed:
    """Post what does not agree with the bills, and close. Raises CloseRefused."""
    start, end = bounds(month)
    async with engine.begin() as db:
        await _stop_writers(db)
        await _check_closable(db, month, start, end, now)
        postings = await _post_residuals(db, month, end, now)
        text = await manifest(db, month, now)
        digest = hashlib.sha256(text.encode()).hexdigest()
        await db.execute(
            CLOSED.insert().values(month=month, closed_at=now, manifest=text, sha256=digest)
        )
    return Closed(month=month, closed_at=now, sha256=digest, postings=postings)


async def closed_list(engine: AsyncEngine) -> list[Closed]:
    """Every closed month, oldest first."""
    async with engine.connect() as db:
        found = await db.execute(select(CLOSED).order_by(CLOSED.c.month))
        return [
            Closed(month=row.month, closed_at=row.closed_at, sha256=row.sha256) for row in found
        ]


async def residuals_of(engine: AsyncEngine, month: str) -> list[Residual]:
    """What was posted when a month was closed."""
    async with engine.connect() as db:
        found = await db.execute(
            select(POSTINGS).where(POSTINGS.c.month == month).order_by(POSTINGS.c.posting_id)
        )
        return [
            Residual(provider=row.provider, amount=row.amount, currency=row.currency)
            for row in found
        ]


async def verify_month(db: AsyncConnection, month: str) -> list[str]:
    """What of a closed month is not as it was when it was closed, by table and day. Empty: all."""
    row = (await db.execute(select(CLOSED).where(CLOSED.c.month == month))).one()
    if hashlib.sha256(row.manifest.encode()).hexdigest() != row.sha256:
        return [f"the manifest of {month} does not have its hash"]
    again = await manifest(db, month, row.closed_at)
    found = [] if again == row.manifest else _named(json.loads(row.manifest), json.loads(again))
    found += [
        f"{d.provider} {d.day} {d.model} {d.meter}: rated {plain(d.rated)} and posted "
        f"{plain(posted)} are not the bill's {plain(d.billed)}"
        for d, posted in await _unposted(db, month, row.closed_at)
    ]
    return found


def bounds(month: str) -> tuple[datetime, datetime]:
    """The first instant of a UTC month, and of the next one."""
    start = datetime.combine(date.fromisoformat(f"{month}-01"), time(), UTC)
    return start, (start + timedelta(days=32)).replace(day=1)


async def _stop_writers(db: AsyncConnection) -> None:
    if db.dialect.name == "postgresql":
        await db.exec_driver_sql("LOCK TABLE billing_period IN EXCLUSIVE MODE")
    else:
        await db.exec_driver_sql("BEGIN IMMEDIATE")


async def _check_closable(
    db: AsyncConnection, month: str, start: datetime, end: datetime, now: datetime
) -> None:
    if now < end:
        raise CloseRefused(f"{month} is not over yet")
    closed = set((await db.execute(select(CLOSED.c.month))).scalars())
    if month in closed:
        raise CloseRefused(f"{month} is closed already")
    if later := sorted(other for other in closed if other > month):
        raise CloseRefused(f"{later[0]} is closed already: months are closed in order")
    first = await db.scalar(select(func.min(EVENTS.c.booked_hour)))
    before = f"{start - _DAY:%Y-%m}"
    if first is not None and first < start and before not in closed:
        raise CloseRefused(f"close {before} first: months are closed in order")
    dirty = await db.scalar(
        select(func.count()).select_from(DIRTY).where(DIRTY.c.hour >= start, DIRTY.c.hour < end)
    )
    if dirty:
        raise CloseRefused(f"{dirty} hours of {month} are not summed up yet: try again in a minute")
    waiting = await db.scalar(
        select(func.count()).select_from(INTENTS).where(INTENTS.c.deadline_at < end)
    )
    if waiting:
        raise CloseRefused(
            f"{waiting} requests of {month} are still open: the sweeper settles them"
        )


async def _post_residuals(db: AsyncConnection, month: str, end: datetime, now: datetime) -> int:
    """A posting for each residual, less what was posted for it before."""
    posted = await _posted(db)
    rows = []
    for found in await bill_differences(db, datetime.min.replace(tzinfo=UTC), end):
        key = _key(found)
        amount = EXACT.subtract(found.residual, posted.get(key, Decimal(0)))
        if amount:
            rows.append(
                {
                    "posting_id": str(uuid5(_IDS, "/".join((month, *map(str, key))))),
                    "month": month,
                    "account": f"unreconciled:{found.provider}",
                    "provider": found.provider,
                    "day": _midnight(found.day),
                    "model": found.model,
                    "meter": found.meter,
                    "currency": found.currency,
                    "amount": amount,
                    "cause": found.cause,
                    "posted_at": now,
                }
            )
    if rows:
        await db.execute(POSTINGS.insert(), rows)
    return len(rows)


_Key = tuple[str, date, str, str, str]


def _key(found: Difference) -> _Key:
    return found.provider, found.day, found.model, found.meter, found.currency


async def _posted(db: AsyncConnection) -> dict[_Key, Decimal]:
    sums: dict[_Key, Decimal] = {}
    for row in await db.execute(select(POSTINGS)):
        key = (row.provider, row.day.date(), row.model, row.meter, row.currency)
        sums[key] = EXACT.add(sums.get(key, Decimal(0)), row.amount)
    return sums


async def _unposted(
    db: AsyncConnection, month: str, closed_at: datetime
) -> list[tuple[Difference, Decimal]]:
    """Residuals of a closed month that its postings do not cover, unless something came later."""
    start, end = bounds(month)
    late = await db.scalar(
        select(func.count())
        .select_from(BILL_LINES.join(BILLS, BILLS.c.bill_id == BILL_LINES.c.bill_id))
        .where(BILL_LINES.c.day >= start, BILL_LINES.c.day < end, BILLS.c.imported_at > closed_at)
    )
    corrected = await db.scalar(
        select(func.count())
        .select_from(METERS)
        .where(METERS.c.charge_hour >= start, METERS.c.charge_hour < end, METERS.c.hour >= end)
    )
    if late or corrected:  # both are posted when the next month is closed
        return []
    posted = await _posted(db)
    return [
        (found, posted.get(_key(found), Decimal(0)))
        for found in await bill_differences(db, start, end)
        if found.residual != posted.get(_key(found), Decimal(0))
    ]


# --- the manifest


async def manifest(db: AsyncConnection, month: str, closed_at: datetime) -> str:
    """The canonical text of a month: the same rows give the same bytes on both databases."""
    start, end = bounds(month)
    before = (
        await db.execute(
            select(CLOSED.c.month, CLOSED.c.sha256)
            .where(CLOSED.c.month < month)
            .order_by(CLOSED.c.month.desc())
            .limit(1)
        )
    ).first()
    tables: dict[str, dict[str, Any]] = {}
    day = start
    while day < end:
        for name, part in (await _day_parts(db, day, day + _DAY)).items():
            if part["rows"]:
                tables.setdefault(name, {})[f"{day:%Y-%m-%d}"] = part
        day += _DAY
    tables["bill_line"] = await _bill_part(db, start, end, closed_at)
    tables["posting"] = {
        month: _part(
            [
                (row.posting_id, row.account, plain(row.amount), row.currency)
                for row in await db.execute(
                    select(POSTINGS)
                    .where(POSTINGS.c.month == month)
                    .order_by(POSTINGS.c.posting_id)
                )
            ]
        )
    }
    content = {
        "format": FORMAT,
        "month": month,
        "closed_at": _iso(closed_at),
        "previous": None if before is None else {"month": before.month, "sha256": before.sha256},
        "tables": tables,
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


async def _day_parts(db: AsyncConnection, start: datetime, end: datetime) -> dict[str, Any]:
    events = (
        select(REQUESTS.c.payload_hash, *(EVENTS.c[name] for name in (*_EVENT, *BUCKETS)))
        .join(REQUESTS, REQUESTS.c.request_id == EVENTS.c.request_id)
        .where(EVENTS.c.booked_hour >= start, EVENTS.c.booked_hour < end)
        .order_by(EVENTS.c.event_id)
    )
    names = ("line_id", "event_id", "meter", "quantity", "unit", "unit_price", "amount")
    lines = (
        select(*(LINES.c[name] for name in (*names, "currency", "hour", "cause", "reverses_id")))
        .where(LINES.c.booked_hour >= start, LINES.c.booked_hour < end)
        .order_by(LINES.c.line_id)
    )
    parts = {
        "usage_event": await _streamed(db, events),
        "charge_line": await _streamed(db, lines, money="amount"),
    }
    for table in (ROLLUPS, METERS, ENGINE_HOURS):
        statement = (
            select(table)
            .where(table.c.hour >= start, table.c.hour < end)
            .order_by(*table.primary_key.columns)
        )
        rows = [tuple(row) for row in await db.execute(statement)]
        # Sorted here: the databases do not agree on the order of text.
        parts[table.name] = _part(sorted(rows, key=lambda row: tuple(map(_text, row))))
    return parts


_EVENT = (
    *("event_id", "attempt_no", "tenant_id", "key_id", "asked_model", "backend", "provider"),
    *("model", "service_tier", "occurred_at", "booked_hour", "outcome", "is_final"),
    *("usage_source", "engine_us_prefill", "engine_us_decode", "engine_us_sampling"),
    *("engine_us_recompute", "engine_us_spec_rejected"),
)


async def _streamed(db: AsyncConnection, statement: Any, money: str | None = None) -> Any:
    """Ids are lower-case hexadecimal: their order is the same everywhere."""
    digest = hashlib.sha256()
    count = 0
    total: dict[str, Decimal] = {}
    async with db.stream(statement) as found:
        async for row in found:
            digest.update(_line(row))
            count += 1
            if money is not None and getattr(row, money) is not None:
                total[row.currency] = EXACT.add(
                    total.get(row.currency, Decimal(0)), getattr(row, money)
                )
    part: dict[str, Any] = {"rows": count, "sha256": digest.hexdigest()}
    if money is not None:
        part["sums"] = {currency: plain(amount) for currency, amount in sorted(total.items())}
    return part


async def _bill_part(
    db: AsyncConnection, start: datetime, end: datetime, closed_at: datetime
) -> dict[str, Any]:
    found = await db.execute(
        select(BILLS.c.provider, BILL_LINES)
        .join(BILLS, BILLS.c.bill_id == BILL_LINES.c.bill_id)
        .where(
            BILL_LINES.c.day >= start,
            BILL_LINES.c.day < end,
            BILLS.c.imported_at <= closed_at,
        )
        .order_by(BILL_LINES.c.bill_id, BILL_LINES.c.number)
    )
    by_bill: dict[str, list[tuple[Any, ...]]] = {}
    for row in found:
        by_bill.setdefault(row.bill_id, []).append(tuple(row))
    return {bill_id: _part(rows) for bill_id, rows in by_bill.items()}


def _part(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    count = 0
    for row in rows:
        digest.update(_line(row))
        count += 1
    return {"rows": count, "sha256": digest.hexdigest()}


def _line(row: Iterable[Any]) -> bytes:
    return ("\x1f".join(map(_text, row)) + "\x1e").encode()


def _text(value: Any) -> str:
    match value:
        case None:
            return "\x00"
        case Decimal():
            return plain(value)
        case bool():
            return str(int(value))
        case datetime():
            return _iso(value)
        case _:
            return str(value)


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _named(old: Any, new: Any) -> list[str]:
    """Where two manifests of a month differ."""
    if old.get("previous") != new.get("previous"):
        return ["the month before is not the one that this one was chained to"]
    found = []
    for table in sorted({*old["tables"], *new["tables"]}):
        before, after = old["tables"].get(table, {}), new["tables"].get(table, {})
        for part in sorted({*before, *after}):
            was, now = before.get(part), after.get(part)
            if was != now:
                rows = f"{was['rows'] if was else 0} rows then, {now['rows'] if now else 0} now"
                found.append(f"{table} of {part[:12]} is not what was closed: {rows}")
    return found or ["the manifest differs"]


__all__ = [
    "BILLS",
    "BILL_LINES",
    "POSTINGS",
    "CloseRefused",
    "Closed",
    "bill_differences",
    "bounds",
    "close_month",
    "closed_list",
    "import_bill",
    "manifest",
    "residuals_of",
    "verify_month",
]
