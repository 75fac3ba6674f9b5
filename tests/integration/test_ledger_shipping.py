"""From the log to the rows, on both databases: exactly once, whatever is replayed."""

from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.database import open_engine
from telemetry.ledger import Ledger, WriteAheadLog, entries
from telemetry.ledger.rollups import ROLLUPS, roll_up_dirty
from telemetry.ledger.shipper import (
    CONFLICTS,
    CURSORS,
    DIRTY,
    EVENTS,
    INTENTS,
    LINES,
    REQUESTS,
    Shipper,
)
from telemetry.ledger.wal import START
from telemetry.record import Outcome, RequestRecord
from telemetry.tables import LedgerBase
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import admit, cost, open_log, rate, refuse, serve


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def wal(tmp_path: Path, clock: FakeClock) -> Iterator[WriteAheadLog]:
    log = open_log(tmp_path / "wal", clock, segment_bytes=64 << 10)
    yield log
    log.close()


@pytest.fixture
def ledger(wal: WriteAheadLog, clock: FakeClock) -> Ledger:
    return Ledger(wal=wal, rate=rate, clock=clock)


async def _count(engine: AsyncEngine, table: object) -> int:
    async with engine.connect() as db:
        return int(await db.scalar(select(func.count()).select_from(table)) or 0)  # type: ignore[arg-type]  # tables are typed Any here


async def _ship(engine: AsyncEngine, wal: WriteAheadLog, clock: FakeClock) -> Shipper:
    wal.sync()
    shipper = Shipper(engine, wal, clock=clock, batch_records=7)
    await shipper.ship_all()
    return shipper


