"""The arithmetic of limits: nothing is over-admitted, refusals are free, settling is once."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import arithmetic
from gateway.limits.arithmetic import (
    MINUTE_US,
    NEVER,
    Demand,
    Kind,
    Spent,
    TenantState,
    refilled,
)

T0 = 1_800_000_000_000_000
LEASE_US = 60_000_000


def window(limit: int, amount: int = 1, key: str = "w") -> Demand:
    """Requests per minute."""
    return Demand(key, Kind.WINDOW, limit, amount, MINUTE_US)


def bucket(limit: int, amount: int, key: str = "b") -> Demand:
    """Tokens per minute."""
    return Demand(key, Kind.BUCKET, limit, amount, MINUTE_US)


def places(limit: int, key: str = "c") -> Demand:
    """Concurrency."""
    return Demand(key, Kind.CONCURRENCY, limit, 1)


def budget(limit: int, amount: int, start_us: int = 0, key: str = "m") -> Demand:
    """A calendar budget."""
    return Demand(key, Kind.BUDGET, limit, amount, 0, start_us)


def begun(before: int = 0, start_us: int = 0, key: str = "m") -> TenantState:
    """A tenant whose budget the ledger has spoken on."""
    state = TenantState()
    arithmetic.rebase(
        state,
        Spent(key=key, period_us=0, window_us=start_us, before=before, cut=0, slots={}),
    )
    return state


def admitted(state: TenantState, at_us: int, number: int, *demands: Demand) -> bool:
    """Whether request `number` gets in."""
    return arithmetic.admit(state, at_us, f"h{number}", LEASE_US, demands).admitted


@given(
    limit=st.integers(1, 20),
    steps=st.lists(st.integers(0, 40_000_000), min_size=1, max_size=120),
)
def test_no_span_of_a_period_holds_more_than_the_limit(limit: int, steps: list[int]) -> None:
    """Whatever the times of asking, each 60 s that end at an admission hold at most the limit."""
    state, now, passed = TenantState(), T0, []
    for number, step in enumerate(steps):
        now += step
        if admitted(state, now, number, window(limit)):
            passed.append(now)
        assert sum(at > now - MINUTE_US for at in passed) <= limit


def test_a_burst_across_a_window_edge_passes_the_limit_once() -> None:
    """Sixty at 59.9 s and sixty at 60.1 s: sixty pass, and the rest a period later."""
    state = TenantState()
    start = T0 // MINUTE_US * MINUTE_US
    before = [admitted(state, start + 59_900_000, n, window(60)) for n in range(60)]
    after = [admitted(state, start + 60_100_000, 60 + n, window(60)) for n in range(60)]
    assert (sum(before), sum(after)) == (60, 0)
    later = start + 59_900_000 + MINUTE_US + MINUTE_US // 64 + 1
    assert sum(admitted(state, later, 200 + n, window(60)) for n in range(70)) == 60


def test_when_it_frees_is_when_it_frees() -> None:
    """At the time that a refusal names the request gets in; a slot's width before, it does not."""
    for demand in (window(3), bucket(1000, 400)):
        state = TenantState()
        number = 0
        while admitted(state, T0 + number * 1000, number, demand):
            number += 1
        at = T0 + number * 1000
        verdict = arithmetic.admit(state, at, "x", LEASE_US, (demand,))
        assert verdict.wait_us > 0
        assert not admitted(state, at + verdict.wait_us - MINUTE_US // 64, 98, demand)
        assert admitted(state, at + verdict.wait_us, 99, demand)


@given(
    limit=st.integers(1, 10**15),
    period_us=st.sampled_from([1_000_000, MINUTE_US, 86_400_000_000]),
    steps=st.lists(st.integers(0, 10**9), min_size=1, max_size=60),
)
def test_a_bucket_never_refills_faster_than_its_rate(
    limit: int, period_us: int, steps: list[int]
) -> None:
    """However often it is asked, what it gained is at most limit x time / period, and a bucket that
    is asked often has gained as much as one that is asked once, up to a unit."""
    level, at, now = -limit, T0, T0
    for step in steps:
        now += step
        level, at = refilled(level, at, now, limit, period_us)
    once, _ = refilled(-limit, T0, now, limit, period_us)
    exact = limit * (now - T0) / period_us
    assert level <= min(limit, -limit + exact + 1 + abs(exact) * 1e-12)
    assert abs(level - once) <= 1 + len(steps) * (1 + limit // period_us)


def test_debt_is_paid_before_the_next_is_admitted() -> None:
    """A request that took three times what it reserved blocks the bucket for that long."""
    state = TenantState()
    assert admitted(state, T0, 1, bucket(1000, 1000))
    assert arithmetic.settle(state, T0, "h1", [3000], T0)
    assert not admitted(state, T0 + 2 * MINUTE_US, 2, bucket(1000, 1))
    assert admitted(state, T0 + 2 * MINUTE_US + MINUTE_US // 1000, 3, bucket(1000, 1))


def test_what_was_not_used_comes_back() -> None:
    """Settling below the reservation gives the rest back, and never more than full."""
    state = TenantState()
    assert admitted(state, T0, 1, bucket(1000, 900))
    assert not admitted(state, T0, 2, bucket(1000, 900))
    arithmetic.settle(state, T0, "h1", [100], T0)
    assert admitted(state, T0, 3, bucket(1000, 900))


@given(order=st.permutations(range(40)), room=st.integers(0, 40))
def test_parallel_requests_with_room_for_n_are_n(order: list[int], room: int) -> None:
    """In any order, exactly as many get in as there is room for, by any kind of limit."""
    state = begun()
    demands = (window(100), places(100), bucket(4000, 100), budget(room * 7, 7))
    results = [admitted(state, T0, number, *demands) for number in order]
    assert results == [place < room for place in range(40)]
    held = state.budget("m")
    assert held is not None
    assert (held.held, state.held("c")) == (7 * room, room)


@given(
    holds=st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 90), st.booleans()), min_size=1, max_size=40
    )
)
def test_a_budget_is_spent_plus_held_at_all_times(holds: list[tuple[int, int, bool]]) -> None:
    """Admissions, settlements above and below what was held, and settling twice: never more is held
    beyond what was spent than fits, and at the end nothing is held."""
    state, limit, spent = begun(), 500, 0
    for number, (reserve, actual, settles_now) in enumerate(holds):
        before = state.budget("m")
        assert before is not None
        fits = before.spent + before.held + reserve <= limit
        assert admitted(state, T0, number, budget(limit, reserve)) is fits
        if fits and settles_now:
            assert arithmetic.settle(state, T0, f"h{number}", [actual], T0)
            assert not arithmetic.settle(state, T0, f"h{number}", [actual], T0)
            spent += actual
    arithmetic.expire(state, T0 + LEASE_US)
    after = state.budget("m")
    assert after is not None
    assert after.held == 0
    assert after.spent >= spent
    assert not state.holds


