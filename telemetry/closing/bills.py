"""Bills as providers send them, read line by line; and what they say beside what we rated. Pure.

Four formats: a FOCUS CSV, OpenAI's organization costs (JSON), Anthropic's cost report (JSON) and a
plain CSV. What a line does not say (model, meter, quantity) stays empty and is compared at the
coarser level: never guessed. Numbers are decimals from their text. Amounts keep 15 decimals; what
an export writes beyond them (a float's tail) is rounded half up there: a named rounding place.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Literal, get_args

from msgspec import Struct

from telemetry.money import AMOUNT_SCALE, EXACT
from telemetry.pricing import Meter
from telemetry.reports.meters import MeterSum, base_meter

BillFormat = Literal["focus", "openai", "anthropic", "csv"]
FORMATS: tuple[BillFormat, ...] = get_args(BillFormat)
CENT = Decimal("0.01")
HALF_A_CENT = Decimal("0.005")


class BillInvalid(ValueError):
    """The file is no such bill. `problems`: one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BillLine(Struct, frozen=True, kw_only=True):
    """One line. `day` is the UTC day of the use; model and meter are "" where not said."""

    day: date
    amount: Decimal
    currency: str = "USD"
    model: str = ""
    meter: str = ""
    quantity: int | None = None
    raw: str = ""


class Difference(Struct, frozen=True, kw_only=True):
    """One day, model and meter: what the provider billed beside what was rated here."""

    provider: str
    day: date
    model: str
    meter: str
    currency: str
    rated: Decimal
    billed: Decimal
    rated_quantity: int | None = None
    billed_quantity: int | None = None
    unpriced_lines: int = 0
    cause: str = ""  # suspected; empty if there is no difference

    @property
    def residual(self) -> Decimal:
        return EXACT.subtract(self.billed, self.rated)


def read_bill(form: BillFormat, text: str) -> list[BillLine]:
    """The lines of a bill. Raises BillInvalid."""
    try:
        lines = list(_READERS[form](text))
    except BillInvalid:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError) as error:
        raise BillInvalid([f"not such a report: {type(error).__name__}: {error}"]) from None
    if not lines:
        raise BillInvalid(["there is no line in it"])
    return lines


# --- the four formats


def _focus(text: str) -> Iterator[BillLine]:
    reader = _rows(text, ("ChargePeriodStart", "BilledCost", "BillingCurrency"))
    yield from _each(reader, _focus_line)


def _focus_line(row: Mapping[str, str]) -> BillLine:
    details = row.get("SkuPriceDetails") or "{}"
    described = json.loads(details) if details.startswith("{") else {}
    model = row.get("x_ModelId") or described.get("x_ModelId") or described.get("ModelId") or ""
    is_tokens = (row.get("ConsumedUnit") or "") == "Tokens"
    return BillLine(
        day=_day(row["ChargePeriodStart"]),
        amount=_amount(row["BilledCost"]),
        currency=row["BillingCurrency"],
        model=str(model).lower(),
        meter=row.get("SkuMeter") or "",
        quantity=_quantity(row.get("ConsumedQuantity")) if is_tokens else None,
        raw=json.dumps({name: value for name, value in row.items() if value}),
    )


_OPENAI_METERS = {
    "input": Meter.INPUT,
    "cached input": Meter.CACHE_READ,
    "output": Meter.OUTPUT,
    "audio input": Meter.AUDIO_INPUT,
    "audio output": Meter.AUDIO_OUTPUT,
}


def _openai(text: str) -> Iterator[BillLine]:
    """GET /v1/organization/costs, one page or a list of pages; `group_by=line_item` names models:
    https://platform.openai.com/docs/api-reference/usage/costs"""
    for bucket in _buckets(text):
        day = datetime.fromtimestamp(int(bucket["start_time"]), UTC).date()
        for result in bucket.get("results") or ():
            money = result["amount"]
            model, _, meter = str(result.get("line_item") or "").partition(", ")
            yield BillLine(
                day=day,
                amount=_amount(money["value"]),
                currency=str(money.get("currency") or "usd").upper(),
                model=model.lower(),
                meter=_OPENAI_METERS.get(meter.strip().lower(), Meter.UNMETERED).value
                if meter
                else "",
                quantity=_quantity(result.get("quantity")),
                raw=json.dumps(result, default=str),
            )


