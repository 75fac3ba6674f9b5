"""A month is closed once, proves itself for ever, and names whatever was touched since."""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.capacity import store
from telemetry.capacity.heartbeat import Heartbeat, StepTimes
from telemetry.closing.bills import BillLine
from telemetry.closing.months import (
    BILL_LINES,
    POSTINGS,
    CloseRefused,
    bill_differences,
    close_month,
    closed_list,
    import_bill,
    manifest,
    verify_month,
)
from telemetry.database import open_engine
from telemetry.ledger.rollups import METERS, ROLLUPS
from telemetry.ledger.shipper import CLOSED, DIRTY, EVENTS, LINES, REQUESTS
from telemetry.tables import LedgerBase
from tests.fakes.shop import FEBRUARY, JANUARY, NOW, Shop, book_of

LATER = datetime(2027, 2, 3, tzinfo=UTC)
DAY = NOW.date()


async def opened(url: str) -> AsyncEngine:
    engine = open_engine(url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    return engine


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = await opened(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def embedded(sqlite_url: str) -> AsyncIterator[AsyncEngine]:
    """The embedded database, where what is tested does not depend on which one it is."""
    engine = await opened(sqlite_url)
    yield engine
    await engine.dispose()


async def bill(engine: AsyncEngine, amount: str, *, file: bytes = b"1") -> bool:
    line = BillLine(day=DAY, amount=Decimal(amount), model="m", meter="Input Tokens")
    return await import_bill(
        engine,
        provider="scripted",
        form="csv",
        source="bill.csv",
        content=file,
        lines=[line],
        now=NOW,
    )


async def a_month(engine: AsyncEngine, folder: Path) -> Shop:
    """Served, on owned hardware too, billed, and not yet closed."""
    shop = Shop(engine, folder)
    await shop.serve(await book_of(engine, "2"), 6)
    times = StepTimes(load_us=5, warmup_us=6, step_us=3_600_000_000, idle_us=999)
    beat = Heartbeat(backend="b", at=NOW, times=times, rate_per_hour=Decimal(2), devices=1)
    await store.book(engine, beat)
    assert await bill(engine, "0.02")
    return shop


async def verified(engine: AsyncEngine, month: str = "2027-01") -> list[str]:
    async with engine.connect() as db:
        return await verify_month(db, month)


async def test_a_closed_month_adds_up_to_the_bill_and_proves_it(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Rated plus posted is billed; the manifest can be made again byte for byte; once is enough."""
    await a_month(engine, tmp_path)
    done = await close_month(engine, "2027-01", LATER)
    assert done.postings == 1
    async with engine.connect() as db:
        (difference,) = await bill_differences(db, JANUARY.start, JANUARY.end)
        (posting,) = (await db.execute(select(POSTINGS))).all()
        stored = (await db.execute(select(CLOSED))).one()
        again = await manifest(db, "2027-01", stored.closed_at)
    assert difference.rated + posting.amount == difference.billed == Decimal("0.02")
    assert (posting.account, posting.cause) == (
        "unreconciled:scripted",
        "other usage, or another price",
    )
    assert again == stored.manifest
    assert stored.sha256 == done.sha256
    assert await verified(engine) == []
    with pytest.raises(CloseRefused, match="closed already"):
        await close_month(engine, "2027-01", LATER)


async def test_months_are_chained_and_late_facts_are_booked_in_the_open_one(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Re-rating and a late bill change nothing of January; February posts what they leave."""
    shop = await a_month(engine, tmp_path)
    first = await close_month(engine, "2027-01", LATER)
    shop.clock.advance(timedelta(days=20).total_seconds())
    before = await shop.cost()
    await shop.rerate(await book_of(engine, "3"))
    assert not await bill(engine, "0.02")  # the same file again
    assert await import_bill(
        engine,
        provider="scripted",
        form="csv",
        source="late.csv",
        content=b"late",
        lines=[BillLine(day=DAY, amount=Decimal(1), model="m", meter="Input Tokens")],
        now=LATER + timedelta(days=1),
    )
    assert await shop.cost() == before
    assert await verified(engine) == []
    second = await close_month(engine, "2027-02", datetime(2027, 3, 2, tzinfo=UTC))
    assert [closed.sha256 for closed in await closed_list(engine)] == [first.sha256, second.sha256]
    assert await verified(engine) == []
    assert await verified(engine, "2027-02") == []
    async with engine.connect() as db:
        (difference,) = await bill_differences(db, JANUARY.start, JANUARY.end)
        posted = sum((await db.execute(select(POSTINGS.c.amount))).scalars())
    assert difference.billed == Decimal("1.02")
    assert difference.rated + posted == difference.billed
    assert difference.rated == before[0] + (await shop.cost(FEBRUARY))[0]
    assert await shop.broken() == []


async def test_a_month_is_closed_in_order_and_when_it_is_over(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Not before its end, not with hours to sum, not before the one before it."""
    await a_month(engine, tmp_path)
    with pytest.raises(CloseRefused, match="not over"):
        await close_month(engine, "2027-01", NOW)
    with pytest.raises(CloseRefused, match="close 2027-01 first"):
        await close_month(engine, "2027-02", datetime(2027, 3, 2, tzinfo=UTC))
    async with engine.begin() as db:
        await db.execute(DIRTY.insert().values(hour=JANUARY.start, marked_at=NOW))
    with pytest.raises(CloseRefused, match="1 hours"):
        await close_month(engine, "2027-01", LATER)
    assert await closed_list(engine) == []


Tamper = Callable[[AsyncConnection], Awaitable[Any]]


async def _copy_line(db: AsyncConnection) -> None:
    row = (await db.execute(select(LINES).limit(1))).one()
    await db.execute(insert(LINES).values({**row._mapping, "line_id": "f" * 36}))


async def _move_event(db: AsyncConnection) -> None:
    one = await db.scalar(select(EVENTS.c.event_id).limit(1))
    moved = NOW.replace(minute=0) + timedelta(hours=9)
    await db.execute(update(EVENTS).where(EVENTS.c.event_id == one).values(booked_hour=moved))


TAMPERINGS: dict[str, tuple[Tamper, str]] = {
    "a charge line deleted": (
        lambda db: db.execute(
            delete(LINES).where(
                LINES.c.line_id == select(LINES.c.line_id).limit(1).scalar_subquery()
            )
        ),
        "charge_line of 2027-01-15",
    ),
    "a charge line doubled": (_copy_line, "charge_line of 2027-01-15"),
    "a price changed": (
        lambda db: db.execute(update(LINES).values(unit_price=Decimal(1))),
        "charge_line of 2027-01-15",
    ),
    "an amount changed": (
        lambda db: db.execute(update(LINES).values(amount=Decimal(1))),
        "charge_line of 2027-01-15",
    ),
    "tokens changed": (
        lambda db: db.execute(update(EVENTS).values(out_text=1_000)),
        "usage_event of 2027-01-15",
    ),
    "an event moved to another hour": (_move_event, "usage_event of 2027-01-15"),
    "a record rewritten with its hash": (
        lambda db: db.execute(update(REQUESTS).values(payload_hash="0" * 64)),
        "usage_event of 2027-01-15",
    ),
    "a sum changed": (
        lambda db: db.execute(update(ROLLUPS).values(requests=99)),
        "rollup_hour of 2027-01-15",
    ),
    "a tenant renamed in the sums": (
        lambda db: db.execute(
            update(METERS).where(METERS.c.tenant_id == "t1").values(tenant_id="other")
        ),
        "rollup_meter of 2027-01-15",
    ),
    "engine time removed": (
        lambda db: db.execute(update(store.HOURS).values(idle_us=0)),
        "engine_hour of 2027-01-15",
    ),
    "a bill's line changed": (
        lambda db: db.execute(update(BILL_LINES).values(amount=Decimal(5))),
        "bill_line of",
    ),
    "a residual posted away": (lambda db: db.execute(delete(POSTINGS)), "posting of 2027-01"),
    "the manifest replaced": (
        lambda db: db.execute(update(CLOSED).values(manifest="{}")),
        "does not have its hash",
    ),
}


@pytest.mark.parametrize("what", TAMPERINGS)
async def test_tampering_with_a_closed_month_is_named(
    what: str, embedded: AsyncEngine, tmp_path: Path
) -> None:
    """Whatever is touched afterwards: the month does not add up, and says where."""
    engine = embedded
    await a_month(engine, tmp_path)
    await close_month(engine, "2027-01", LATER)
    assert await verified(engine) == []
    tamper, named = TAMPERINGS[what]
    async with engine.begin() as db:
        await tamper(db)
    found = await verified(engine)
    assert any(named in line for line in found), found
