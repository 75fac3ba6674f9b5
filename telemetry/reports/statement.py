"""A tenant's statement as HTML that prints to a clean PDF, and the month's journal for accounting.
Pure.

Two of the few places where money is rounded: a statement's total, half up to a cent, beside the
exact sum; and the journal, whose cents are given out by largest remainder, so that debits and
credits of each provider balance exactly. Corrections of earlier months stand apart.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal
from html import escape

from msgspec import Struct

from telemetry.money import EXACT, plain
from telemetry.reports.meters import MeterSum, base_meter
from telemetry.reports.period import Period
from telemetry.reports.render import clean, inert

CENT = Decimal("0.01")
_SECOND = timedelta(seconds=1)

_STYLE = """
@page { size: A4; margin: 18mm }
body { font: 11pt/1.4 system-ui, sans-serif; color: #1a1a1a; max-width: 180mm; margin: 2em auto }
h1 { font-size: 18pt; margin: 0 } h2 { font-size: 12pt; margin: 1.6em 0 .4em }
table { border-collapse: collapse; width: 100%; font-size: 9.5pt }
th, td { padding: .3em .5em; text-align: left; border-bottom: 1px solid #ddd }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tfoot td { font-weight: 600; border-top: 2px solid #1a1a1a; border-bottom: 0 }
thead { display: table-header-group } tr { break-inside: avoid }
p.note { color: #555; font-size: 9pt }
"""


class _Line(Struct):
    quantity: int = 0
    amount: Decimal = Decimal(0)
    unpriced: int = 0


_Key = tuple[str, str, str, int, Decimal | None, str]


def statement_html(
    rows: Iterable[MeterSum], *, tenant: str, tenant_id: str, period: Period, proof: str | None
) -> str:
    """What a tenant owes for a period. `proof`: the hash of the closed month's manifest."""
    regular: dict[_Key, _Line] = defaultdict(_Line)
    corrections: dict[_Key, _Line] = defaultdict(_Line)
    for row in rows:
        key = (
            *(row.model, base_meter(row.meter), row.service_tier, row.unit, row.unit_price),
            row.currency,
        )
        line = (corrections if row.is_correction else regular)[key]
        line.quantity += row.quantity
        line.amount = EXACT.add(line.amount, row.amount)
        line.unpriced += row.unpriced_lines
    body = [
        f"<h1>Statement</h1><p>{escape(clean(tenant))} ({escape(clean(tenant_id))})<br>",
        f"{escape(period.hour(period.start))} up to, not including, "
        f"{escape(period.hour(period.end))}</p>",
        _section("Usage", regular),
    ]
    if corrections:
        body.append(_section("Corrections of earlier months", corrections))
    body.append(_totals([*regular.items(), *corrections.items()]))
    unpriced = sum(line.unpriced for line in (*regular.values(), *corrections.values()))
    if unpriced:
        body.append(f'<p class="note">Not in the total: {unpriced} lines without a price.</p>')
    closed = f"The month is closed; manifest {escape(proof)}." if proof else "The month is open."
    body.append(f'<p class="note">Amounts are exact; only the total due is rounded. {closed}</p>')
    title = f"Statement {escape(clean(tenant))}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, lines: dict[_Key, _Line]) -> str:
    head = "".join(
        f"<th{cls}>{name}</th>"
        for name, cls in (
            *(("Model", ""), ("Meter", ""), ("Tier", "")),
            *((name, ' class="n"') for name in ("Quantity", "Unit price", "Per", "Amount")),
        )
    )
    cells = []
    for (model, meter, tier, unit, price, currency), line in sorted(
        lines.items(), key=lambda item: tuple(map(str, item[0]))
    ):
        shown = "unpriced" if price is None else f"{plain(price)} {currency}"
        figures = (f"{line.quantity:,}", shown, f"{unit:,}", f"{plain(line.amount)} {currency}")
        cells.append(
            "<tr>"
            + "".join(f"<td>{escape(clean(text))}</td>" for text in (model, meter, tier))
            + "".join(f'<td class="n">{escape(text)}</td>' for text in figures)
            + "</tr>"
        )
    rows = "".join(cells) or '<tr><td colspan="7">Nothing was used.</td></tr>'
    return f"<h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _totals(lines: Sequence[tuple[_Key, _Line]]) -> str:
    totals: dict[str, Decimal] = {}
    for key, line in lines:
        totals[key[-1]] = EXACT.add(totals.get(key[-1], Decimal(0)), line.amount)
    rows = "".join(
        f'<tr><td>Exact sum</td><td class="n">{plain(total)} {currency}</td></tr>'
        f'<tr><td>Total due</td><td class="n">{_cents(total):,f} {currency}</td></tr>'
        for currency, total in sorted((totals or {"USD": Decimal(0)}).items())
    )
    return f"<h2>Total</h2><table><tfoot>{rows}</tfoot></table>"


def _cents(amount: Decimal) -> Decimal:
    return amount.quantize(CENT, rounding=ROUND_HALF_UP)


class Entry(Struct, frozen=True, kw_only=True):
    """One line of the journal. One of debit and credit is zero; amounts are never negative."""

    day: str
    account: str
    cost_centre: str
    debit: Decimal
    credit: Decimal
    currency: str
    reference: str


class Residual(Struct, frozen=True, kw_only=True):
    """A posting, as far as the journal needs it."""

    provider: str
    amount: Decimal
    currency: str


def journal(
    rows: Iterable[MeterSum],
    residuals: Iterable[Residual],
    *,
    period: Period,
    tenant_names: dict[str, str],
) -> list[Entry]:
    """Expense by tenant and provider against what is payable to the provider."""
    exact: dict[tuple[str, str], dict[tuple[str, str], Decimal]] = defaultdict(dict)
    for row in rows:
        parts = exact[row.provider, row.currency]
        key = ("expense:inference", tenant_names.get(row.tenant_id, row.tenant_id) or "(nobody)")
        parts[key] = EXACT.add(parts.get(key, Decimal(0)), row.amount)
    for residual in residuals:
        parts = exact[residual.provider, residual.currency]
        key = (f"unreconciled:{residual.provider}", "(platform)")
        parts[key] = EXACT.add(parts.get(key, Decimal(0)), residual.amount)
    last = period.day(period.end.replace(microsecond=0) - _SECOND)
    entries: list[Entry] = []
    for (provider, currency), parts in sorted(exact.items()):
        keys = sorted(parts)
        cents = _shares([parts[key] for key in keys])
        reference = f"{provider} {period.day(period.start)}"
        lines = [
            (account, centre, amount) for (account, centre), amount in zip(keys, cents, strict=True)
        ]
        lines.append((f"payable:{provider}", "", -sum(cents)))
        for account, centre, amount in lines:
            if amount:
                entries.append(
                    Entry(
                        day=last,
                        account=account,
                        cost_centre=centre,
                        debit=Decimal(max(amount, 0)).scaleb(-2),
                        credit=Decimal(max(-amount, 0)).scaleb(-2),
                        currency=currency,
                        reference=reference,
                    )
                )
    return entries


def journal_csv(entries: Iterable[Entry]) -> str:
    """For import into an accounting system."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["date", "account", "cost_centre", "debit", "credit", "currency", "reference"])
    for entry in entries:
        writer.writerow(
            [
                *(entry.day, inert(entry.account), inert(entry.cost_centre)),
                *(f"{entry.debit:.2f}", f"{entry.credit:.2f}"),
                *(entry.currency, inert(entry.reference)),
            ]
        )
    return out.getvalue()


def _shares(amounts: Sequence[Decimal]) -> list[int]:
    """Cents of each amount that sum to the rounded sum (largest remainder, also below zero)."""
    scaled = [amount.scaleb(2) for amount in amounts]
    floors = [int(value.to_integral_value(rounding="ROUND_FLOOR")) for value in scaled]
    total = sum(amounts, Decimal(0)).scaleb(2).to_integral_value(rounding=ROUND_HALF_UP)
    missing = int(total) - sum(floors)
    order = sorted(range(len(amounts)), key=lambda i: (-(scaled[i] - floors[i]), i))
    for place in order[:missing]:
        floors[place] += 1
    return floors
