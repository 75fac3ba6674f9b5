"""Heartbeats in both databases: booked once, whoever reports them and however often."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy.ext.asyncio import AsyncEngine

from backends import registry
from backends.openai_compat import step_times
from gateway.config import parse
from gateway.heartbeats import Heartbeats
from gateway.runtime import RuntimeHolder
from telemetry.capacity.heartbeat import Heartbeat, LeaseHour, StepTimes
from telemetry.capacity.store import book, lease_hours
from telemetry.clock import SystemClock
from telemetry.database import open_engine
from telemetry.ledger.shipper import CLOSED
from telemetry.tables import LedgerBase
from tests.fakes.gateway import Server

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
MINUTE = 60_000_000


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


def beat(minute: float, *, step: float, idle: float, rate: str = "2.5") -> Heartbeat:
    """A reading `minute` minutes after noon, of an engine that loaded for two minutes."""
    return Heartbeat(
        backend="local",
        at=NOON + timedelta(minutes=minute),
        times=StepTimes(
            load_us=MINUTE,
            warmup_us=MINUTE,
            step_us=round(step * MINUTE),
            idle_us=round(idle * MINUTE),
        ),
        rate_per_hour=Decimal(rate),
        devices=2,
    )


async def hours(engine: AsyncEngine) -> list[LeaseHour]:
    async with engine.connect() as db:
        return await lease_hours(db, NOON - timedelta(days=40), NOON + timedelta(days=40))


async def test_heartbeats_add_up_however_often_they_come(engine: AsyncEngine) -> None:
    """Two gateways report the same engine, one of them late and at the same time: each minute is
    booked once, in its hour."""
    beats = [
        beat(50, step=10, idle=38),
        beat(55, step=12, idle=41),
        beat(70, step=20, idle=48),
    ]
    for one in (beats[0], beats[0], beats[1]):
        await book(engine, one)
    await asyncio.gather(book(engine, beats[2]), book(engine, beats[2]))
    first, second = await hours(engine)
    assert (first.hour, second.hour) == (NOON, NOON + timedelta(hours=1))
    assert (first.times.wall_us, second.times.wall_us) == (60 * MINUTE, 10 * MINUTE)
    assert first.times.step_us + second.times.step_us == 20 * MINUTE
    assert first.times.load_us == MINUTE
    assert (first.rate_per_hour, first.devices) == (Decimal("2.5"), 2)


async def test_a_restart_is_a_new_lease_and_a_gap(engine: AsyncEngine) -> None:
    """Ten minutes down are nobody's time."""
    await book(engine, beat(20, step=8, idle=10))
    again = beat(40, step=3, idle=4.5)
    times = structs.replace(again.times, load_us=MINUTE // 2)
    await book(engine, structs.replace(again, times=times))
    found = await hours(engine)
    assert len({hour.lease_id for hour in found}) == 2
    assert sum(hour.times.wall_us for hour in found) == 29 * MINUTE


async def test_a_new_rate_holds_from_the_next_heartbeat(engine: AsyncEngine) -> None:
    """The same life of the engine, at two prices."""
    await book(engine, beat(20, step=8, idle=10))
    await book(engine, beat(30, step=10, idle=18, rate="3"))
    await book(engine, beat(40, step=11, idle=27, rate="3"))
    by_rate = {hour.rate_per_hour: hour.times.wall_us // MINUTE for hour in await hours(engine)}
    assert by_rate == {Decimal("2.5"): 20, Decimal(3): 20}


async def test_time_of_a_closed_month_is_booked_when_it_is_known(engine: AsyncEngine) -> None:
    """The closed month stays as it is; the time is not lost."""
    row = {"month": "2026-11", "closed_at": NOON, "manifest": "", "sha256": ""}
    async with engine.begin() as db:
        await db.execute(CLOSED.insert().values(**row))
    await book(engine, beat(12 * 60 + 30, step=100, idle=12 * 60 - 72))
    (found,) = await hours(engine)
    assert found.hour == datetime(2026, 12, 1, tzinfo=UTC)
    assert found.times.wall_us == (12 * 60 + 30) * MINUTE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ('meterline_engine_step_seconds_total{model="m",phase="load"} 2.5', None),
        (
            'meterline_engine_step_seconds_total{model="m",phase="load"} 2.500001\n'
            'meterline_engine_step_seconds_total{model="m",phase="warmup"} 0.7\n'
            'meterline_engine_step_seconds_total{model="m",phase="prefill"} 1.000003\n'
            'meterline_engine_step_seconds_total{model="m",phase="decode"} 1.234567890123e+06\n'
            'meterline_engine_step_seconds_total{model="m",phase="mixed"} 0.0\n'
            'meterline_engine_step_seconds_total{phase="idle",model="m"} 9007199.254740\n',
            StepTimes(
                load_us=2_500_001,
                warmup_us=700_000,
                step_us=1_234_567_890_123 + 1_000_003,
                idle_us=9_007_199_254_740,
            ),
        ),
    ],
    ids=["nothing", "still loading", "exact microseconds"],
)
def test_the_clock_is_read_from_the_metrics(text: str, expected: StepTimes | None) -> None:
    """Seconds come back as the microseconds that they were."""
    assert step_times(text) == expected


METRICS = (
    'meterline_engine_step_seconds_total{model="m",phase="load"} 2.5\n'
    'meterline_engine_step_seconds_total{model="m",phase="warmup"} 0.5\n'
    'meterline_engine_step_seconds_total{model="m",phase="decode"} 30.0\n'
    'meterline_engine_step_seconds_total{model="m",phase="idle"} 27.0\n'
)


async def test_a_gateway_books_what_its_engine_tells(engine: AsyncEngine) -> None:
    """Over HTTP as in production: the clock is asked for, booked once, and missed without harm
    when the engine is gone."""

    async def metrics(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/metrics"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": METRICS.encode()})

    async with Server(metrics) as server:
        config = parse(
            f'[[backends]]\nname = "local"\nkind = "engine"\nbase_url = "{server.base_url}/v1"\n'
            'allow_private = true\ngpu = { rate_per_hour = "3.6", count = 2 }\n'
            '[[routes]]\nmodel = "m"\ntargets = [{ backend = "local" }]\n'.encode()
        )
        runtimes = RuntimeHolder(
            config,
            engines={},
            build=registry.build,
            environment={},
            salt_key=b"0",
            clock=SystemClock(),
        )
        heartbeats = Heartbeats(runtimes, engine, SystemClock())
        await heartbeats.beat()
        await heartbeats.beat()
    await heartbeats.beat()
    await runtimes.aclose()
    assert (heartbeats.booked, heartbeats.missed) == (2, 1)
    now = datetime.now(UTC)
    async with engine.connect() as db:
        found = await lease_hours(db, now - timedelta(hours=2), now + timedelta(hours=1))
    assert sum(hour.times.wall_us for hour in found) == 60_000_000
    assert {(hour.rate_per_hour, hour.devices) for hour in found} == {(Decimal("3.6"), 2)}