_ANTHROPIC_METERS = {
    "uncached_input_tokens": Meter.INPUT,
    "output_tokens": Meter.OUTPUT,
    "cache_read_input_tokens": Meter.CACHE_READ,
    "cache_creation.ephemeral_5m_input_tokens": Meter.CACHE_WRITE,
    "cache_creation.ephemeral_1h_input_tokens": Meter.CACHE_WRITE_1H,
}


def _anthropic(text: str) -> Iterator[BillLine]:
    """GET /v1/organizations/cost_report with `group_by[]=description`; amounts are in cents:
    https://docs.anthropic.com/en/api/admin-api/usage-cost/get-cost-report"""
    for bucket in _buckets(text):
        for result in bucket.get("results") or ():
            kind = result.get("token_type")
            meter = _ANTHROPIC_METERS.get(str(kind), Meter.UNMETERED).value if kind else ""
            yield BillLine(
                day=_day(str(bucket["starting_at"])),
                amount=_amount(Decimal(str(result["amount"])).scaleb(-2)),
                currency=str(result.get("currency") or "USD").upper(),
                model=str(result.get("model") or "").lower(),
                meter=meter,
                raw=json.dumps(result, default=str),
            )


def _plain(text: str) -> Iterator[BillLine]:
    yield from _each(_rows(text, ("day", "amount")), _plain_line)


def _plain_line(row: Mapping[str, str]) -> BillLine:
    return BillLine(
        day=_day(row["day"]),
        amount=_amount(row["amount"]),
        currency=(row.get("currency") or "USD").upper(),
        model=(row.get("model") or "").lower(),
        meter=row.get("meter") or "",
        quantity=_quantity(row.get("quantity")),
        raw=json.dumps(row),
    )


_READERS: dict[BillFormat, Callable[[str], Iterator[BillLine]]] = {
    "focus": _focus,
    "openai": _openai,
    "anthropic": _anthropic,
    "csv": _plain,
}


def _rows(text: str, needed: tuple[str, ...]) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        rows = [{str(k): v or "" for k, v in row.items() if k is not None} for row in reader]
    except csv.Error as error:
        raise BillInvalid([f"not a CSV: {error}"]) from None
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise BillInvalid([f"column {name} is missing" for name in missing])
    return rows


def _each(
    rows: Iterable[dict[str, str]], read: Callable[[Mapping[str, str]], BillLine]
) -> list[BillLine]:
    lines: list[BillLine] = []
    problems: list[str] = []
    for number, row in enumerate(rows, start=2):
        try:
            lines.append(read(row))
        except (ValueError, ArithmeticError) as error:
            problems.append(f"line {number}: {str(error) or 'not a number'}")
    if problems:
        raise BillInvalid(problems)
    return lines


def _buckets(text: str) -> list[dict[str, Any]]:
    data = json.loads(text, parse_float=Decimal)
    pages = data if isinstance(data, list) else [data]
    return [bucket for page in pages for bucket in page["data"]]


def _day(text: str) -> date:
    at = datetime.fromisoformat(text.strip())
    return (at.astimezone(UTC) if at.tzinfo else at).date()


def _amount(value: Any) -> Decimal:
    amount = Decimal(str(value).strip())
    if not amount.is_finite() or abs(amount) >= Decimal("1e15"):
        raise ValueError(f"{value!r} is not an amount")
    return amount.quantize(AMOUNT_SCALE, rounding=ROUND_HALF_UP)


def _quantity(value: Any) -> int | None:
    if value in (None, ""):
        return None
    count = Decimal(str(value))
    return int(count) if count == count.to_integral_value() else None


# --- beside what was rated


