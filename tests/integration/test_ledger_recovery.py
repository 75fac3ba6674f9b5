"""After kill -9, outages and restarts the books are those of the process that died."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec import Struct
from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.clock import SystemClock
from telemetry.database import open_engine
from telemetry.ledger import Ledger, entries, frames
from telemetry.ledger.leader import leadership
from telemetry.ledger.reconcile import reconcile
from telemetry.ledger.rollups import ROLLUPS
from telemetry.ledger.shipper import EVENTS, INTENTS, LINES, REQUESTS, Shipper
from telemetry.ledger.worker import LedgerWorker, adopt_leftovers, catch_up
from telemetry.record import Outcome
from telemetry.tables import LedgerBase
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import admit, cost, open_log, rate, refuse, serve
from tests.services import free_port

CLOCK = SystemClock()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


class Books(Struct):
    """What a killed process said of itself."""

    settled: dict[str, int]
    refused: set[str]
    live: dict[str, int]  # admitted, not settled: chunks told so far


def _killed_writer(wal_dir: Path, seed: int, after_s: float) -> Books:
    """Run a writer, kill it after a while, and read its books."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.ledger_writer", str(wal_dir), str(seed)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"ready")
    killer = subprocess.Popen(["sleep", str(after_s)])
    books = Books({}, set(), {})
    lines: list[bytes] = []
    while killer.poll() is None:
        lines.append(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        what, request_id, chunks = line.decode().split()
        if what == "refused":
            books.refused.add(request_id)
        elif what == "settled":
            books.live.pop(request_id)
            books.settled[request_id] = int(chunks)
        else:
            books.live[request_id] = int(chunks)
    return books


async def test_kill_9_at_random_points_keeps_the_books(engine: AsyncEngine, tmp_path: Path) -> None:
    """Five lives of one node, each killed while it wrote: every settlement is there once and to the
    token, every open request is swept with the chunks it had read, and all laws hold."""
    chance = random.Random(7)
    all_books = []
    for seed in range(5):
        all_books.append(_killed_writer(tmp_path, seed, chance.uniform(0.05, 0.4)))
        if seed % 2:
            await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK)
    await catch_up(engine, tmp_path, rate=rate, clock=CLOCK)
    async with engine.connect() as db:
        rows = {row.request_id: row for row in await db.execute(select(REQUESTS))}
        lines = (await db.execute(select(LINES.c.request_id, LINES.c.amount))).all()
    charged: dict[str, Decimal] = {}
    for line in lines:
        charged[line.request_id] = charged.get(line.request_id, Decimal(0)) + line.amount
    told = 0
    for books in all_books:
        told += len(books.settled) + len(books.refused) + len(books.live)
        assert len(books.settled) > 5
        for request_id, chunks in books.settled.items():
            assert rows[request_id].outcome == "ok"
            assert charged[request_id] == cost(5, chunks)
        for request_id in books.refused:
            assert rows[request_id].outcome == "client_error"
        for request_id, chunks in books.live.items():
            record = entries.record_from_json(rows[request_id].record)
            if record.outcome == Outcome.OK:  # settled, and killed before it could say so
                continue
            assert record.outcome == Outcome.ABANDONED
            assert chunks <= record.chunks <= chunks + 1
            assert charged.get(request_id, 0) == (cost(5, record.chunks) if record.chunks else 0)
    # Each life may have done one thing that it could not tell any more.
    assert told <= len(rows) <= told + len(all_books)
    assert [
        law.line for law in await reconcile(engine, tmp_path, clock=CLOCK) if not law.holds
    ] == []
    assert list(tmp_path.glob("*/progress-*")) == []


