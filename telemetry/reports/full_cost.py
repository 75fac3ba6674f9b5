"""The full basis of a report: owned hardware at what it cost, idle time included. Pure.

The usage basis shows what requests were charged when they were settled. The full basis replaces,
for each hour of an engine that reported its time, those charges by the shares of the hour's cost:
the sum is the bill of the hardware. Everything else stays as it was settled.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from msgspec import Struct, structs

from telemetry.capacity.allocation import Allocation, EngineHour, Share
from telemetry.reports.chargeback import HourlySum
from telemetry.reports.period import Period
from telemetry.reports.sheet import Sheet

_SCALE = Decimal("1e-6")


class EngineCost(Struct, frozen=True, kw_only=True):
    """One engine over a period: its time, its cost, and what a million tokens cost on it."""

    backend: str
    hours: int  # with any time in them
    capacity_us: int
    used_us: int
    overhead_us: int
    idle_us: int
    by_phase_us: dict[str, int]
    cost: Decimal
    used_cost: Decimal
    tokens: int  # in and out

    @property
    def utilisation(self) -> Decimal:
        """Used over capacity."""
        return _ratio(self.used_us, self.capacity_us) or Decimal(0)

    @property
    def marginal_per_million(self) -> Decimal | None:
        """The cost of the used time alone, a million tokens."""
        return _ratio(self.used_cost * 1_000_000, self.tokens)

    @property
    def loaded_per_million(self) -> Decimal | None:
        """The cost of all time, a million tokens."""
        return _ratio(self.cost * 1_000_000, self.tokens)


def full_basis(sums: Iterable[HourlySum], allocations: Iterable[Allocation]) -> list[HourlySum]:
    """The hourly sums with the settled cost of covered hours replaced by shares."""
    allocations = list(allocations)
    covered = {(hour.backend, hour.hour) for found in allocations for hour in found.hours}
    rows = [
        structs.replace(row, amount=Decimal(0)) if (row.backend, row.hour) in covered else row
        for row in sums
    ]
    rows.extend(_as_sum(share) for found in allocations for share in found.shares)
    return rows


def engine_costs(
    sums: Iterable[HourlySum], allocations: Iterable[Allocation], period: Period
) -> list[EngineCost]:
    """Utilisation and unit costs of each engine that reported time in the period."""
    tokens: dict[str, int] = defaultdict(int)
    for row in sums:
        if period.start <= row.hour < period.end:
            tokens[row.backend] += row.input_tokens + row.output_tokens
    hours: dict[str, list[EngineHour]] = defaultdict(list)
    shares: dict[str, list[Share]] = defaultdict(list)
    for found in allocations:
        for hour in found.hours:
            if period.start <= hour.hour < period.end:
                hours[hour.backend].append(hour)
        for share in found.shares:
            if period.start <= share.hour < period.end and share.bucket == "used":
                shares[share.backend].append(share)
    return [
        _engine_cost(backend, hours[backend], shares[backend], tokens[backend])
        for backend in sorted(hours)
    ]


def capacity_sheet(costs: Sequence[EngineCost], period: Period) -> Sheet:
    """Hours and dollars of each engine; the total is the bill of the hardware."""

    def hours(us: int) -> Decimal:
        return (Decimal(us) / 3_600_000_000).quantize(_SCALE, rounding=ROUND_HALF_UP)

    rows = tuple(
        (
            *(c.backend, hours(c.capacity_us), hours(c.used_us), hours(c.overhead_us)),
            *(hours(c.idle_us), c.utilisation, c.cost, c.used_cost, c.tokens),
            *(c.marginal_per_million, c.loaded_per_million),
        )
        for c in costs
    )
    total = (
        *("Total", *(hours(sum(getattr(c, name) for c in costs)) for name in _TIMES), None),
        *(sum((c.cost for c in costs), Decimal(0)), sum((c.used_cost for c in costs), Decimal(0))),
        *(sum(c.tokens for c in costs), None, None),
    )
    return Sheet(
        title=f"Owned hardware from {period.hour(period.start)} to {period.hour(period.end)}",
        columns=(
            *("engine", "hours", "used h", "overhead h", "idle h", "utilisation"),
            *("cost", "used cost", "tokens", "marginal per 1M", "loaded per 1M"),
        ),
        rows=rows,
        totals=(total,) if len(rows) > 1 else (),
        notes=(
            "Hours and quotients are rounded, dollars are not. Overhead: loading, warming up, and "
            "steps that no request of the gateway paid for. Marginal: the used time alone; loaded: "
            "all time.",
        ),
    )


_TIMES = ("capacity_us", "used_us", "overhead_us", "idle_us")


def _engine_cost(
    backend: str, hours: Sequence[EngineHour], used: Sequence[Share], tokens: int
) -> EngineCost:
    by_phase: dict[str, int] = defaultdict(int)
    for share in used:
        by_phase[share.phase] += share.us
    return EngineCost(
        backend=backend,
        hours=len(hours),
        capacity_us=sum(hour.capacity_us for hour in hours),
        used_us=sum(hour.used_us for hour in hours),
        overhead_us=sum(hour.overhead_us for hour in hours),
        idle_us=sum(hour.idle_us for hour in hours),
        by_phase_us=dict(sorted(by_phase.items())),
        cost=_dollars(sum(hour.nano for hour in hours)),
        used_cost=_dollars(sum(share.nano for share in used)),
        tokens=tokens,
    )


def _as_sum(share: Share) -> HourlySum:
    payer = share.payer
    return HourlySum(
        hour=share.hour,
        tenant_id=payer.tenant_id,
        key_id=payer.key_id,
        asked_model=payer.asked_model,
        backend=share.backend,
        provider=payer.provider,
        model=payer.model,
        usage_source="engine" if share.bucket == "used" else share.bucket,
        amount=share.amount,
    )


def _dollars(nano: int) -> Decimal:
    return Decimal(nano).scaleb(-9)


def _ratio(part: int | Decimal, whole: int) -> Decimal | None:
    if not whole:
        return None
    return (Decimal(part) / Decimal(whole)).quantize(_SCALE, rounding=ROUND_HALF_UP)


__all__ = ["EngineCost", "capacity_sheet", "engine_costs", "full_basis"]
