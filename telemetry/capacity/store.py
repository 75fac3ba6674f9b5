"""Engine leases and their hours in the database.

Any number of gateways may report the same engine: a heartbeat is booked against the counters that
the last one left, in one transaction, so the same reading twice adds nothing. Time of a closed
month is booked in the hour in which it becomes known.
"""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from msgspec import structs
from sqlalchemy import insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.capacity.heartbeat import Heartbeat, LeaseHour, StepTimes, cut
from telemetry.ledger.rows import hour_of
from telemetry.ledger.shipper import closed_months, month_of, upsert
from telemetry.tables import EngineHourRow, EngineLeaseRow

LEASES: Any = EngineLeaseRow.__table__
HOURS: Any = EngineHourRow.__table__

_IDS = UUID("8f2cf2a8-35a2-5a43-9a57-6f7f2f3f7f11")
_PHASES = StepTimes.__struct_fields__


async def book(engine: AsyncEngine, beat: Heartbeat) -> None:
    """Add what passed since the engine's last heartbeat to the hours in which it passed."""
    async with engine.begin() as db:
        await _lock(db, beat.backend)
        known = await _latest(db, beat.backend)
        if known is not None and beat.times.continues(_times(known)):
            if beat.times == _times(known):
                return
            origin, passed = known.started_at, beat.times.minus(_times(known))
            is_same = (known.rate_per_hour, known.devices) == (beat.rate_per_hour, beat.devices)
        else:  # a new life, or the first one that we hear of
            origin = beat.at - timedelta(microseconds=beat.times.wall_us)
            passed, is_same = beat.times, False
        seen_at = origin + timedelta(microseconds=beat.times.wall_us)
        lease_id = known.lease_id if known is not None and is_same else _lease_id(beat, origin)
        values = {"seen_at": seen_at, **structs.asdict(beat.times)}
        if is_same:
            await db.execute(update(LEASES).where(LEASES.c.lease_id == lease_id).values(values))
        else:
            await db.execute(
                insert(LEASES).values(
                    lease_id=lease_id,
                    backend=beat.backend,
                    started_at=origin,
                    rate_per_hour=beat.rate_per_hour,
                    devices=beat.devices,
                    **values,
                )
            )
        closed = await closed_months(db)
        for hour, times in cut(seen_at - timedelta(microseconds=passed.wall_us), passed):
            booked = hour_of(beat.at) if month_of(hour) in closed else hour
            await _add(db, lease_id, booked, times)


async def lease_hours(db: AsyncConnection, start: datetime, end: datetime) -> list[LeaseHour]:
    """All engine time that is booked in [start, end)."""
    found = await db.execute(
        select(
            LEASES.c.backend,
            HOURS,
            LEASES.c.rate_per_hour,
            LEASES.c.devices,
        )
        .join(LEASES, LEASES.c.lease_id == HOURS.c.lease_id)
        .where(HOURS.c.hour >= start, HOURS.c.hour < end)
        .order_by(LEASES.c.backend, HOURS.c.hour, HOURS.c.lease_id)
    )
    return [
        LeaseHour(
            backend=row.backend,
            hour=row.hour,
            lease_id=row.lease_id,
            rate_per_hour=row.rate_per_hour,
            devices=row.devices,
            times=_times(row),
        )
        for row in found
    ]


async def _lock(db: AsyncConnection, backend: str) -> None:
    """One writer per engine, until the transaction ends."""
    if db.dialect.name == "postgresql":
        await db.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"),
            {"name": f"meterline-lease-{backend}"},
        )
    else:
        await db.exec_driver_sql("BEGIN IMMEDIATE")


async def _latest(db: AsyncConnection, backend: str) -> Any | None:
    found = await db.execute(
        select(LEASES)
        .where(LEASES.c.backend == backend)
        .order_by(LEASES.c.seen_at.desc(), LEASES.c.lease_id)
        .limit(1)
    )
    return found.first()


async def _add(db: AsyncConnection, lease_id: str, hour: datetime, times: StepTimes) -> None:
    statement = upsert(db, HOURS).values(lease_id=lease_id, hour=hour, **structs.asdict(times))
    await db.execute(
        statement.on_conflict_do_update(
            index_elements=["lease_id", "hour"],
            set_={name: HOURS.c[name] + statement.excluded[name] for name in _PHASES},
        )
    )


def _times(row: Any) -> StepTimes:
    return StepTimes(**{name: getattr(row, name) for name in _PHASES})


def _lease_id(beat: Heartbeat, origin: datetime) -> str:
    rate = f"{beat.rate_per_hour.normalize():f}x{beat.devices}"
    return str(uuid5(_IDS, f"{beat.backend}/{origin.isoformat()}/{rate}/{beat.times.wall_us}"))


__all__ = ["HOURS", "LEASES", "book", "lease_hours"]
