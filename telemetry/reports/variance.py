"""Why the cost changed between two periods: terms that sum to the change, exactly. Pure.

The cost of what was served is requests x share of the model x quantity a request x share of the
meter x price. The bridge changes one factor after the other, from the first period's to the
second's, and each step is a term; waste is a term of its own. Fractions are exact, so the terms sum
to the change; as decimals with 15 places they are rounded by largest remainder, so they still do.
A model that is in one period only has no factor to compare in the other: it is all mix.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction

from msgspec import Struct

from telemetry.money import EXACT
from telemetry.reports.chargeback import HourlySum
from telemetry.reports.meters import MeterSum, base_meter
from telemetry.reports.sheet import Sheet

TERMS = ("volume", "model mix", "length", "cache and input share", "price", "waste")
_SCALE = 10**15

Model = tuple[str, str]  # provider, model
Cell = tuple[Model, str]  # and meter


class Bridge(Struct, frozen=True, kw_only=True):
    """before + the sum of the terms = after."""

    currency: str
    before: Decimal
    after: Decimal
    terms: dict[str, Decimal]


class Facts(Struct, frozen=True, kw_only=True):
    """One period in one currency."""

    requests: dict[Model, int]
    quantity: dict[Cell, int]
    cost: dict[Cell, Fraction]
    waste: Fraction

    @property
    def total(self) -> Fraction:
        return sum(self.cost.values(), self.waste)


def facts(meters: Iterable[MeterSum], hours: Iterable[HourlySum], currency: str) -> Facts:
    """What of a period the bridge needs."""
    requests: dict[Model, int] = defaultdict(int)
    quantity: dict[Cell, int] = defaultdict(int)
    cost: dict[Cell, Fraction] = defaultdict(Fraction)
    waste = Fraction(0)
    for row in meters:
        if row.currency != currency:
            continue
        if row.waste:
            waste += Fraction(row.amount)
            continue
        cell = ((row.provider, row.model), base_meter(row.meter))
        quantity[cell] += row.quantity
        cost[cell] += Fraction(row.amount)
    for hour in hours:
        requests[hour.provider, hour.model] += hour.requests
    return Facts(requests=dict(requests), quantity=dict(quantity), cost=dict(cost), waste=waste)


def bridge(before: Facts, after: Facts, currency: str) -> Bridge:
    """From one period to the next, factor by factor."""
    one, two = _factors(before, after), _factors(after, before)
    steps = [_cost(one.requests, one.mix, one.length, one.share, one.price)]
    for requests, mix, length, share, price in (
        (two.requests, one.mix, one.length, one.share, one.price),
        (two.requests, two.mix, one.length, one.share, one.price),
        (two.requests, two.mix, two.length, one.share, one.price),
        (two.requests, two.mix, two.length, two.share, one.price),
        (two.requests, two.mix, two.length, two.share, two.price),
    ):
        steps.append(_cost(requests, mix, length, share, price))
    changes = [later - earlier for earlier, later in itertools.pairwise(steps)]
    # Cost that no request stands for (a correction of another month) joins the volume.
    rest = (after.total - after.waste - steps[-1]) - (before.total - before.waste - steps[0])
    changes[0] += rest
    changes.append(after.waste - before.waste)
    return Bridge(
        currency=currency,
        before=_decimal(before.total),
        after=_decimal(after.total),
        terms=dict(zip(TERMS, _rounded(changes), strict=True)),
    )


def bridge_sheet(found: Iterable[Bridge], title: str) -> Sheet:
    """One row a term, the change below."""
    rows: list[tuple[str, Decimal, str]] = []
    totals: list[tuple[str, Decimal, str]] = []
    for one in found:
        rows.append(("before", one.before, one.currency))
        rows += [(term, amount, one.currency) for term, amount in one.terms.items()]
        totals.append(("after", one.after, one.currency))
    return Sheet(
        title=title,
        columns=("term", "cost", "currency"),
        rows=tuple(rows),
        totals=tuple(totals),
        notes=("Before plus all terms is after, exactly. Factors change in the order shown.",),
    )


class _Factors(Struct, frozen=True):
    requests: Fraction
    mix: dict[Model, Fraction]
    length: dict[Model, Fraction]
    share: dict[Cell, Fraction]
    price: dict[Cell, Fraction]


def _factors(mine: Facts, other: Facts) -> _Factors:
    """The factors of a period; where it has none, the other period's, so that nothing changes."""
    requests = sum(mine.requests.values())
    models = {*mine.requests, *other.requests, *(cell[0] for cell in (*mine.cost, *other.cost))}
    mix = {m: Fraction(mine.requests.get(m, 0), requests or 1) for m in models}
    length: dict[Model, Fraction] = {}
    share: dict[Cell, Fraction] = {}
    price: dict[Cell, Fraction] = {}
    for model in models:
        source = mine if _has(mine, model) else other
        cells = [cell for cell in {*mine.cost, *other.cost} if cell[0] == model]
        total = sum(source.quantity.get(cell, 0) for cell in cells)
        length[model] = Fraction(total, source.requests.get(model, 0) or 1)
        for cell in cells:
            share[cell] = Fraction(source.quantity.get(cell, 0), total or 1)
            priced = mine if mine.quantity.get(cell) else other
            price[cell] = priced.cost.get(cell, Fraction(0)) / (priced.quantity.get(cell, 0) or 1)
    return _Factors(Fraction(requests), mix, length, share, price)


def _has(found: Facts, model: Model) -> bool:
    return found.requests.get(model, 0) > 0


def _cost(
    requests: Fraction,
    mix: Mapping[Model, Fraction],
    length: Mapping[Model, Fraction],
    share: Mapping[Cell, Fraction],
    price: Mapping[Cell, Fraction],
) -> Fraction:
    return sum(
        (requests * mix[cell[0]] * length[cell[0]] * share[cell] * price[cell] for cell in price),
        Fraction(0),
    )


def _rounded(terms: list[Fraction]) -> list[Decimal]:
    """As decimals with 15 places that sum to the exact sum (largest remainder)."""
    scaled = [term * _SCALE for term in terms]
    floors = [term.numerator // term.denominator for term in scaled]
    missing = sum(scaled, Fraction(0)) - sum(floors)
    assert missing.denominator == 1, "the change itself has 15 places"
    order = sorted(range(len(terms)), key=lambda i: (-(scaled[i] - floors[i]), i))
    for place in order[: missing.numerator]:
        floors[place] += 1
    return [Decimal(value).scaleb(-15, EXACT) for value in floors]


def _decimal(value: Fraction) -> Decimal:
    return EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))
