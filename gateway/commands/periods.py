"""The period of a report, as every command takes it: whole months by default."""

import re
from datetime import UTC, date, datetime, timedelta

from gateway.commands import BadInput
from telemetry.reports.period import Period, PeriodInvalid, parse_period


def parse_report_period(start: str | None, end: str | None, zone: str = "UTC") -> Period:
    """`--from` and `--to` as a period; from the first of this month up to tomorrow if not given."""
    today = datetime.now(UTC).date()
    try:
        return parse_period(
            start or today.replace(day=1).isoformat(),
            end or (today + timedelta(days=1)).isoformat(),
            zone,
        )
    except PeriodInvalid as error:
        raise BadInput(str(error)) from error


def parse_month(text: str) -> Period:
    """`2026-11` as its UTC period."""
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text):
        raise BadInput(f"{text!r} is not a month: write 2026-11")
    first = date.fromisoformat(f"{text}-01")
    following = (first + timedelta(days=32)).replace(day=1)
    return parse_period(first.isoformat(), following.isoformat())
