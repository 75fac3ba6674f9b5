"""From when to when a report looks: half-open, whole hours, kept in UTC.

A time zone shifts where days and months begin, and nothing else. The ledger's sums are hourly, so a
zone whose offset is not a whole number of hours has no report: its days would cut hours in two.
"""

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct


class PeriodInvalid(ValueError):
    """The message says what to write instead."""


class Period(Struct, frozen=True):
    """[start, end), both aware UTC."""

    start: datetime
    end: datetime
    zone: str = "UTC"

    def day(self, hour: datetime) -> str:
        """The day that an hour belongs to, in the report's zone: `2026-11-30`."""
        return hour.astimezone(ZoneInfo(self.zone)).date().isoformat()

    def month(self, hour: datetime) -> str:
        """The month that an hour belongs to, in the report's zone: `2026-11`."""
        return self.day(hour)[:7]

    def hour(self, hour: datetime) -> str:
        """The hour with its offset, in the report's zone: `2026-11-30T12:00+01:00`."""
        return hour.astimezone(ZoneInfo(self.zone)).isoformat(timespec="minutes")


def parse_period(start: str, end: str, zone: str = "UTC") -> Period:
    """`2026-11-01` (midnight in the zone), `2026-11-01T06:00` (in the zone) or with an offset of
    its own. Raises PeriodInvalid."""
    try:
        tz = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise PeriodInvalid(
            f"unknown time zone {zone!r}: use a name like UTC or Europe/Madrid"
        ) from None
    period = Period(_instant(start, tz, "from"), _instant(end, tz, "to"), zone)
    if period.end <= period.start:
        raise PeriodInvalid(f"the period is empty: --to {end} is not after --from {start}")
    for edge in (period.start, period.end):
        offset = edge.astimezone(tz).utcoffset() or timedelta()
        if offset % timedelta(hours=1):
            raise PeriodInvalid(
                f"{zone} is {offset} off UTC, and the ledger keeps whole UTC hours: use --tz UTC"
            )
    return period


def _instant(text: str, tz: ZoneInfo, option: str) -> datetime:
    try:
        if len(text) == 10:
            at = datetime.combine(date.fromisoformat(text), time(), tzinfo=tz)
        else:
            at = datetime.fromisoformat(text)
            at = at.replace(tzinfo=tz) if at.tzinfo is None else at
        at = at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise PeriodInvalid(
            f"--{option} {text!r} is not a date: write 2026-11-01 or 2026-11-01T06:00"
        ) from None
    if at != at.replace(minute=0, second=0, microsecond=0):
        raise PeriodInvalid(f"--{option} {text}: the ledger keeps whole UTC hours, so give one")
    return at
