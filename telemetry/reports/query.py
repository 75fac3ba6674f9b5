"""What reports read from the ledger's tables: one question each, and no arithmetic on money.

Amounts are not added in SQL, because SQLite keeps them as text to keep them exact.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.capacity.allocation import Allocation, IdlePolicy, Payer, Used, allocate
from telemetry.capacity.store import lease_hours
from telemetry.pricing import DEVICE_METERS
from telemetry.record import RequestRecord
from telemetry.reports.chargeback import HourlySum
from telemetry.reports.explain import Story, tell
from telemetry.reports.meters import MeterSum
from telemetry.reports.period import Period
from telemetry.tables import (
    DirtyHourRow,
    MeterRollupRow,
    OpenIntentRow,
    PriceRow,
    RequestRow,
    RollupRow,
)


async def hourly_sums(db: AsyncEngine, period: Period) -> list[HourlySum]:
    """The roll-ups of a period, as they stand."""
    names = (name for name in HourlySum.__struct_fields__ if hasattr(RollupRow, name))
    columns = [getattr(RollupRow, name) for name in names]
    async with db.connect() as connection:
        rows = await connection.execute(
            select(*columns).where(RollupRow.hour >= period.start, RollupRow.hour < period.end)
        )
        return [HourlySum(**row._mapping) for row in rows]


async def meter_sums(db: AsyncEngine, period: Period) -> list[MeterSum]:
    """The sums by meter and price of a period, as they stand."""
    columns = [getattr(MeterRollupRow, name) for name in MeterSum.__struct_fields__]
    async with db.connect() as connection:
        rows = await connection.execute(
            select(*columns).where(
                MeterRollupRow.hour >= period.start, MeterRollupRow.hour < period.end
            )
        )
        return [MeterSum(**row._mapping) for row in rows]


async def list_prices(db: AsyncEngine, price_ids: Collection[str]) -> dict[str, Decimal]:
    """The public price beside a contracted one, where a book has both."""
    async with db.connect() as connection:
        rows = await connection.execute(
            select(PriceRow.price_id, PriceRow.list_unit_price).where(
                PriceRow.list_unit_price.is_not(None)
            )
        )
        return {row.price_id: row.list_unit_price for row in rows if row.price_id in price_ids}


async def allocations(
    db: AsyncEngine,
    period: Period,
    *,
    policy: IdlePolicy,
    entitlements: Mapping[str, int] | None = None,
) -> list[Allocation]:
    """The cost of owned hardware, split: a whole UTC month at a time, for each that the period
    touches, so that the same hour costs the same in every report."""
    found: list[Allocation] = []
    start = period.start.astimezone(UTC).replace(day=1, hour=0)
    while start < period.end:
        end = (start + timedelta(days=32)).replace(day=1)
        async with db.connect() as connection:
            leases = await lease_hours(connection, start, end)
        if leases:
            used = await _device_time(db, start, end)
            found.append(allocate(leases, used, policy=policy, entitlements=entitlements))
        start = end
    return found


async def _device_time(db: AsyncEngine, start: datetime, end: datetime) -> list[Used]:
    table = MeterRollupRow.__table__.c
    phases = {meter.value: phase for phase, meter in DEVICE_METERS}
    names = ("backend", "hour", "tenant_id", "key_id", "asked_model", "provider", "model")
    async with db.connect() as connection:
        rows = await connection.execute(
            select(*(table[name] for name in names), table.meter, table.quantity).where(
                table.hour >= start, table.hour < end, table.meter.in_(phases)
            )
        )
        return [
            Used(
                backend=row.backend,
                hour=row.hour,
                payer=Payer(row.tenant_id, row.key_id, row.asked_model, row.provider, row.model),
                phase=phases[row.meter],
                us=row.quantity,
            )
            for row in rows
        ]


async def pending_hours(db: AsyncEngine, period: Period) -> int:
    """How many hours of a period have requests that are not in the roll-ups yet."""
    async with db.connect() as connection:
        found = await connection.execute(
            select(func.count())
            .select_from(DirtyHourRow)
            .where(DirtyHourRow.hour >= period.start, DirtyHourRow.hour < period.end)
        )
        return int(found.scalar_one())


async def explain_record(
    db: AsyncEngine, request_id: str, tenant_names: Mapping[str, str] | None = None
) -> Story | None:
    """The story of one request, settled or still open. None: the ledger has not heard of it."""
    async with db.connect() as connection:
        for table in (RequestRow, OpenIntentRow):
            found = await connection.execute(
                select(table.record).where(table.request_id == request_id)
            )
            record = found.scalar_one_or_none()
            if record is not None:
                return tell(_decoder.decode(record), tenant_names)
    return None


_decoder = msgspec.json.Decoder(RequestRecord)