def compare(
    provider: str, lines: Iterable[BillLine], rated: Iterable[MeterSum]
) -> list[Difference]:
    """Day by day, at the finest level that all lines of a day have. Days without a bill are left
    out: nothing can be said of them. `rated` are the sums of that provider, by day of use."""
    billed: dict[tuple[date, str], list[BillLine]] = defaultdict(list)
    for line in lines:
        billed[line.day, line.currency].append(line)
    ours: dict[tuple[date, str], list[MeterSum]] = defaultdict(list)
    for row in rated:
        if row.provider == provider:
            ours[row.charge_hour.astimezone(UTC).date(), row.currency].append(row)
    found: list[Difference] = []
    for (day, currency), of_day in sorted(billed.items()):
        found += _compare_day(provider, day, currency, of_day, ours.get((day, currency), []))
    residuals = {(d.day, d.model, d.meter, d.currency): d.residual for d in found}
    return [_explained(difference, residuals) for difference in found]


Cell = tuple[str, str]


def _compare_day(
    provider: str, day: date, currency: str, lines: list[BillLine], ours: list[MeterSum]
) -> list[Difference]:
    has_model = all(line.model for line in lines)
    has_meter = has_model and all(line.meter for line in lines)

    def cell(model: str, meter: str) -> Cell:
        return (model.lower() if has_model else "", meter if has_meter else "")

    billed: dict[Cell, Decimal] = defaultdict(Decimal)
    counted: dict[Cell, int | None] = {}
    for line in lines:
        key = cell(line.model, line.meter)
        billed[key] = EXACT.add(billed[key], line.amount)
        counted[key] = _plus(counted.get(key, 0), line.quantity)
    rated: dict[Cell, Decimal] = defaultdict(Decimal)
    used: dict[Cell, int] = defaultdict(int)
    unpriced: dict[Cell, int] = defaultdict(int)
    for row in ours:
        key = cell(row.model, base_meter(row.meter))
        rated[key] = EXACT.add(rated[key], row.amount)
        used[key] += row.quantity
        unpriced[key] += row.unpriced_lines
    return [
        Difference(
            provider=provider,
            day=day,
            model=key[0],
            meter=key[1],
            currency=currency,
            rated=rated.get(key, Decimal(0)),
            billed=billed.get(key, Decimal(0)),
            rated_quantity=used.get(key, 0) if has_meter else None,
            billed_quantity=counted.get(key, 0) if has_meter else None,
            unpriced_lines=unpriced.get(key, 0),
        )
        for key in sorted({*billed, *rated})
    ]


def _plus(sum_so_far: int | None, quantity: int | None) -> int | None:
    return None if sum_so_far is None or quantity is None else sum_so_far + quantity


def _explained(
    difference: Difference, residuals: Mapping[tuple[date, str, str, str], Decimal]
) -> Difference:
    residual = difference.residual
    if not residual:
        return difference
    neighbours = [
        residuals.get(
            (
                difference.day + timedelta(days=step),
                *(difference.model, difference.meter, difference.currency),
            ),
            Decimal(0),
        )
        for step in (-1, 1)
    ]
    counts = (difference.rated_quantity, difference.billed_quantity)
    if difference.unpriced_lines:
        cause = f"no price here for {difference.unpriced_lines} lines"
    elif abs(residual) <= HALF_A_CENT:
        cause = "rounding"
    elif not difference.rated:
        cause = "not through this gateway"
    elif not difference.billed:
        cause = "not on the bill"
    elif any(near and abs(near + residual) < CENT for near in neighbours):
        cause = "another day's start: the next day has the opposite"
    elif None not in counts and counts[0] == counts[1]:
        cause = "another price"
    elif None not in counts:
        cause = "other usage"
    else:
        cause = "other usage, or another price"
    return Difference(**{**_fields(difference), "cause": cause})


def _fields(difference: Difference) -> dict[str, Any]:
    return {name: getattr(difference, name) for name in difference.__struct_fields__}


__all__ = [
    "FORMATS",
    "BillFormat",
    "BillInvalid",
    "BillLine",
    "Difference",
    "compare",
    "read_bill",
]