async def test_requests_become_rows_and_the_cursor_moves_with_them(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """Served, refused and open requests: rows, events, lines and open intents, and exact sums."""
    for number in range(20):
        serve(ledger, tokens_out=number, tenant=f"t{number % 3}")
    refuse(ledger)
    still_open = admit(ledger)
    shipper = await _ship(engine, wal, clock)
    assert await _count(engine, REQUESTS) == 21
    assert await _count(engine, EVENTS) == 20
    assert await _count(engine, LINES) == 39
    async with engine.connect() as db:
        amounts = (await db.execute(select(LINES.c.amount))).scalars().all()
        (intent,) = (await db.execute(select(INTENTS))).all()
        cursor = (await db.execute(select(CURSORS))).one()
    assert sum(amounts, Decimal(0)) == sum((cost(7, n) for n in range(20)), Decimal(0))
    assert intent.request_id == still_open.data.request_id
    assert entries.record_from_json(intent.record).attempts[0].backend == "b"
    assert (cursor.records, cursor.admitted, cursor.settled, cursor.refused) == (63, 21, 21, 1)
    assert shipper.position == wal.end
    still_open.close(outcome=Outcome.OK, status=200)


async def test_replaying_the_log_inserts_nothing(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """A lost cursor replays the whole log: not one row more, and no conflict."""
    records = [serve(ledger) for _ in range(12)]
    open_record = admit(ledger)
    await _ship(engine, wal, clock)
    before = [await _count(engine, t) for t in (REQUESTS, EVENTS, LINES, INTENTS)]
    async with engine.begin() as db:
        await db.execute(delete(CURSORS))
    again = await _ship(engine, wal, clock)
    assert [await _count(engine, t) for t in (REQUESTS, EVENTS, LINES, INTENTS)] == before
    assert (again.requests, again.duplicates, again.conflicts) == (0, len(records), 0)
    open_record.close(outcome=Outcome.OK, status=200)


async def test_an_intent_is_closed_by_a_later_batch(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """An intent shipped while its request ran, with a newer attempt shipped later, then settled."""
    record = admit(ledger)
    await _ship(engine, wal, clock)
    record.attempt(backend="second", provider="scripted", model="m", reason="fallback")
    await _ship(engine, wal, clock)
    async with engine.connect() as db:
        stored = (await db.execute(select(INTENTS.c.record))).scalar_one()
    assert [a.backend for a in entries.record_from_json(stored).attempts] == ["b", "second"]
    record.close(outcome=Outcome.OK, status=200)
    await _ship(engine, wal, clock)
    assert await _count(engine, INTENTS) == 0


async def test_other_facts_for_the_same_id_are_a_conflict_and_never_overwrite(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """The first settlement stays; the other one is kept apart, once."""
    first = serve(ledger, tokens_out=3)
    await _ship(engine, wal, clock)
    other: RequestRecord = entries.record_from_json(entries.to_json(first.data))
    other.status = 500
    for _ in range(2):
        wal.append_settlement(
            entries.pack(entries.Settlement(other.request_id, True, entries.to_json(other))),
            admitted=False,
        )
    shipper = await _ship(engine, wal, clock)
    async with engine.connect() as db:
        assert (await db.execute(select(REQUESTS.c.status))).scalars().all() == [200]
        kept = (await db.execute(select(CONFLICTS))).all()
    assert [row.request_id for row in kept] == [other.request_id]
    assert shipper.conflicts == 2


async def test_a_record_the_database_refuses_is_set_aside_and_the_log_goes_on(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """A number no column can hold is parked as a conflict; the requests around it are shipped."""
    serve(ledger)
    bad = admit(ledger)
    bad.data.status = 2**40 if engine.dialect.name == "postgresql" else 2**63 - 1
    record = serve(ledger)
    bad.data.attempts[0].usage = None
    bad.close(outcome=Outcome.OK, status=2**63)
    serve(ledger)
    shipper = await _ship(engine, wal, clock)
    assert await _count(engine, REQUESTS) == 3
    assert shipper.rejected == 1
    async with engine.connect() as db:
        kept = (await db.execute(select(CONFLICTS.c.request_id))).scalars().all()
    assert kept == [bad.data.request_id]
    assert record.is_closed


async def test_a_record_that_cannot_be_decoded_is_set_aside(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """A whole frame with senseless content does not stop the log."""
    wal.append_settlement(b"senseless", admitted=False)
    serve(ledger)
    shipper = await _ship(engine, wal, clock)
    assert await _count(engine, REQUESTS) == 1
    assert await _count(engine, CONFLICTS) == 1
    assert shipper.position == wal.end


async def test_text_that_a_column_cannot_hold_is_cut(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """NUL and overlong text from a client reach the database without stopping it."""
    record = admit(ledger)
    record.data.asked_model = "nul\0" + "x" * 5000
    record.close(outcome=Outcome.CLIENT_ERROR, status=404, error_code="e" * 500)
    shipper = await _ship(engine, wal, clock)
    async with engine.connect() as db:
        row = (await db.execute(select(REQUESTS))).one()
    assert row.asked_model.startswith("nul�x")
    assert (len(row.asked_model), len(row.error_code)) == (256, 64)
    assert shipper.rejected == 0


async def test_rollups_equal_events_and_are_idempotent(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """Sums per hour and dimension, exact, and the same after a second run."""
    for number in range(10):
        serve(ledger, tokens_out=number, tenant=f"t{number % 2}")
        clock.advance(600)
    serve(ledger, model="unknown", tokens_out=5)
    await _ship(engine, wal, clock)
    assert await roll_up_dirty(engine) == 2
    assert await _count(engine, DIRTY) == 0

    async def stored() -> list[tuple[object, ...]]:
        async with engine.connect() as db:
            found = await db.execute(select(ROLLUPS).order_by(*ROLLUPS.primary_key.columns))
            return [tuple(row) for row in found]

    once = await stored()
    async with engine.begin() as db:
        rows = (await db.execute(select(ROLLUPS))).all()
        await db.execute(
            DIRTY.insert(), [{"hour": h, "marked_at": h} for h in {row.hour for row in rows}]
        )
    await roll_up_dirty(engine)
    assert await stored() == once
    priced = [row for row in rows if row.model == "m"]
    assert sum(row.requests for row in rows) == sum(row.attempts for row in rows) == 11
    assert sum(row.output_tokens for row in rows) == 50
    assert sum((row.amount for row in priced), Decimal(0)) == sum(
        (cost(7, n) for n in range(10)), Decimal(0)
    )
    (unpriced,) = (row for row in rows if row.model == "unknown")
    assert (unpriced.amount, unpriced.unpriced_lines) == (0, 2)


async def test_nothing_is_lost_while_the_database_is_away(
    engine: AsyncEngine, wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """A failing batch is rolled back whole; once the table is back, shipping goes on from there."""
    serve(ledger)
    wal.sync()
    shipper = Shipper(engine, wal, clock=clock)
    await shipper.ship_all()
    serve(ledger)
    wal.sync()
    async with engine.begin() as db:
        await db.execute(text("ALTER TABLE charge_line RENAME TO away"))
    with pytest.raises(Exception, match="charge_line"):
        await shipper.ship_all()
    assert await _count(engine, REQUESTS) == 1
    async with engine.begin() as db:
        await db.execute(text("ALTER TABLE away RENAME TO charge_line"))
    await shipper.ship_all()
    assert await _count(engine, REQUESTS) == 2
    assert shipper.position == wal.end > START
