"""A month's figures on the real path, on both databases: log → shipper → roll-up → report."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.database import open_engine
from telemetry.ledger import Ledger
from telemetry.ledger.rollups import roll_up_dirty
from telemetry.ledger.shipper import REQUESTS, Shipper
from telemetry.record import DeviceTime, Outcome, Timings
from telemetry.reports.agreement import differences
from telemetry.reports.chargeback import chargeback, dimensions
from telemetry.reports.explain import Story
from telemetry.reports.period import parse_period
from telemetry.reports.query import explain_record, hourly_sums, pending_hours
from telemetry.tables import LedgerBase
from telemetry.usage import Usage, UsageSource
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import admit, open_log, rate, refuse, serve

PERIOD = parse_period("2027-01-01", "2027-02-01")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


def _mixed_day(ledger: Ledger, clock: FakeClock) -> None:
    """Served, retried, cut, unpriced, on the engine, refused: over several hours."""
    for number in range(24):
        clock.advance(1_700)
        tenant = f"t{number % 3}"
        match number % 6:
            case 0:
                serve(ledger, tokens_in=100 + number, tokens_out=7, tenant=tenant)
            case 1:
                serve(ledger, tenant=tenant, model="unknown")
            case 2:
                retried = admit(ledger, tenant=tenant)
                retried.data.attempts[-1].outcome = Outcome.UPSTREAM_ERROR
                second = retried.attempt(
                    backend="c", provider="scripted", model="n", reason="retry"
                )
                retried.saw_chunk(4)
                second.usage = Usage(in_uncached_text=5, in_cached_read=6, out_text=1)
                second.usage_source = UsageSource.REPORTED
                retried.close(outcome=Outcome.OK, status=200)
            case 3:
                cut = admit(ledger, tenant=tenant, provider="openai")
                cut.saw_chunk(9)
                cut.close(outcome=Outcome.CLIENT_DISCONNECT, status=499)
            case 4:
                refuse(ledger)
            case _:
                owned = admit(ledger, tenant=tenant, provider="meterline.engine")
                owned.saw_chunk(4)
                owned.data.attempts[-1].timings = Timings(
                    device_us=DeviceTime(prefill=1_000 + number, decode=77, recompute=5)
                )
                owned.close(outcome=Outcome.OK, status=200)


async def _stories(engine: AsyncEngine) -> list[Story]:
    async with engine.connect() as db:
        ids = list((await db.execute(select(REQUESTS.c.request_id))).scalars())
    found = [await explain_record(engine, request_id) for request_id in ids]
    return [story for story in found if story is not None]


async def test_chargeback_says_what_the_requests_say_on_the_real_path(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """What was logged, shipped and rolled up adds up to the stories of the same requests, to the
    last digit, in every grouping; refused requests have no attempt and are in neither."""
    clock = FakeClock()
    wal = open_log(tmp_path / "wal", clock)
    try:
        _mixed_day(Ledger(wal=wal, rate=rate, clock=clock), clock)
        wal.sync()
        await Shipper(engine, wal, clock=clock, batch_records=7).ship_all()
    finally:
        wal.close()
    assert await pending_hours(engine, PERIOD) > 1
    await roll_up_dirty(engine)
    assert await pending_hours(engine, PERIOD) == 0
    stories = await _stories(engine)
    sums = await hourly_sums(engine, PERIOD)
    for by in ("tenant,model", "key", "backend,provider", "hour"):
        report = chargeback(sums, by=dimensions(by), period=PERIOD)
        assert differences(report, stories) == ()
    (total,) = report.totals
    assert len(stories) == 24
    assert (total.requests, total.attempts, total.unpriced_lines) == (20, 24, 8)
    assert total.cost > 0
