"""Who used what and what it cost: hourly sums grouped by any of their dimensions. Pure.

Money is added exactly and never rounded; only the figures per million tokens are quotients, rounded
half up to 6 decimals and marked as such by their names. Lines without a price are counted beside
the cost, never as zero in it. The totals are added up from the hourly sums themselves, so a line
that grouping lost would show as a difference.

A request counts by its attempt that served it, else by its last one. A request that was refused
before any backend was asked has no attempt, used nothing and is not counted here; how many there
were is a matter of the metrics and of `gateway_request`.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal, get_args

from msgspec import Struct

from telemetry.money import EXACT
from telemetry.reports.period import Period

Dimension = Literal[
    "tenant",
    "level-1",
    "level-2",
    "level-3",
    "level-4",
    "cost-centre",
    "key",
    "model",
    "asked-model",
    "backend",
    "provider",
    "source",
    "meter",
    "service-tier",
    "waste",
    "hour",
    "day",
    "month",
]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
LEVELS: dict[str, int] = {"level-1": 1, "level-2": 2, "level-3": 3, "level-4": 4}
NAMED = ("tenant", *LEVELS)  # whose values are tenants' ids
TIMES = ("hour", "day", "month")
METER_DIMENSIONS = ("meter", "service-tier", "waste")  # of the sums by meter only
_PER_MILLION_SCALE = Decimal("1e-6")


class GroupingInvalid(ValueError):
    """The message names the dimensions there are."""


class TenantPlace(Struct, frozen=True, kw_only=True):
    """Where a tenant stands: the ids from the top down to itself, and where it is booked."""

    ids: tuple[str, ...]
    cost_centre: str | None = None


class HourlySum(Struct, frozen=True, kw_only=True):
    """One row of rollup_hour. `model` is the priced one: answered, else routed."""

    hour: datetime
    tenant_id: str = ""  # "": nobody was identified
    key_id: str = ""
    asked_model: str = ""
    backend: str = ""
    provider: str = ""
    model: str = ""
    usage_source: str = "none"
    currency: str = "USD"
    requests: int = 0
    attempts: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    device_us: int = 0
    amount: Decimal = Decimal(0)
    unpriced_lines: int = 0
    meter: str = ""  # set in sums by meter only, and then requests are not counted
    service_tier: str = ""
    waste: str = ""


class Line(Struct, frozen=True, kw_only=True):
    """The sums of one group in one currency. `group` has a value per dimension of the report."""

    group: tuple[str, ...]
    currency: str
    requests: int = 0
    attempts: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    device_us: int = 0
    cost: Decimal = Decimal(0)
    unpriced_lines: int = 0

    @property
    def cost_per_million_tokens(self) -> Decimal | None:
        """Of all tokens in and out. None without tokens, or when a part has no price."""
        return self._per_million(self.input_tokens + self.output_tokens)

    @property
    def cost_per_million_output_tokens(self) -> Decimal | None:
        """The whole cost over the output tokens alone."""
        return self._per_million(self.output_tokens)

    def _per_million(self, tokens: int) -> Decimal | None:
        if not tokens or self.unpriced_lines:
            return None
        # Divided at the context's 50 digits, then rounded once: the quotient need not be finite.
        quotient = self.cost * 1_000_000 / Decimal(tokens)
        return quotient.quantize(_PER_MILLION_SCALE, rounding=ROUND_HALF_UP)


class Chargeback(Struct, frozen=True, kw_only=True):
    """The report. `totals` has one line per currency, at least one."""

    period: Period
    by: tuple[Dimension, ...]
    lines: tuple[Line, ...]
    totals: tuple[Line, ...]
    tenant_names: dict[str, str] = {}
    pending_hours: int = 0  # hours of the period with requests that are not summed yet


def dimensions(text: str) -> tuple[Dimension, ...]:
    """`tenant,model` as dimensions. Raises GroupingInvalid."""
    chosen: list[Dimension] = []
    for part in text.split(","):
        name = part.strip()
        match = next((d for d in DIMENSIONS if d == name), None)
        if match is None:
            raise GroupingInvalid(f"cannot group by {name!r}: use any of {', '.join(DIMENSIONS)}")
        if match not in chosen:
            chosen.append(match)
    return tuple(chosen)


def chargeback(
    sums: Iterable[HourlySum],
    *,
    by: Sequence[Dimension],
    period: Period,
    tenant_names: Mapping[str, str] | None = None,
    places: Mapping[str, TenantPlace] | None = None,
    pending_hours: int = 0,
) -> Chargeback:
    """Group the sums of a period. Hours outside of it are left out. Ordered by time where time is
    a dimension, else the dearest first.

    `places`: for levels of the tree and cost centres; a tenant above a level stands for itself."""
    groups: dict[tuple[tuple[str, ...], str], _Sum] = {}
    totals: dict[str, _Sum] = {}
    for row in sums:
        if not period.start <= row.hour < period.end:
            continue
        place = (places or {}).get(row.tenant_id, _NOWHERE)
        group = tuple(_value(row, dimension, period, place) for dimension in by)
        groups.setdefault((group, row.currency), _Sum()).add(row)
        totals.setdefault(row.currency, _Sum()).add(row)
    lines = [found.line(group, currency) for (group, currency), found in groups.items()]
    times = [place for place, dimension in enumerate(by) if dimension in TIMES]
    lines.sort(
        key=lambda line: (
            [line.group[place] for place in times],
            -line.cost,
            -(line.input_tokens + line.output_tokens),
            line.group,
            line.currency,
        )
    )
    return Chargeback(
        period=period,
        by=tuple(by),
        lines=tuple(lines),
        totals=tuple(
            found.line(("",) * len(by), currency) for currency, found in sorted(totals.items())
        )
        or (Line(group=("",) * len(by), currency="USD"),),
        tenant_names=dict(tenant_names or {}),
        pending_hours=pending_hours,
    )


_NOWHERE = TenantPlace(ids=())


def _value(row: HourlySum, dimension: Dimension, period: Period, place: TenantPlace) -> str:
    match dimension:
        case "level-1" | "level-2" | "level-3" | "level-4":
            level = min(LEVELS[dimension], len(place.ids))
            return place.ids[level - 1] if level else row.tenant_id
        case "cost-centre":
            return place.cost_centre or ""
        case "tenant":
            return row.tenant_id
        case "key":
            return row.key_id
        case "model":
            return row.model
        case "asked-model":
            return row.asked_model
        case "backend":
            return row.backend
        case "provider":
            return row.provider
        case "source":
            return row.usage_source
        case "meter":
            return row.meter
        case "service-tier":
            return row.service_tier or "standard"
        case "waste":
            return row.waste
        case "hour":
            return period.hour(row.hour)
        case "day":
            return period.day(row.hour)
        case "month":
            return period.month(row.hour)


class _Sum:
    """A line in the making."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.cost = Decimal(0)

    def add(self, row: HourlySum) -> None:
        for name in _COUNTS:
            self.counts[name] += getattr(row, name)
        self.cost = EXACT.add(self.cost, row.amount)

    def line(self, group: tuple[str, ...], currency: str) -> Line:
        return Line(group=group, currency=currency, cost=self.cost, **self.counts)


_COUNTS = (
    "requests",
    "attempts",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "device_us",
    "unpriced_lines",
)
