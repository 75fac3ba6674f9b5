"""Hourly sums, recomputed from events and lines for each hour that was marked dirty.

One transaction per hour: the mark is deleted first (which locks it against the shipper), then the
hour's rows are replaced. So a roll-up may run twice, be killed, or race with the shipper: in the
end each hour equals its events. Token sums are integers in SQL; money is summed exactly in Python,
because SQLite keeps it as text.

An hour holds what was booked in it: what happened in it, unless its month was closed by then, and
corrections that were booked later. There are two tables: `rollup_hour` counts requests and tokens,
`rollup_meter` sums the charge lines by meter and price. Their money is the same.
"""

from collections import defaultdict
from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct
from sqlalchemy import case, cast, delete, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.ledger.rows import Row
from telemetry.ledger.shipper import DIRTY, EVENTS, LINES
from telemetry.money import EXACT
from telemetry.pricing import Meter, standard_tier
from telemetry.record import FAILURES, Outcome
from telemetry.tables import Big, MeterRollupRow, RollupRow
from telemetry.usage import BUCKETS

ROLLUPS: Any = RollupRow.__table__
METERS: Any = MeterRollupRow.__table__
DEFAULT_CURRENCY = "USD"  # of events that nobody charged for

_DIMENSIONS = ("tenant_id", "key_id", "asked_model", "backend", "provider", "model")
_INPUT = tuple(name for name in BUCKETS if name.startswith("in_"))
_OUTPUT = tuple(name for name in BUCKETS if name.startswith("out_"))
_DEVICE = ("prefill", "decode", "sampling", "recompute", "spec_rejected")
COUNTS = ("requests", "attempts", "input_tokens", "cached_tokens", "output_tokens", "device_us")

Key = tuple[str, ...]  # _DIMENSIONS and usage_source


class HourSums(Struct, frozen=True):
    """The rows of one hour in both tables."""

    hours: list[Row]
    meters: list[Row]


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
        for table, rows in ((ROLLUPS, fresh.hours), (METERS, fresh.meters)):
            await db.execute(delete(table).where(table.c.hour == hour))
            if rows:
                await db.execute(table.insert(), rows)


async def hour_sums(db: AsyncConnection, hour: datetime) -> HourSums:
    """What the roll-up of an hour must be, from its events and lines."""
    counts = await _event_sums(db, hour)
    money, meters = await _line_sums(db, hour)
    rows: list[Row] = []
    for key in sorted({*counts, *money}):
        # A correction can be booked in an hour in which nothing else of its kind happened.
        sums = counts.get(key) or dict.fromkeys(COUNTS, 0)
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
    return HourSums(rows, meters)


def waste_of(outcome: str, *, is_final: bool, is_hedge: bool, meter: str) -> str:
    """Why a line bought nothing that a client got; empty if it did. Tokens of a client that left
    were delivered up to then and are not waste by themselves, but they are shown as such: the
    reader decides."""
    if not is_final:
        return "hedge" if is_hedge else "failed attempt"
    if outcome == Outcome.CLIENT_DISCONNECT:
        return "client left"
    if outcome in FAILURES:
        return "failed request"
    if meter == Meter.GPU_RECOMPUTE:
        return "recompute"
    return "rejected speculation" if meter == Meter.GPU_SPEC_REJECTED else ""


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
        .where(columns.booked_hour == hour)
        .group_by(*keys)
    )
    width = len(keys)
    return {
        tuple(row[:width]): dict(zip(COUNTS, (int(value) for value in row[width:]), strict=True))
        for row in found
    }


async def _line_sums(
    db: AsyncConnection, hour: datetime
) -> tuple[dict[Key, dict[str, _Money]], list[Row]]:
    keys = _key_columns()
    width = len(keys)
    statement = (
        select(
            *keys,
            *(LINES.c[name] for name in ("hour", "meter", "unit", "unit_price", "price_id")),
            *(LINES.c[name] for name in ("quantity", "currency", "amount")),
            *(EVENTS.c[name] for name in ("service_tier", "outcome", "is_final", "reason")),
        )
        .join(EVENTS, EVENTS.c.event_id == LINES.c.event_id)
        .where(LINES.c.booked_hour == hour)
    )
    money: dict[Key, dict[str, _Money]] = defaultdict(dict)
    meters: dict[tuple[Any, ...], Row] = {}
    async with db.stream(statement) as found:
        async for row in found:
            paid = money[tuple(row[:width])].setdefault(row.currency, _Money())
            # A reversal takes back what its line counted, also when that had no price.
            sign = -1 if row.quantity < 0 else 1
            is_unpriced = row.amount is None
            if is_unpriced:
                paid.unpriced += sign
            else:
                paid.amount = EXACT.add(paid.amount, row.amount)
            _add_meter(meters, hour, tuple(row[: width - 1]), row, sign)
    return money, [meters[key] for key in sorted(meters)]


def _add_meter(
    meters: dict[tuple[Any, ...], Row], hour: datetime, dimensions: Key, row: Any, sign: int
) -> None:
    tier = standard_tier(row.service_tier)
    waste = waste_of(
        row.outcome, is_final=row.is_final, is_hedge=row.reason == "hedge", meter=row.meter
    )
    # Without a price id, the price itself tells lines apart: the column takes either.
    price_id = row.price_id or ("" if row.unit_price is None else f"={row.unit_price:f}/{row.unit}")
    key = (row.hour, *dimensions, tier, row.meter, price_id, waste, row.currency)
    sums = meters.get(key)
    if sums is None:
        sums = meters[key] = {
            "hour": hour,
            "charge_hour": row.hour,
            **dict(zip(_DIMENSIONS, dimensions, strict=True)),
            "service_tier": tier,
            "meter": row.meter,
            "price_id": price_id,
            "waste": waste,
            "currency": row.currency,
            "unit": row.unit,
            "unit_price": row.unit_price,
            "quantity": 0,
            "amount": Decimal(0),
            "lines": 0,
            "unpriced_lines": 0,
        }
    sums["quantity"] += row.quantity
    sums["lines"] += 1
    if row.amount is None:
        sums["unpriced_lines"] += sign
    else:
        sums["amount"] = EXACT.add(sums["amount"], row.amount)


__all__ = [
    "COUNTS",
    "DEFAULT_CURRENCY",
    "METERS",
    "ROLLUPS",
    "HourSums",
    "hour_sums",
    "roll_up_dirty",
    "roll_up_hour",
    "waste_of",
]