def test_a_refused_request_consumes_nothing() -> None:
    """One limit refuses; all others are as if it had not asked."""
    state = begun()
    full = (window(5), bucket(1000, 100), places(5), budget(1000, 100))
    for number in range(20):
        verdict = arithmetic.admit(
            state, T0, f"r{number}", LEASE_US, (*full, bucket(10, 11, "small"))
        )
        assert (verdict.admitted, verdict.binding, verdict.wait_us) == (False, 4, NEVER)
    assert [admitted(state, T0, n, *full) for n in range(6)] == [True] * 5 + [False]


def test_zero_allows_none() -> None:
    """A limit of 0 refuses every request, of every kind."""
    for demand in (window(0), bucket(0, 1), places(0), budget(0, 1)):
        assert not admitted(begun(), T0, 1, demand)


def test_a_new_window_begins_with_nothing_spent() -> None:
    """What was held in the old window settles there; a replica whose clock is behind counts in the
    new one, and its hold comes back too."""
    state = begun(before=90)
    assert admitted(state, T0, 1, budget(100, 10))
    assert not admitted(state, T0, 2, budget(100, 10))
    assert admitted(state, T0, 3, budget(100, 10, T0))
    arithmetic.settle(state, T0, "h1", [10], T0)
    assert admitted(state, T0, 4, budget(100, 20, 0))
    assert _of(state) == (0, 30)
    arithmetic.settle(state, T0, "h4", [5], T0)
    arithmetic.settle(state, T0, "h3", [7], T0)
    assert _of(state) == (12, 0)


def test_the_ledger_corrects_a_budget() -> None:
    """Before the cut the ledger is right; after it, whichever has seen more."""
    state = begun()
    minute = T0 // MINUTE_US
    for number, (ended, amount) in enumerate([(minute - 9, 50), (minute - 1, 7), (minute, 3)]):
        admitted(state, T0, number, budget(10**6, 100))
        arithmetic.settle(state, T0, f"h{number}", [amount], ended * MINUTE_US)
    admitted(state, T0, 9, budget(10**6, 11))
    assert _of(state) == (60, 11)
    heard = {minute - 1: 9, minute: 1}
    spent = Spent(key="m", period_us=0, window_us=0, before=40, cut=minute - 5, slots=heard)
    arithmetic.rebase(state, spent)
    arithmetic.rebase(state, spent)
    assert _of(state) == (40 + 9 + 3, 11)


