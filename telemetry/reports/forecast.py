"""Where the month will end: actuals so far plus a forecast of the days that are left. Pure.

Three simple methods compete on the past: last week's same weekday, the median of that weekday, and
the mean of the last seven days. Each is tried day by day with only what was known before; the one
with the smallest error wins, and that error is printed. The interval is the conformal one: as wide
as four of five past errors were. Forecasts are rounded to a cent; they are no money of the ledger.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Decimal
from statistics import median

from msgspec import Struct

from telemetry.reports.sheet import Sheet

CENT = Decimal("0.01")
LEAST_DAYS = 8  # a week to learn from, and a day to be tried on
COVERAGE = Decimal("0.8")

Method = Callable[[Sequence[Decimal]], Decimal]


class Forecast(Struct, frozen=True, kw_only=True):
    """`expected` is actual + the days to come; low and high bound four of five outcomes."""

    until: date  # exclusive
    actual: Decimal
    days_left: int
    expected: Decimal
    low: Decimal
    high: Decimal
    method: str
    error: Decimal  # mean absolute error a day, over the days it was tried on
    error_ratio: Decimal | None  # of the mean day
    tried_on: int


def _last_week(known: Sequence[Decimal]) -> Decimal:
    return known[-7]


def _weekday_median(known: Sequence[Decimal]) -> Decimal:
    return median(known[-7::-7])


def _mean_of_a_week(known: Sequence[Decimal]) -> Decimal:
    return sum(known[-7:], Decimal(0)) / 7


METHODS: Mapping[str, Method] = {
    "last week's weekday": _last_week,
    "median of the weekday": _weekday_median,
    "mean of seven days": _mean_of_a_week,
}


def forecast(
    history: Mapping[date, Decimal], *, first: date, today: date, until: date
) -> Forecast | None:
    """`history`: cost by day up to, not including, `today`; days without cost may be missing.
    None: too few days to learn from. The period runs from `first` to `until`, exclusive."""
    if not history:
        return None
    start = min(history)
    days = [start + timedelta(days=n) for n in range((today - start).days)]
    series = [history.get(day, Decimal(0)) for day in days]
    if len(series) < LEAST_DAYS:
        return None
    errors = {name: _errors(series, method) for name, method in METHODS.items()}
    best = min(errors, key=lambda name: (sum(map(abs, errors[name])), name))
    left = (until - today).days
    known = list(series)
    for _ in range(left):
        known.append(METHODS[best](known))
    to_come = sum(known[len(series) :], Decimal(0))
    actual = sum((cost for day, cost in history.items() if first <= day < today), Decimal(0))
    mistakes = sorted(abs(error) for error in errors[best])
    # The smallest error that four of five did not exceed, with the finite-sample correction.
    place = min(int(COVERAGE * (len(mistakes) + 1)), len(mistakes) - 1)
    half = mistakes[place] * left
    mean_error = sum(mistakes, Decimal(0)) / len(mistakes)
    mean_day = sum(series[7:], Decimal(0)) / len(series[7:])
    return Forecast(
        until=until,
        actual=actual,
        days_left=left,
        expected=_cents(actual + to_come),
        low=_cents(max(actual, actual + to_come - half)),
        high=_cents(actual + to_come + half),
        method=best,
        error=_cents(mean_error),
        error_ratio=None
        if not mean_day
        else (mean_error / mean_day).quantize(Decimal("0.001"), rounding=ROUND_HALF_UP),
        tried_on=len(mistakes),
    )


def forecast_sheet(found: Mapping[str, Forecast | None]) -> Sheet:
    """By currency. What cannot be forecast says why."""
    rows = tuple(
        (
            *(currency, f.actual, f.days_left, f.expected, f.low, f.high),
            *(f.method, f.error, f.error_ratio, f.tried_on),
        )
        for currency, f in sorted(found.items())
        if f is not None
    )
    short = [currency for currency, f in sorted(found.items()) if f is None]
    notes = ["Low and high bound four of five outcomes, judged by the errors of the past."]
    notes += [f"{currency}: fewer than {LEAST_DAYS} days are known." for currency in short]
    return Sheet(
        title="Cost at the end of the month",
        columns=(
            *("currency", "actual", "days left", "expected", "low", "high"),
            *("method", "error a day", "error ratio", "days tried"),
        ),
        rows=rows,
        notes=tuple(notes),
    )


def _errors(series: Sequence[Decimal], method: Method) -> list[Decimal]:
    return [series[place] - method(series[:place]) for place in range(7, len(series))]


def _cents(value: Decimal) -> Decimal:
    return value.quantize(CENT, rounding=ROUND_HALF_UP)
