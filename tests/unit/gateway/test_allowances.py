"""Limits and budgets as values: what is refused, and when windows begin."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from gateway.allowances import Budget, check_budget, check_limit, window_of
from gateway.config import ConfigInvalid, parse
from gateway.errors import BadRequest

GOOD_LIMIT: dict[str, Any] = {
    "scope": "tenant",
    "subject": None,
    "counts": "requests",
    "amount": Decimal(60),
    "per_s": 60,
}
GOOD_BUDGET: dict[str, Any] = {
    "scope": "tenant",
    "subject": None,
    "amount_usd": Decimal("12.50"),
    "window": "month",
    "hours": None,
    "zone": "Europe/Berlin",
}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"amount": Decimal(-1)}, "amount"),
        ({"amount": Decimal("1.5")}, "amount"),
        ({"amount": Decimal("NaN")}, "amount"),
        ({"amount": Decimal("Infinity")}, "amount"),
        ({"amount": Decimal(10**17)}, "amount"),
        ({"amount": Decimal("1E+999999")}, "amount"),
        ({"counts": "spend", "amount": Decimal("1E-999999")}, "amount"),
        ({"counts": "spend", "amount": Decimal("0.0000000001")}, "amount"),
        ({"per_s": None}, "per_s"),
        ({"per_s": 0}, "per_s"),
        ({"per_s": 10**9}, "per_s"),
        ({"counts": "concurrency"}, "per_s"),
        ({"subject": "acme"}, "subject"),
        ({"scope": "user", "subject": ""}, "subject"),
        ({"scope": "user", "subject": "a\nb"}, "subject"),
        ({"scope": "user", "subject": "u" * 300}, "subject"),
    ],
    ids=str,
)
def test_an_absurd_limit_is_refused_by_field(change: dict[str, Any], param: str) -> None:
    """Each mistake names its field."""
    check_limit(**GOOD_LIMIT)
    with pytest.raises(BadRequest) as refused:
        check_limit(**(GOOD_LIMIT | change))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"amount_usd": Decimal(-5)}, "amount_usd"),
        ({"amount_usd": Decimal("0.0000005")}, "amount_usd"),
        ({"amount_usd": Decimal(10**9)}, "amount_usd"),
        ({"zone": "Mars/Olympus"}, "zone"),
        ({"zone": "../etc/passwd"}, "zone"),
        ({"zone": ""}, "zone"),
        ({"hours": 3}, "hours"),
        ({"window": "rolling"}, "hours"),
        ({"window": "rolling", "hours": 0}, "hours"),
        ({"subject": "x"}, "subject"),
        ({"downgrade_to": "small"}, "downgrade_to"),
        ({"mode": "downgrade", "downgrade_to": ""}, "downgrade_to"),
        (
            {"mode": "downgrade", "scope": "route", "subject": "m", "downgrade_to": "m"},
            "downgrade_to",
        ),
    ],
    ids=str,
)
def test_an_absurd_budget_is_refused_by_field(change: dict[str, Any], param: str) -> None:
    """Each mistake names its field."""
    check_budget(**GOOD_BUDGET)
    with pytest.raises(BadRequest) as refused:
        check_budget(**(GOOD_BUDGET | change))
    assert refused.value.param == param


def test_a_route_is_not_cheaper_than_itself() -> None:
    """`cheaper` names another route that exists."""
    head = '[[backends]]\nname = "b"\nkind = "scripted"\n'
    route = '[[routes]]\nmodel = "m"\ntargets = [{ backend = "b" }]\ncheaper = "%s"\n'
    for name in ("m", "nobody"):
        with pytest.raises(ConfigInvalid) as refused:
            parse((head + route % name).encode())
        assert refused.value.problems == [f"routes[0].cheaper: no other route `{name}`"]


def budget(window: Any, zone: str = "UTC") -> Budget:
    return Budget(
        id="b",
        tenant_id="t",
        scope="tenant",
        subject=None,
        amount_usd=Decimal(1),
        window=window,
        hours=None,
        zone=zone,
        mode="hard",
        strict=False,
    )


def us(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 10**6


@pytest.mark.parametrize(
    ("window", "zone", "now", "start", "end"),
    [
        ("day", "Europe/Berlin", "2026-03-28T23:30", "2026-03-29T00:00", "2026-03-30T00:00"),
        ("day", "Asia/Kolkata", "2026-11-30T18:31", "2026-12-01T00:00", "2026-12-02T00:00"),
        ("month", "America/New_York", "2026-11-01T03:59", "2026-10-01T00:00", "2026-11-01T00:00"),
        ("week", "UTC", "2026-11-29T23:59", "2026-11-23T00:00", "2026-11-30T00:00"),
        ("month", "UTC", "2026-12-31T23:59", "2026-12-01T00:00", "2027-01-01T00:00"),
        ("hour", "Asia/Kolkata", "2026-11-30T18:29", "2026-11-30T23:00", "2026-12-01T00:00"),
    ],
)
def test_windows_begin_in_the_budgets_own_zone(
    window: str, zone: str, now: str, start: str, end: str
) -> None:
    """`now` is UTC; start and end are local."""
    found = window_of(budget(window, zone), us(now))
    assert (found.start_us, found.end_us) == (us(start, zone), us(end, zone))


def test_a_day_may_have_23_or_25_hours_and_a_repeated_hour_is_two() -> None:
    """Daylight saving begins and ends in Berlin in 2026 on March 29 and October 25."""
    berlin = "Europe/Berlin"
    for day, hours in (("2026-03-29T12:00", 23), ("2026-10-25T12:00", 25)):
        found = window_of(budget("day", berlin), us(day))
        assert found.end_us is not None
        assert found.end_us - found.start_us == hours * 3_600_000_000
    starts = {
        window_of(budget("hour", berlin), us(f"2026-10-25T{hour:02}:30")).start_us
        for hour in (0, 1)
    }
    assert starts == {us("2026-10-25T00:00"), us("2026-10-25T01:00")}
    assert datetime.fromtimestamp(min(starts) / 10**6, UTC).hour == 0


def test_the_configs_defaults_are_checked_too() -> None:
    """Negative dollars, an unknown zone, an unknown key: each with its path."""
    with pytest.raises(ConfigInvalid) as refused:
        parse(
            b"[limits.key]\ndollars_per_hour = -1.0\n[budgets]\ntenant_usd = 0.0000001\n"
            b'zone = "Nowhere/Else"\n[store]\nredis = "http://x"\n'
        )
    text = "\n".join(refused.value.problems)
    for path in ("limits.key.dollars_per_hour", "budgets.tenant_usd", "store.redis"):
        assert path in text
    with pytest.raises(ConfigInvalid, match=r"limits\.tenant\.request_per_minute.*did you mean"):
        parse(b"[limits.tenant]\nrequest_per_minute = 5\n")
    with pytest.raises(ConfigInvalid, match=r"budgets\.zone"):
        parse(b'[budgets]\nzone = "Nowhere/Else"\n')
