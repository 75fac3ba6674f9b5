"""Hourly sums, recomputed from events and lines for each hour that was marked dirty.

One transaction per hour: the mark is deleted first (which locks it against the shipper), then the
hour's rows are replaced. So a roll-up may run twice, be killed, or race with the shipper: in the
end each hour equals its events. Token sums are integers in SQL; money is summed exactly in Python,
because SQLite keeps it as text.
"""

from collections import defaultdict
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from msgspec import Struct
from sqlalchemy import case, cast, delete, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.ledger.rows import Row
from telemetry.ledger.shipper import DIRTY, EVENTS, LINES
from telemetry.money import EXACT
from telemetry.tables import Big, RollupRow
from telemetry.usage import BUCKETS

ROLLUPS: Any = RollupRow.__table__
DEFAULT_CURRENCY = "USD"  # of events that nobody charged for

_DIMENSIONS = ("tenant_id", "key_id", "asked_model", "backend", "provider", "model")
_INPUT = tuple(name for name in BUCKETS if name.startswith("in_"))
_OUTPUT = tuple(name for name in BUCKETS if name.startswith("out_"))
_DEVICE = ("prefill", "decode", "sampling", "recompute", "spec_rejected")
COUNTS = ("requests", "attempts", "input_tokens", "cached_tokens", "output_tokens", "device_us")

Key = tuple[str, ...]  # _DIMENSIONS and usage_source


class _Money(Struct):
    amount: Decimal = Decimal(0)
    unpriced: int = 0


async def roll_up_dirty(engine: AsyncEngine, *, limit: int = 1000) -> int:
    """Recompute every hour that is dirty now, oldest first. Returns how many."""
    async with engine.connect() as db:
        found = await db.execute(select(DIRTY.c.hour).order_by(DIRTY.c.hour).limit(limit))
        hours = list(found.scalars())
    for hour in hours:
        await roll_up_hour(engine, hour)
    return len(hours)


async def roll_up_hour(engine: AsyncEngine, hour: datetime) -> None:
    """Replace the sums of one hour."""
    async with engine.begin() as db:
        await db.execute(delete(DIRTY).where(DIRTY.c.hour == hour))
        fresh = await hour_sums(db, hour)
        await db.execute(delete(ROLLUPS).where(ROLLUPS.c.hour == hour))
        if fresh:
            await db.execute(ROLLUPS.insert(), fresh)


async def hour_sums(db: AsyncConnection, hour: datetime) -> list[Row]:
    """What the roll-up of an hour must be, from its events and lines."""
    counts = await _event_sums(db, hour)
    money = await _line_sums(db, hour)
    rows: list[Row] = []
    for key, sums in sorted(counts.items()):
        currencies = sorted(money.get(key, {})) or [DEFAULT_CURRENCY]
        for currency in currencies:
            # Counts stand in the first currency's row only, so that they are not counted twice.
            counted = sums if currency == currencies[0] else dict.fromkeys(COUNTS, 0)
            paid = money.get(key, {}).get(currency, _Money())
            rows.append(
                {
                    "hour": hour,
                    **dict(zip((*_DIMENSIONS, "usage_source"), key, strict=True)),
                    **counted,
                    "amount": paid.amount,
                    "unpriced_lines": paid.unpriced,
                    "currency": currency,
                }
            )
    return rows


def _key_columns() -> list[Any]:
    # A literal, not a parameter: PostgreSQL must see the same expression in SELECT and GROUP BY.
    nobody: Any = literal_column("''")
    return [
        *(func.coalesce(EVENTS.c[name], nobody) for name in _DIMENSIONS),
        EVENTS.c.usage_source,
    ]


async def _event_sums(db: AsyncConnection, hour: datetime) -> dict[Key, dict[str, int]]:
    columns = EVENTS.c
    device = sum(
        (func.coalesce(columns[f"engine_us_{phase}"], 0) for phase in _DEVICE[1:]),
        start=func.coalesce(columns[f"engine_us_{_DEVICE[0]}"], 0),
    )
    sums = (
        func.sum(case((columns.is_final, 1), else_=0)),
        func.count(),
        func.sum(sum((columns[name] for name in _INPUT[1:]), columns[_INPUT[0]])),
        func.sum(columns.in_cached_read),
        func.sum(sum((columns[name] for name in _OUTPUT[1:]), columns[_OUTPUT[0]])),
        func.sum(device),
    )
    keys = _key_columns()
    found = await db.execute(
        select(*keys, *(cast(value, Big) for value in sums))
        .where(columns.occurred_at >= hour, columns.occurred_at < hour + timedelta(hours=1))
        .group_by(*keys)
    )
    width = len(keys)
    return {
        tuple(row[:width]): dict(zip(COUNTS, (int(value) for value in row[width:]), strict=True))
        for row in found
    }


async def _line_sums(db: AsyncConnection, hour: datetime) -> dict[Key, dict[str, _Money]]:
    keys = _key_columns()
    width = len(keys)
    statement = (
        select(*keys, LINES.c.currency, LINES.c.amount)
        .join(EVENTS, EVENTS.c.event_id == LINES.c.event_id)
        .where(LINES.c.hour == hour)
    )
    money: dict[Key, dict[str, _Money]] = defaultdict(dict)
    async with db.stream(statement) as found:
        async for row in found:
            paid = money[tuple(row[:width])].setdefault(row.currency, _Money())
            if row.amount is None:
                paid.unpriced += 1
            else:
                paid.amount = EXACT.add(paid.amount, row.amount)
    return money


__all__ = ["COUNTS", "DEFAULT_CURRENCY", "ROLLUPS", "hour_sums", "roll_up_dirty", "roll_up_hour"]