def test_drift_of_any_size_goes_with_the_next_word_of_the_ledger() -> None:
    """Counters that somebody has put wrong, up or down, are right again after a rebase: what was
    spent is the ledger's, and what is held is what the open holds hold."""
    for drift in (-70, 70, 10**9):
        state = begun(before=40)
        assert admitted(state, T0, 1, budget(10**6, 11))
        counter = state.budgets["m"]
        counter.spent += drift
        counter.held = max(0, counter.held + drift)
        later = T0 // MINUTE_US + 11
        arithmetic.rebase(
            state, Spent(key="m", period_us=0, window_us=0, before=40, cut=later, slots={})
        )
        assert _of(state) == (40, 11)


def test_places_that_nobody_holds_are_free() -> None:
    """A number of running requests that no hold explains does not shut anybody out."""
    state = TenantState()
    assert admitted(state, T0, 1, places(2))
    state.concurrency["c"].held = 9
    assert not admitted(state, T0, 2, places(2))
    arithmetic.settle(state, T0, "h1", [1], T0)
    assert admitted(state, T0, 3, places(2))
    assert state.held("c") == 1


@given(
    limit=st.integers(0, 60),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=60),
)
def test_extending_never_holds_more_than_fits(limit: int, steps: list[tuple[int, int]]) -> None:
    """Holds that grow: the sum of all never passes the budget, one that is refused is what it was,
    and at the end all of it comes back."""
    state, held = begun(), dict[int, int]()
    for number in range(4):
        if admitted(state, T0, number, budget(limit, 5), window(9), bucket(10**6, 7)):
            held[number] = 5
    for number, more in steps:
        found = arithmetic.extend(state, T0, f"h{number}", [more, 0, 10**9])
        if number not in held:
            assert found is None
            continue
        assert found is (sum(held.values()) + more <= limit)
        held[number] += more if found else 0
        assert _of(state) == (0, sum(held.values()))
        assert sum(held.values()) <= limit
    for number in held:
        arithmetic.settle(state, T0, f"h{number}", [3, 1, 7], T0)
    assert _of(state) == (3 * len(held), 0)


def test_a_window_that_is_over_refuses_no_stream() -> None:
    """A stream from yesterday goes on today: what it takes is yesterday's."""
    state = begun()
    assert admitted(state, T0, 1, budget(100, 90))
    assert admitted(state, T0, 2, budget(100, 90, T0))
    assert arithmetic.extend(state, T0, "h1", [50]) is True
    assert arithmetic.extend(state, T0, "h2", [50]) is False
    assert _of(state) == (0, 90)


def test_a_rolling_budget_forgets_what_is_past() -> None:
    """An hour after it was spent, it may be spent again."""
    hour_us = 3_600_000_000
    one = Demand("m", Kind.BUDGET, 100, 60, hour_us)
    state = begun()
    assert admitted(state, T0, 1, one)
    arithmetic.settle(state, T0, "h1", [60], T0)
    assert not admitted(state, T0 + hour_us - MINUTE_US, 2, one)
    assert admitted(state, T0 + hour_us + 2 * MINUTE_US, 3, one)


def test_a_lost_replica_gives_its_places_back() -> None:
    """Holds that nobody renews end with their lease; renewed ones do not."""
    state = TenantState()
    assert admitted(state, T0, 1, places(2))
    assert admitted(state, T0, 2, places(2))
    arithmetic.renew(state, T0 + 50_000_000, ["h2"], LEASE_US)
    assert admitted(state, T0 + 61_000_000, 3, places(2))
    assert not admitted(state, T0 + 61_000_000, 4, places(2))
    assert not arithmetic.settle(state, T0 + 61_000_000, "h1", [1], T0)


def test_counters_as_good_as_new_are_forgotten() -> None:
    """Nothing remains of users that have not asked for long, and what matters stays."""
    state = begun()
    for number in range(9):
        admitted(state, T0, number, window(2, key=f"w{number}"), bucket(9, 1, key=f"b{number}"))
        arithmetic.settle(state, T0, f"h{number}", [1, 1], T0)
    arithmetic.forget(state, T0 + 1_000_000)
    assert len(state.windows) == 9
    arithmetic.forget(state, T0 + 3 * MINUTE_US)
    assert (len(state.windows), len(state.buckets), len(state.budgets)) == (0, 0, 1)


def _of(state: TenantState) -> tuple[int, int]:
    found = state.budget("m")
    assert found is not None
    return found.spent, found.held
