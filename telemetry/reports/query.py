"""What reports read from the ledger's tables: one question each, and no arithmetic on money.

Amounts are not added in SQL, because SQLite keeps them as text to keep them exact.
"""

from collections.abc import Mapping

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.record import RequestRecord
from telemetry.reports.chargeback import HourlySum
from telemetry.reports.explain import Story, tell
from telemetry.reports.period import Period
from telemetry.tables import DirtyHourRow, OpenIntentRow, RequestRow, RollupRow


async def hourly_sums(db: AsyncEngine, period: Period) -> list[HourlySum]:
    """The roll-ups of a period, as they stand."""
    columns = [getattr(RollupRow, name) for name in HourlySum.__struct_fields__]
    async with db.connect() as connection:
        rows = await connection.execute(
            select(*columns).where(RollupRow.hour >= period.start, RollupRow.hour < period.end)
        )
        return [HourlySum(**row._mapping) for row in rows]


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
