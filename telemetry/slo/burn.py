"""How fast an error budget may burn before someone is told, exactly.

The budget of an objective is 1 - objective of the events in its period. A burn rate of 1 spends it
in just that period. An alert on the share `budget` of the whole within `long` has the factor
budget · period / long (Google SRE workbook, chapter 5), and its threshold is factor · (1 -
objective). All of it in `Decimal`: a threshold in a rule is the number that the table says.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Final

from msgspec import Struct

MINUTE: Final = 60
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
_UNITS: Final = (("w", 7 * DAY), ("d", DAY), ("h", HOUR), ("m", MINUTE), ("s", 1))


class Window(Struct, frozen=True, kw_only=True):
    """One pair of windows: both must burn. The long one says that it matters, the short one that
    it still goes on."""

    severity: str  # page, ticket
    long_s: int
    short_s: int
    factor: Decimal


class Share(Struct, frozen=True, kw_only=True):
    """The share of the whole budget that may go within `long_s`."""

    severity: str
    budget: Decimal
    long_s: int
    short_s: int


WORKBOOK: Final = (
    Share(severity="page", budget=Decimal("0.02"), long_s=HOUR, short_s=5 * MINUTE),
    Share(severity="page", budget=Decimal("0.05"), long_s=6 * HOUR, short_s=30 * MINUTE),
    Share(severity="ticket", budget=Decimal("0.1"), long_s=DAY, short_s=2 * HOUR),
    Share(severity="ticket", budget=Decimal("0.1"), long_s=3 * DAY, short_s=6 * HOUR),
)
WINDOWS_S: Final = tuple(sorted({w for s in WORKBOOK for w in (s.long_s, s.short_s)}))


def windows(period_s: int) -> tuple[Window, ...]:
    """The workbook's windows for a period, their factors exact to nine digits: 14.4, 6, 3 and 1
    for 30 days."""
    return tuple(
        Window(
            severity=share.severity,
            long_s=share.long_s,
            short_s=share.short_s,
            factor=_trimmed(share.budget * period_s / share.long_s),
        )
        for share in WORKBOOK
    )


def threshold(window: Window, objective: Decimal) -> Decimal:
    """The error ratio above which the window alerts. `objective` is in percent: 99.5."""
    return _trimmed(window.factor * budget(objective))


def budget(objective: Decimal) -> Decimal:
    """The share of events that may be bad. `objective` is in percent."""
    return _trimmed(1 - objective / 100)


def impossible(found: Iterable[Window], objective: Decimal) -> list[Window]:
    """Windows that can never alert: even with every event bad the ratio is 1 at most."""
    return [window for window in found if threshold(window, objective) >= 1]


def seconds(text: str) -> int:
    """`1h`, `90s`, `30d` in seconds. ValueError: not such a text."""
    for unit, size in _UNITS:
        if text.endswith(unit) and text[: -len(unit)].isdecimal():
            found = int(text[: -len(unit)]) * size
            if found > 0:
                return found
    raise ValueError(f"{text!r} is not a duration such as 30s, 5m, 6h, 30d")


def duration(length_s: int) -> str:
    """Seconds as Prometheus writes them, in the largest unit that is exact: 5m, 3d. Weeks are
    written in days, as people write periods."""
    for unit, size in _UNITS[1:]:
        if length_s % size == 0:
            return f"{length_s // size}{unit}"
    raise AssertionError("seconds always divide")


def literal(value: Decimal) -> str:
    """A decimal as PromQL reads it, never in exponent form."""
    return f"{_trimmed(value):f}"


def _trimmed(value: Decimal) -> Decimal:
    rounded = value.quantize(Decimal("1e-9")).normalize()
    return rounded.quantize(Decimal(1)) if rounded == rounded.to_integral() else rounded
