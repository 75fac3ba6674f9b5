"""The parts of an hour are the hour: in microseconds, and in dollars, under every policy."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.capacity.allocation import (
    PLATFORM,
    POLICIES,
    IdlePolicy,
    Payer,
    Used,
    allocate,
)
from telemetry.capacity.heartbeat import HOUR, LeaseHour, StepTimes, cut
from telemetry.reports.chargeback import HourlySum, chargeback
from telemetry.reports.full_cost import engine_costs, full_basis
from telemetry.reports.period import parse_period

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOUR_US = 3_600_000_000
DAY = parse_period("2026-11-30", "2026-12-01")

microseconds = st.integers(0, 3 * HOUR_US)
times = st.builds(
    StepTimes,
    load_us=microseconds,
    warmup_us=microseconds,
    step_us=microseconds,
    idle_us=microseconds,
)


@given(times, st.integers(0, 2 * HOUR_US))
def test_hours_add_up_to_the_wall_time(whole: StepTimes, offset_us: int) -> None:
    """Each phase sums to what it was, each inner hour is full, and hours follow each other."""
    start = NOON + timedelta(microseconds=offset_us)
    pieces = list(cut(start, whole))
    for name in StepTimes.__struct_fields__:
        assert sum(getattr(piece, name) for _, piece in pieces) == getattr(whole, name)
        assert all(getattr(piece, name) >= 0 for _, piece in pieces)
    assert all(later - earlier == HOUR for (earlier, _), (later, _) in pairwise(pieces))
    assert all(piece.wall_us == HOUR_US for _, piece in pieces[1:-1])
    if pieces:
        assert pieces[0][0] <= start < pieces[0][0] + HOUR


def test_a_partial_hour_is_clipped_at_both_ends() -> None:
    """Attached at 10:17:30 and gone at 11:05:00: 42.5 minutes of one hour and 5 of the next."""
    start = datetime(2026, 11, 30, 10, 17, 30, tzinfo=UTC)
    found = list(cut(start, StepTimes(idle_us=int(47.5 * 60_000_000))))
    assert [(hour.hour, piece.wall_us / 60e6) for hour, piece in found] == [(10, 42.5), (11, 5)]


def test_loading_and_warming_up_tell_one_life_from_another() -> None:
    """A clock never runs backwards, and another life loaded for another time."""
    first = StepTimes(load_us=10, warmup_us=5, step_us=7, idle_us=3)
    assert StepTimes(load_us=10, warmup_us=5, step_us=8, idle_us=3).continues(first)
    assert not StepTimes(load_us=10, warmup_us=5, step_us=6, idle_us=30).continues(first)
    assert not StepTimes(load_us=11, warmup_us=5, step_us=8, idle_us=3).continues(first)


def lease(
    hour: int = 0, *, step_us: int, idle_us: int, load_us: int = 0, rate: str = "3.6"
) -> LeaseHour:
    return LeaseHour(
        backend="local",
        hour=NOON + hour * HOUR,
        lease_id="l",
        rate_per_hour=Decimal(rate),
        devices=1,
        times=StepTimes(load_us=load_us, step_us=step_us, idle_us=idle_us),
    )


def used(tenant: str, us: int, hour: int = 0, phase: str = "decode") -> Used:
    payer = Payer(tenant, "k", "assistant", "meterline.engine", "m")
    return Used(backend="local", hour=NOON + hour * HOUR, payer=payer, phase=phase, us=us)


def cost_of(shares: object, tenant: str, bucket: str | None = None) -> Decimal:
    return sum(
        (
            share.amount
            for share in shares  # type: ignore[attr-defined]  # a tuple of shares
            if share.payer.tenant_id == tenant and bucket in (None, share.bucket)
        ),
        Decimal(0),
    )


@pytest.mark.parametrize(
    ("policy", "costs"),
    [
        ("keep", {"a": "0.9", "b": "0.3", PLATFORM: "2.4"}),
        ("proportional-used", {"a": "2.7", "b": "0.9"}),
        ("proportional-entitlement", {"a": "1.7", "b": "1.9"}),
        ("peak-share", {"a": "2.7", "b": "0.9"}),
        ("even", {"a": "2.1", "b": "1.5"}),
    ],
)
def test_five_policies_share_one_bill(policy: IdlePolicy, costs: dict[str, str]) -> None:
    """A 3.60 dollar hour: a used 15 minutes, b 5; loading took 4, the rest was idle."""
    minute = 60_000_000
    leases = [lease(step_us=20 * minute, idle_us=36 * minute, load_us=4 * minute)]
    found = allocate(
        leases,
        [used("a", 15 * minute), used("b", 5 * minute)],
        policy=policy,
        entitlements={"a": 1, "b": 2},
    )
    assert {tenant: cost_of(found.shares, tenant) for tenant in costs} == {
        tenant: Decimal(cost) for tenant, cost in costs.items()
    }
    assert sum(share.nano for share in found.shares) == found.hours[0].nano == 3_600_000_000


def test_an_hour_that_nobody_used_stays_with_the_platform() -> None:
    """Weights of zero must not make a cost vanish; only a month-wide policy finds somebody."""
    leases = [lease(0, step_us=60, idle_us=60), lease(1, step_us=0, idle_us=HOUR_US)]
    for policy in POLICIES:
        found = allocate(leases, [used("a", 60)], policy=policy)
        second = [share for share in found.shares if share.hour > NOON]
        payer = "a" if policy in ("even", "peak-share") else PLATFORM
        assert {share.payer.tenant_id for share in second} == {payer}
        assert sum(share.nano for share in second) == 3_600_000_000


def test_time_beyond_the_steps_of_an_hour_is_carried_into_the_next() -> None:
    """A request that began at 12:59 ran in the next hour, and pays for the steps there."""
    leases = [lease(0, step_us=100, idle_us=0), lease(1, step_us=100, idle_us=0)]
    found = allocate(leases, [used("a", 150), used("b", 30)], policy="keep")
    first, second = found.hours
    assert (first.used_us, first.overhead_us) == (100, 0)
    assert (second.used_us, second.overhead_us) == (80, 20)
    us = {t: sum(s.us for s in found.shares if s.payer.tenant_id == t) for t in ("a", "b")}
    assert us == {"a": 150, "b": 30}


def test_time_without_a_lease_is_left_to_its_settled_price() -> None:
    """An engine that nobody polled has no hours: its requests keep what they were charged."""
    found = allocate([lease(1, step_us=10, idle_us=0)], [used("a", 5, hour=0)], policy="keep")
    assert cost_of(found.shares, "a") == 0
    assert allocate([], [used("a", 5)], policy="keep").hours == ()


@given(
    st.lists(st.tuples(st.integers(0, HOUR_US), st.integers(0, HOUR_US)), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, HOUR_US), st.integers(0, 4)), max_size=8
    ),
    st.sampled_from(POLICIES),
    st.decimals("0.000000001", "99", places=9),
)
def test_every_hour_is_split_exactly(
    hours: list[tuple[int, int]],
    uses: list[tuple[str, int, int]],
    policy: IdlePolicy,
    rate: Decimal,
) -> None:
    """used + overhead + idle = capacity and the shares = the cost, whatever happened."""
    leases = [
        lease(place, step_us=step, idle_us=idle, rate=str(rate))
        for place, (step, idle) in enumerate(hours)
    ]
    found = allocate(
        leases,
        [used(tenant, us, hour) for tenant, us, hour in uses],
        policy=policy,
        entitlements={"a": 3, "z": 1},
    )
    for hour in found.hours:
        assert hour.used_us + hour.overhead_us + hour.idle_us == hour.capacity_us
        assert min(hour.used_us, hour.overhead_us, hour.idle_us) >= 0
        mine = [share for share in found.shares if share.hour == hour.hour]
        assert sum(share.nano for share in mine) == hour.nano
        assert sum(share.us for share in mine) == hour.capacity_us
    by_policy = allocate(leases, [used(*use) for use in uses], policy="keep")
    assert sum(h.nano for h in by_policy.hours) == sum(h.nano for h in found.hours)


def test_the_full_basis_is_the_bill_and_the_usage_basis_stays() -> None:
    """Settled GPU charges are replaced by shares; what was bought elsewhere is untouched."""
    sums = [
        HourlySum(
            hour=NOON,
            tenant_id="a",
            backend="local",
            model="m",
            requests=2,
            output_tokens=500_000,
            device_us=HOUR_US // 4,
            amount=Decimal("0.899999"),
        ),
        HourlySum(hour=NOON, tenant_id="a", backend="api", model="n", amount=Decimal("0.5")),
    ]
    split = allocate(
        [lease(step_us=HOUR_US // 2, idle_us=HOUR_US // 2)],
        [used("a", HOUR_US // 4)],
        policy="keep",
    )
    (total,) = chargeback(full_basis(sums, [split]), by=("tenant",), period=DAY).totals
    assert total.cost == Decimal("4.1")
    assert (total.requests, total.output_tokens) == (2, 500_000)
    lines = chargeback(full_basis(sums, [split]), by=("tenant",), period=DAY).lines
    assert {line.group[0]: line.cost for line in lines} == {
        "a": Decimal("1.4"),
        PLATFORM: Decimal("2.7"),
    }
    (engine,) = engine_costs(sums, [split], DAY)
    assert (engine.utilisation, engine.cost, engine.used_cost) == (
        Decimal("0.25"),
        Decimal("3.6"),
        Decimal("0.9"),
    )
    assert engine.marginal_per_million == Decimal("1.8")
    assert engine.loaded_per_million == Decimal("7.2")
    assert engine.by_phase_us == {"decode": HOUR_US // 4}