async def test_a_restarted_node_sweeps_its_earlier_life(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """The worker of the new process settles what the old one left open, at once, and only that."""
    first = open_log(tmp_path, CLOCK)
    ledger = Ledger(wal=first, rate=rate, clock=CLOCK)
    dead = admit(ledger, tokens_in=9)
    for _ in range(4):
        dead.saw_chunk(3)
    first.close()  # its ledger is never closed: the process is gone
    wal = open_log(tmp_path, CLOCK)
    ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
    worker = LedgerWorker(engine, ledger=ledger, rate=rate, clock=CLOCK)
    alive = admit(ledger)
    await worker.flush()
    await worker.flush()
    async with engine.connect() as db:
        (row,) = (await db.execute(select(REQUESTS))).all()
        (event,) = (await db.execute(select(EVENTS))).all()
        waiting = (await db.execute(select(INTENTS.c.request_id))).scalars().all()
        rollups = (await db.execute(select(ROLLUPS))).all()
    assert (row.request_id, row.outcome) == (dead.data.request_id, "abandoned")
    assert (event.in_uncached_text, event.out_text, event.usage_source) == (9, 4, "estimated")
    assert waiting == [alive.data.request_id]
    assert [r.amount for r in rollups] == [cost(9, 4)]
    assert worker.sweeper.swept == 1
    alive.close(outcome=Outcome.OK, status=200)
    await worker.flush()
    assert all(law.holds for law in await reconcile(engine, tmp_path, clock=CLOCK))
    wal.close()


async def test_a_request_that_never_got_content_is_swept_without_cost(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Nothing is known to have been generated, so nothing is invented."""
    first = open_log(tmp_path, CLOCK)
    admit(Ledger(wal=first, rate=rate, clock=CLOCK))
    first.close()
    assert await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK) == 1
    assert await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK) == 0
    async with engine.connect() as db:
        (event,) = (await db.execute(select(EVENTS))).all()
        assert (await db.execute(select(LINES))).all() == []
    assert (event.outcome, event.usage_source) == ("abandoned", "none")


async def test_folders_in_use_are_left_to_their_owner(engine: AsyncEngine, tmp_path: Path) -> None:
    """Adoption takes only what nobody owns."""
    wal = open_log(tmp_path, CLOCK)
    serve(Ledger(wal=wal, rate=rate, clock=CLOCK))
    assert await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK) == 0
    wal.close()
    assert await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK) == 1


async def test_requests_of_a_machine_that_never_came_back_are_swept_late(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Past deadline and a long grace the leader settles them; if the true settlement arrives after
    all, it is kept as a conflict."""
    clock = FakeClock()
    far = open_log(tmp_path / "far", clock)
    far_ledger = Ledger(wal=far, rate=rate, clock=clock)
    lost = admit(far_ledger)
    far.sync()
    await Shipper(engine, far, clock=clock).ship_all()
    wal = open_log(tmp_path / "near", clock)
    worker = LedgerWorker(
        engine, ledger=Ledger(wal=wal, rate=rate, clock=clock), rate=rate, clock=clock
    )
    await worker.lead()
    assert worker.sweeper.swept == 0
    clock.advance(25 * 3600)
    await worker.lead()
    await worker.flush()
    assert worker.sweeper.swept == 1
    laws = await reconcile(engine, tmp_path / "near", clock=clock)
    assert all(law.holds for law in laws)
    lost.close(outcome=Outcome.OK, status=200)
    far.sync()
    shipper = Shipper(engine, far, clock=clock)
    await shipper.ship_all()
    assert shipper.conflicts == 1
    broken = [
        law for law in await reconcile(engine, tmp_path / "near", clock=clock) if not law.holds
    ]
    assert [(law.name, law.offenders) for law in broken] == [("conflicts", (lost.data.request_id,))]
    far.close()
    wal.close()


async def test_the_worker_ships_by_itself_and_survives_an_outage(
    engine: AsyncEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows appear without being asked for; while the tables are away the failure is logged once and
    counted; afterwards everything is there."""
    wal = open_log(tmp_path, CLOCK)
    ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
    worker = LedgerWorker(engine, ledger=ledger, rate=rate, clock=CLOCK)
    task = asyncio.create_task(worker.run())

    async def until(count: int) -> None:
        deadline = time.monotonic() + 15
        while worker.shipper.requests < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    serve(ledger)
    await until(1)
    async with engine.begin() as db:
        await db.execute(text("ALTER TABLE spool_cursor RENAME TO away"))
    serve(ledger)
    while worker.failures < 2:
        await asyncio.sleep(0.02)
    assert not worker.is_database_reachable
    async with engine.begin() as db:
        await db.execute(text("ALTER TABLE away RENAME TO spool_cursor"))
    await until(2)
    while not worker.is_database_reachable or worker.lag_s:
        await asyncio.sleep(0.02)
    assert worker.residuals() == {"requests": 0, "wal": 0}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    shipping = [r for r in caplog.records if getattr(r, "work", "") == "ship"]
    assert len(shipping) == 1
    wal.close()


async def test_serving_goes_on_without_a_database(tmp_path: Path, database_url: str) -> None:
    """Requests are admitted and settled while nothing can be shipped; a later life ships them."""
    nowhere = open_engine(f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    wal = open_log(tmp_path, CLOCK)
    ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
    worker = LedgerWorker(nowhere, ledger=ledger, rate=rate, clock=CLOCK)
    task = asyncio.create_task(worker.run())
    while worker.failures < 3:
        serve(ledger)
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not worker.is_database_reachable
    assert wal.pending_bytes() > 0
    ledger.close()
    await nowhere.dispose()
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    await catch_up(engine, tmp_path, rate=rate, clock=CLOCK)
    laws = await reconcile(engine, tmp_path, clock=CLOCK)
    assert [law.line for law in laws if not law.holds] == []
    async with engine.connect() as db:
        assert len((await db.execute(select(REQUESTS))).all()) == ledger.settled
    await engine.dispose()


async def test_a_leftover_log_of_a_newer_version_stops_no_other(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """What cannot be read is logged and left; the folders behind it are shipped."""
    for name in ("a", "b"):
        wal = open_log(tmp_path, CLOCK, name)
        ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
        serve(ledger)
        ledger.close()
    (segment,) = (tmp_path / "a").glob("*.wal")
    header = frames.encode(
        frames.Kind.SEGMENT, entries.pack(entries.SegmentHeader(99, "n", 1, 0, 0))
    )
    segment.write_bytes(header)
    assert await adopt_leftovers(engine, tmp_path, rate=rate, clock=CLOCK) == 1


async def test_one_leader_at_a_time(engine: AsyncEngine, tmp_path: Path) -> None:
    """A second worker is told no, and may lead once the first is done."""
    async with leadership(engine, tmp_path) as first, leadership(engine, tmp_path) as second:
        assert (first, second) == (True, False)
    async with leadership(engine, tmp_path) as third:
        assert third


@pytest.mark.parametrize(
    ("tamper", "law"),
    [
        pytest.param(lambda: delete(LINES).where(LINES.c.quantity == 5), "records", id="line-lost"),
        pytest.param(lambda: delete(EVENTS).where(EVENTS.c.out_text == 4), "records", id="event"),
        pytest.param(
            lambda: delete(REQUESTS).where(REQUESTS.c.status == 401), "requests", id="row"
        ),
        pytest.param(
            lambda: update(LINES).where(LINES.c.quantity == 3).values(amount=Decimal("0.1")),
            "records",
            id="amount-changed",
        ),
        pytest.param(
            lambda: update(REQUESTS).where(REQUESTS.c.status == 200).values(tenant_id="t2"),
            "records",
            id="tenant-moved",
        ),
        pytest.param(
            lambda: update(ROLLUPS).values(output_tokens=ROLLUPS.c.output_tokens + 1),
            "rollup output_tokens",
            id="rollup-changed",
        ),
        pytest.param(lambda: delete(INTENTS), "intents", id="intent-lost"),
    ],
)
async def test_reconcile_finds_each_tampering(
    engine: AsyncEngine, tmp_path: Path, tamper: object, law: str
) -> None:
    """All laws hold on honest books; each change of a row breaks the law that guards it."""
    wal = open_log(tmp_path, CLOCK)
    ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
    for tokens in (3, 4, 5):
        serve(ledger, tokens_out=tokens)
    refuse(ledger)
    left_open = admit(ledger)
    worker = LedgerWorker(engine, ledger=ledger, rate=rate, clock=CLOCK)
    await worker.flush()
    honest = await reconcile(engine, tmp_path, clock=CLOCK)
    assert [found.line for found in honest if not found.holds] == []
    async with engine.begin() as db:
        if engine.dialect.name == "sqlite":  # else the database itself refuses
            await db.exec_driver_sql("PRAGMA foreign_keys=OFF")
        if law == "records" and engine.dialect.name == "postgresql":
            await db.exec_driver_sql(
                "ALTER TABLE charge_line DROP CONSTRAINT charge_line_event_id_fkey"
            )
        await db.execute(tamper())  # type: ignore[operator]  # a statement factory
    broken = [
        found.name for found in await reconcile(engine, tmp_path, clock=CLOCK) if not found.holds
    ]
    assert law in broken
    left_open.close(outcome=Outcome.OK, status=200)
    wal.close()
