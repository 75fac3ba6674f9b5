"""Every report by its name, from the database: what commands and the API both ask.

Reads the sums, calls the pure report, returns it unrendered. Writes nothing.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal, get_args

from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry import books
from telemetry.capacity.allocation import IdlePolicy
from telemetry.reports.chargeback import (
    METER_DIMENSIONS,
    Chargeback,
    Dimension,
    GroupingInvalid,
    TenantPlace,
    chargeback,
)
from telemetry.reports.counterfactual import has_price, savings, what_if
from telemetry.reports.forecast import forecast, forecast_sheet
from telemetry.reports.full_cost import capacity_sheet, engine_costs, full_basis
from telemetry.reports.meters import as_hourly
from telemetry.reports.period import Period
from telemetry.reports.query import allocations, hourly_sums, meter_sums, pending_hours
from telemetry.reports.sheet import Sheet
from telemetry.reports.variance import bridge, bridge_sheet, facts
from telemetry.reports.waste import waste

Basis = Literal["usage", "full"]
SheetName = Literal["capacity", "savings", "waste", "variance", "forecast"]
SHEETS: tuple[SheetName, ...] = get_args(SheetName)
LEARNED_DAYS = 90  # that a forecast looks back


class PriceUnknown(LookupError):
    """No published book has the price that a what-if asks for."""


class Desk:
    """`names`: tenant id → name, asked for each report that shows tenants; `places`: likewise where
    each stands."""

    def __init__(
        self,
        engine: AsyncEngine,
        names: Callable[[], Awaitable[Mapping[str, str]]],
        places: Callable[[], Awaitable[Mapping[str, TenantPlace]]],
    ) -> None:
        self._engine = engine
        self._names = names
        self._places = places

    async def chargeback(
        self,
        period: Period,
        by: Sequence[Dimension],
        *,
        basis: Basis = "usage",
        policy: IdlePolicy = "keep",
        entitlements: Mapping[str, int] | None = None,
        only: Collection[str] | None = None,
    ) -> Chargeback:
        """`only`: of these tenants. Raises GroupingInvalid if the basis has no such dimension."""
        is_by_meter = any(name in METER_DIMENSIONS for name in by)
        if is_by_meter and basis == "full":
            raise GroupingInvalid("idle time has no meter: use the usage basis for this grouping")
        if is_by_meter:
            sums = [as_hourly(row) for row in await meter_sums(self._engine, period)]
        else:
            sums = await hourly_sums(self._engine, period)
        if basis == "full":
            split = await allocations(
                self._engine, period, policy=policy, entitlements=entitlements
            )
            sums = full_basis(sums, split)
        names = await self._names()
        if only is not None:
            sums = [row for row in sums if row.tenant_id in only]
            names = {tenant_id: name for tenant_id, name in names.items() if tenant_id in only}
        return chargeback(
            sums,
            by=by,
            period=period,
            tenant_names=names,
            places=await self._places(),
            pending_hours=await pending_hours(self._engine, period),
        )

    async def sheet(self, name: SheetName, period: Period, *, today: date) -> Sheet:
        """One of the reports that need nothing but a period. `today` is for the forecast."""
        match name:
            case "capacity":
                sums = await hourly_sums(self._engine, period)
                split = await allocations(self._engine, period, policy="keep")
                return capacity_sheet(engine_costs(sums, split, period), period)
            case "savings":
                rows = await meter_sums(self._engine, period)
                return savings(rows, await books.load(self._engine))
            case "waste":
                rows = await meter_sums(self._engine, period)
                return waste(rows, await allocations(self._engine, period, policy="keep"), period)
            case "variance":
                length = period.end - period.start
                before = Period(period.start - length, period.start, period.zone)
                return await self.variance(before, period)
            case "forecast":
                return await self.forecast(min(today, period.end.date()))

    async def variance(self, before: Period, after: Period) -> Sheet:
        """Why the cost changed from one period to the other."""
        old = await meter_sums(self._engine, before), await hourly_sums(self._engine, before)
        new = await meter_sums(self._engine, after), await hourly_sums(self._engine, after)
        currencies = sorted({row.currency for row in (*old[0], *new[0])})
        return bridge_sheet(
            [bridge(facts(*old, c), facts(*new, c), c) for c in currencies],
            f"From {before.day(before.start)} to {after.day(after.start)}",
        )

    async def what_if(self, period: Period, provider: str, model: str) -> Sheet:
        """The same tokens as another model. Raises PriceUnknown."""
        book = await books.load(self._engine)
        if not has_price(book, provider, model, int(period.start.timestamp()) * 10**9):
            raise PriceUnknown(f"no published book has a price for {provider}/{model}")
        return what_if(await meter_sums(self._engine, period), book, provider, model)

    async def forecast(self, today: date) -> Sheet:
        """Where the month of `today` will end, from the days before it."""
        first = today.replace(day=1)
        start = datetime.combine(first - timedelta(days=LEARNED_DAYS), time(), UTC)
        by_day: dict[str, dict[date, Decimal]] = {}
        learned = Period(start, datetime.combine(today, time(), UTC))
        for row in await hourly_sums(self._engine, learned):
            days = by_day.setdefault(row.currency, {})
            day = row.hour.date()
            days[day] = days.get(day, Decimal(0)) + row.amount
        until = (first + timedelta(days=32)).replace(day=1)
        return forecast_sheet(
            {
                currency: forecast(days, first=first, today=today, until=until)
                for currency, days in by_day.items()
            }
        )


__all__ = ["SHEETS", "Basis", "Desk", "PriceUnknown", "SheetName"]
