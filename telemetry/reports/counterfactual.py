"""What was saved, and what it would have cost otherwise: beside the cost, never in it. Pure.

Every answer is a re-rating of sums that are in the ledger: the same tokens at another price. What
has no price in the books is left out of both sides and counted. A saving can be negative: a cache
that is written and not read costs more than none.
"""

from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal

from msgspec import Struct

from telemetry.money import EXACT, amount
from telemetry.pricing import Meter, Price, PriceBook, Sheet
from telemetry.reports.meters import TOKEN_METERS, MeterSum, base_meter
from telemetry.reports.sheet import Cell
from telemetry.reports.sheet import Sheet as Table

_CACHED = (Meter.CACHE_READ, Meter.CACHE_WRITE, Meter.CACHE_WRITE_1H)


class Counterfactual(Struct, kw_only=True):
    """Paid and otherwise, of the same quantity."""

    quantity: int = 0
    paid: Decimal = Decimal(0)
    otherwise: Decimal = Decimal(0)
    unknown_lines: int = 0

    @property
    def saved(self) -> Decimal:
        return EXACT.subtract(self.otherwise, self.paid)

    def add(self, row: MeterSum, price: Price | None) -> None:
        if price is None or row.unit_price is None or price.currency != row.currency:
            self.unknown_lines += row.lines
            return
        self.quantity += row.quantity
        self.paid = EXACT.add(self.paid, row.amount)
        cost = amount(row.quantity, price.unit_price, price.unit)
        self.otherwise = EXACT.add(self.otherwise, cost)


def savings(rows: Iterable[MeterSum], book: PriceBook) -> Table:
    """What provider caches and cheaper service tiers saved against the standard input price."""
    found: dict[tuple[str, str, str, str], Counterfactual] = defaultdict(Counterfactual)
    for row in rows:
        meter = base_meter(row.meter)
        if meter in _CACHED:
            kind = "cache read" if meter == Meter.CACHE_READ else "cache write"
            price = _price(book, row, Meter.INPUT, row.service_tier)
        elif row.service_tier and meter in TOKEN_METERS:
            kind = f"tier {row.service_tier}"
            price = _price(book, row, Meter(meter), "")
        else:
            continue
        found[kind, row.provider, row.model, row.currency].add(row, price)
    return _table(
        "Saved, against the standard price of the same tokens",
        ("by", "provider", "model"),
        {(*key[:3], key[3]): value for key, value in found.items()},
        ("A cache write costs more than plain input: it saves less than nothing by itself.",),
    )


def what_if(rows: Iterable[MeterSum], book: PriceBook, provider: str, model: str) -> Table:
    """All tokens at the list price of another model."""
    found: dict[tuple[str, ...], Counterfactual] = defaultdict(Counterfactual)
    for row in rows:
        meter = base_meter(row.meter)
        if meter not in TOKEN_METERS:
            continue
        at_ns = int(row.charge_hour.timestamp()) * 10**9
        sheet = book.listed(provider, model, at_ns)
        price = None if sheet is None else sheet.price(Meter(meter), 0)
        found[row.provider, row.model, row.currency].add(row, price)
    return _table(
        f"The same tokens as {provider}/{model}",
        ("provider", "model"),
        dict(found),
        (
            "Assumed: as many tokens as were used, counted by the same tokenizer, at the standard "
            "price below any long-context threshold. What has no price on either side is left out "
            "of both.",
        ),
    )


def has_price(book: PriceBook, provider: str, model: str, at_ns: int) -> bool:
    """Whether a what-if can be answered."""
    return book.listed(provider, model, at_ns) is not None


def _price(book: PriceBook, row: MeterSum, meter: Meter, tier: str) -> Price | None:
    at_ns = int(row.charge_hour.timestamp()) * 10**9
    sheet: Sheet | None = book.agreed(row.backend, at_ns)
    if sheet is None:
        sheet = book.listed(row.provider, row.model, at_ns)
    return None if sheet is None else sheet.price(meter, 0, tier)


def _table(
    title: str,
    names: tuple[str, ...],
    found: dict[tuple[str, ...], Counterfactual],
    notes: tuple[str, ...],
) -> Table:
    """The last part of each key is the currency."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (*key[:-1], c.quantity, c.paid, c.otherwise, c.saved, key[-1], c.unknown_lines)
        for key, c in sorted(found.items(), key=lambda item: (-item[1].saved, item[0]))
    )
    totals: dict[str, Counterfactual] = {}
    for key, c in found.items():
        total = totals.setdefault(key[-1], Counterfactual())
        total.quantity += c.quantity
        total.paid = EXACT.add(total.paid, c.paid)
        total.otherwise = EXACT.add(total.otherwise, c.otherwise)
        total.unknown_lines += c.unknown_lines
    blank = ("",) * (len(names) - 1)
    return Table(
        title=title,
        columns=(*names, "tokens", "paid", "otherwise", "saved", "currency", "lines unknown"),
        rows=rows,
        totals=tuple(
            ("Total", *blank, c.quantity, c.paid, c.otherwise, c.saved, currency, c.unknown_lines)
            for currency, c in sorted(totals.items())
        ),
        notes=notes,
    )


__all__ = ["Counterfactual", "has_price", "savings", "what_if"]
