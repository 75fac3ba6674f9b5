"""What a limit is, in arithmetic: whether a request fits, what is left, when it frees.

Pure: no clock, no I/O; the state of one tenant and the time go in, a verdict comes out. The script
`limits.lua` is the same arithmetic on the Redis server, and a property test holds the two together,
so both use integers below 2^53 and the same order of operations.

Invariants: a request takes from all its limits or from none; a refused request changes nothing; a
hold is settled at most once; no interleaving admits more than a limit allows.

- A *window* (requests) counts in `SLOTS` slots per period and counts a slot until all of it is out
  of the period. So no span of one period, wherever it begins, holds more than the limit, and a
  request is remembered for at most 1/SLOTS of a period too long.
- A *bucket* (tokens, spend) refills evenly and may go below zero: what a request really took is
  debited when it settles, and the debt is paid before the next one is admitted.
- *Concurrency* is the number of open holds.
- A *budget* is what was spent in its window plus what is held. Both follow the truth: `rebase`
  takes what was spent from the ledger, and counts anew what the open holds hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from math import ceil, floor

from msgspec import Struct
from msgspec.structs import replace

SLOTS = 64  # of a window
ROLLING_SLOTS = 60  # of a rolling budget
MINUTE_US = 60_000_000
MOST = 9_000_000_000_000_000  # below 2^53: exact in the script's doubles too
NEVER = -1  # as a wait: this request does not fit even when everything is free
FEW_HOLDS = 1000  # of a tenant: more are not counted anew, since nothing else moves meanwhile


class Kind(IntEnum):
    """The four kinds of state. The numbers are the script's."""

    WINDOW = 1
    BUCKET = 2
    CONCURRENCY = 3
    BUDGET = 4


BUDGET = int(Kind.BUDGET)


class Demand(Struct, frozen=True, gc=False):
    """What one request wants of one limit.

    `key` names the state among those of the tenant. `period_us`: of a window or bucket; of a budget
    0 for calendar windows, else the length of a rolling one. `window_us`: start of a budget's
    calendar window, Unix time."""

    key: str
    kind: Kind
    limit: int
    amount: int
    period_us: int = 0
    window_us: int = 0


class Room(Struct, frozen=True, gc=False):
    """What is left of one limit after the verdict, and when it will be all free again."""

    remaining: int
    reset_us: int


class Verdict(Struct, frozen=True, gc=False):
    """`cold`: budgets (by index) whose spend must be read from the ledger first. `binding`: the
    limit that refuses, the one that frees last; `wait_us` is when it frees, or NEVER."""

    admitted: bool
    rooms: tuple[Room, ...] = ()
    binding: int = -1
    wait_us: int = 0
    cold: tuple[int, ...] = ()
    now_us: int = 0


class Spent(Struct, frozen=True, kw_only=True):
    """What the ledger knows of one budget: `before` the slot `cut`, and by slot from there on."""

    key: str
    period_us: int
    window_us: int
    before: int
    cut: int
    slots: Mapping[int, int]


class _Window:
    __slots__ = ("count", "new_us", "slots")

    def __init__(self) -> None:
        self.count = 0
        self.new_us = 0  # from then on it is as if it had never been used
        self.slots: dict[int, int] = {}  # in the order of time


class _Bucket:
    __slots__ = ("at_us", "level", "new_us")

    def __init__(self, level: int, at_us: int) -> None:
        self.level = level
        self.at_us = at_us
        self.new_us = MOST


class _Concurrency:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class _Budget:
    __slots__ = ("held", "slots", "spent", "window_us")

    def __init__(self, window_us: int) -> None:
        self.window_us = window_us
        self.spent = 0
        self.held = 0
        self.slots: dict[int, int] = {}


_Found = _Window | _Bucket | _Budget | None  # what was looked at, for taking from it
_Looked = tuple[int, int, int, _Found]


class _Hold:
    __slots__ = ("demands", "expires_us")

    def __init__(self, demands: Sequence[Demand], expires_us: int) -> None:
        self.demands = demands
        self.expires_us = expires_us


class BudgetState(Struct, frozen=True):
    """A budget's counters, for reports and tests."""

    spent: int
    held: int


class TenantState:
    """All counters of one tenant, and its open holds."""

    __slots__ = ("buckets", "budgets", "concurrency", "holds", "next_expiry_us", "windows")

    def __init__(self) -> None:
        self.windows: dict[str, _Window] = {}
        self.buckets: dict[str, _Bucket] = {}
        self.concurrency: dict[str, _Concurrency] = {}
        self.budgets: dict[str, _Budget] = {}
        self.holds: dict[str, _Hold] = {}
        self.next_expiry_us = MOST  # no hold ends before

    def budget(self, key: str) -> BudgetState | None:
        found = self.budgets.get(key)
        return None if found is None else BudgetState(found.spent, found.held)

    def held(self, key: str) -> int:
        found = self.concurrency.get(key)
        return 0 if found is None else found.held


# ---------------------------------------------------------------------------------- the four steps


def admit(
    state: TenantState, now_us: int, hold_id: str, lease_us: int, demands: Sequence[Demand]
) -> Verdict:
    """Take from every limit, or from none. The same hold twice is one hold."""
    expire(state, now_us)
    if hold_id in state.holds:
        return Verdict(True, now_us=now_us)
    budgets = state.budgets
    looked: list[tuple[int, int, int, _Found]] = []
    cold: list[int] = []
    binding, longest = -1, 0
    for index, demand in enumerate(demands):
        if demand.kind == BUDGET and demand.key not in budgets:
            cold.append(index)
            continue
        one = _LOOK[demand.kind](state, now_us, demand)
        looked.append(one)
        wait_us = one[2]
        if wait_us and (binding < 0 or (longest != NEVER and (wait_us > longest or wait_us < 0))):
            binding, longest = index, wait_us
    if cold:
        return Verdict(False, cold=tuple(cold), now_us=now_us)
    if binding >= 0:
        rooms = [Room(left if left > 0 else 0, reset_us) for left, reset_us, _, _ in looked]
        return Verdict(False, tuple(rooms), binding, longest, now_us=now_us)
    rooms, taken = [], []
    for demand, (left, reset_us, _, found) in zip(demands, looked, strict=True):
        taken.append(_TAKE[demand.kind](state, now_us, demand, found))
        rooms.append(Room(left - demand.amount, reset_us))
    state.holds[hold_id] = _Hold(taken, now_us + lease_us)
    state.next_expiry_us = min(state.next_expiry_us, now_us + lease_us)
    return Verdict(True, tuple(rooms), now_us=now_us)


def settle(
    state: TenantState, now_us: int, hold_id: str, actual: Sequence[int], ended_us: int
) -> bool:
    """Replace what was reserved by what was taken: one amount for each demand, in their order.
    False, and nothing changes, if there is no such hold: settled already, or expired."""
    hold = state.holds.pop(hold_id, None)
    if hold is None:
        return False
    for demand, amount in zip(hold.demands, actual, strict=True):
        _settle(state, now_us, demand, amount, ended_us)
    return True


def extend(state: TenantState, now_us: int, hold_id: str, more: Sequence[int]) -> bool | None:
    """Hold that much more of each budget of an open hold, or of none (False). None: there is no
    such hold or budget any more, so nobody knows. A window that is over refuses nothing: what is
    held there no longer counts. Other limits are not asked: they take the truth as a debt."""
    hold = state.holds.get(hold_id)
    if hold is None:
        return None
    extended = list(hold.demands)
    for index, (demand, amount) in enumerate(zip(hold.demands, more, strict=True)):
        if demand.kind != BUDGET or amount <= 0:
            continue
        budget = state.budgets.get(demand.key)
        if budget is None:
            return None
        if budget.window_us > demand.window_us:
            continue
        if _look_budget(state, now_us, replace(demand, amount=amount))[2]:
            return False
        extended[index] = replace(demand, amount=demand.amount + amount)
    for before, after in zip(hold.demands, extended, strict=True):
        if before is not after:
            state.budgets[after.key].held += after.amount - before.amount
    hold.demands = extended
    return True


def renew(state: TenantState, now_us: int, hold_ids: Iterable[str], lease_us: int) -> None:
    """Keep these holds for another lease."""
    for hold_id in hold_ids:
        hold = state.holds.get(hold_id)
        if hold is not None:
            hold.expires_us = now_us + lease_us


def expire(state: TenantState, now_us: int) -> int:
    """End the holds whose lease has run out: what they reserved counts as taken, until the ledger
    says what it was. Returns how many."""
    if now_us < state.next_expiry_us:
        return 0
    late = [hold_id for hold_id, hold in state.holds.items() if hold.expires_us <= now_us]
    for hold_id in late:
        hold = state.holds.pop(hold_id)
        for demand in hold.demands:
            _settle(state, now_us, demand, demand.amount, now_us)
    state.next_expiry_us = min((hold.expires_us for hold in state.holds.values()), default=MOST)
    return len(late)


def rebase(state: TenantState, spent: Spent) -> None:
    """Correct a budget by the ledger, or start it. Before `cut` the ledger is right; from there on
    whichever of the two has seen more, since each may be behind the other."""
    budget = state.budgets.get(spent.key)
    if budget is None:
        budget = state.budgets[spent.key] = _Budget(spent.window_us)
    if budget.window_us < spent.window_us:
        _roll(budget, spent.window_us)
    elif budget.window_us > spent.window_us:
        return  # of a window that is over
    recent = {slot: amount for slot, amount in budget.slots.items() if slot >= spent.cut}
    for slot, amount in spent.slots.items():
        recent[slot] = max(amount, recent.get(slot, 0)) if slot >= spent.cut else amount
    budget.slots = recent
    budget.spent = spent.before + sum(recent.values())
    if len(state.holds) <= FEW_HOLDS:
        budget.held = sum(
            demand.amount
            for hold in state.holds.values()
            for demand in hold.demands
            if demand.key == spent.key and demand.window_us == budget.window_us
        )


def forget(state: TenantState, now_us: int) -> None:
    """Drop counters that would decide like new ones. Budgets stay: a new one asks the ledger."""
    for key in [key for key, window in state.windows.items() if window.new_us <= now_us]:
        del state.windows[key]
    for key in [key for key, bucket in state.buckets.items() if bucket.new_us <= now_us]:
        if not state.holds:  # a hold would settle into it
            del state.buckets[key]
    for key in [key for key, found in state.concurrency.items() if not found.held]:
        del state.concurrency[key]


# -------------------------------------------- one limit: left, reset, wait (µs); take


def _look_window(state: TenantState, now_us: int, demand: Demand) -> _Looked:
    width = demand.period_us // SLOTS
    window = state.windows.get(demand.key)
    count, last = 0, -1
    if window is not None:
        _slide(window, (now_us - demand.period_us) // width)
        count = window.count
        if count:
            last = next(reversed(window.slots))
    wait_us = 0
    if count + demand.amount > demand.limit:
        wait_us = NEVER
        if demand.amount <= demand.limit and window is not None:
            excess = count + demand.amount - demand.limit
            for slot, number in window.slots.items():
                excess -= number
                if excess <= 0:
                    wait_us = (slot + 1) * width + demand.period_us - now_us
                    break
    else:
        last = max(last, now_us // width)
    reset_us = 0 if last < 0 else (last + 1) * width + demand.period_us - now_us
    return demand.limit - count, reset_us, wait_us, window


def _slide(window: _Window, oldest: int) -> None:
    """Forget slots that are wholly out of the period."""
    gone = []
    for slot in window.slots:
        if slot >= oldest:
            break
        gone.append(slot)
    for slot in gone:
        window.count -= window.slots.pop(slot)


def _take_window(state: TenantState, now_us: int, demand: Demand, found: _Found) -> Demand:
    if found is None:
        found = state.windows[demand.key] = _Window()
    assert isinstance(found, _Window)
    window = found
    # A clock that steps back must not break the order of the slots.
    slot = now_us // (demand.period_us // SLOTS)
    if window.slots:
        slot = max(slot, next(reversed(window.slots)))
    window.slots[slot] = window.slots.get(slot, 0) + demand.amount
    window.count += demand.amount
    window.new_us = now_us + 2 * demand.period_us
    return demand


def refilled(level: int, at_us: int, now_us: int, limit: int, period_us: int) -> tuple[int, int]:
    """The bucket's level at `now_us`, and the time up to which its refill has been counted.

    Whole units only, and the time of a fraction is kept: nothing is gained or lost by asking."""
    elapsed = max(0, now_us - at_us)
    gained = floor(float(elapsed) * float(limit) / float(period_us))
    if level + gained >= limit:
        return limit, max(at_us, now_us)
    if gained <= 0:
        return level, at_us
    return level + gained, at_us + ceil(float(gained) * float(period_us) / float(limit))


def _filled(state: TenantState, now_us: int, demand: Demand) -> _Bucket:
    bucket = state.buckets.get(demand.key)
    if bucket is None:
        return _Bucket(demand.limit, now_us)
    if demand.limit <= 0:
        return _Bucket(min(bucket.level, 0), now_us)
    return _Bucket(*refilled(bucket.level, bucket.at_us, now_us, demand.limit, demand.period_us))


def _fills_in(bucket: _Bucket, now_us: int, missing: int, demand: Demand) -> int:
    if missing <= 0:
        return 0
    if demand.limit <= 0:
        return NEVER
    needed = ceil(float(missing) * float(demand.period_us) / float(demand.limit))
    return max(1, needed - (now_us - bucket.at_us))


def _look_bucket(state: TenantState, now_us: int, demand: Demand) -> _Looked:
    bucket = _filled(state, now_us, demand)
    if demand.amount > demand.limit:
        wait_us = NEVER
    else:
        wait_us = _fills_in(bucket, now_us, demand.amount - bucket.level, demand)
    after = bucket.level - (demand.amount if wait_us == 0 else 0)
    reset_us = max(0, _fills_in(bucket, now_us, demand.limit - after, demand))
    return bucket.level, reset_us, wait_us, bucket


def _take_bucket(state: TenantState, now_us: int, demand: Demand, found: _Found) -> Demand:
    assert isinstance(found, _Bucket)
    found.level -= demand.amount
    _keep_bucket(state, now_us, demand, found)
    return demand


def _keep_bucket(state: TenantState, now_us: int, demand: Demand, bucket: _Bucket) -> None:
    missing_us = _fills_in(bucket, now_us, demand.limit - bucket.level, demand)
    bucket.new_us = MOST if missing_us == NEVER else now_us + missing_us
    state.buckets[demand.key] = bucket


RETRY_US = 1_000_000  # when a place may be free; nobody knows
WINDOW_END_US = 1_000_000_000_000  # a spent budget: whoever made the window knows when it ends


def _look_concurrency(state: TenantState, now_us: int, demand: Demand) -> _Looked:
    left = demand.limit - state.held(demand.key)
    if left < demand.amount and not state.holds:  # nobody is there: the number is wrong
        state.concurrency.pop(demand.key, None)
        left = demand.limit
    if left >= demand.amount:
        return left, 0, 0, None
    return left, RETRY_US, RETRY_US if demand.amount <= demand.limit else NEVER, None


def _take_concurrency(state: TenantState, now_us: int, demand: Demand, found: _Found) -> Demand:
    counter = state.concurrency.get(demand.key)
    if counter is None:
        counter = state.concurrency[demand.key] = _Concurrency()
    counter.held += demand.amount
    return demand


def _grain_us(demand: Demand) -> int:
    return demand.period_us // ROLLING_SLOTS if demand.period_us else MINUTE_US


def _roll(budget: _Budget, window_us: int) -> None:
    """A new calendar window: nothing is spent in it yet; what is held settles in the old one."""
    budget.window_us = window_us
    budget.spent = 0
    budget.held = 0
    budget.slots = {}


def _look_budget(state: TenantState, now_us: int, demand: Demand) -> _Looked:
    budget = state.budgets[demand.key]
    if budget.window_us < demand.window_us:
        used = 0
    else:
        if demand.period_us:
            _slide_budget(budget, now_us, demand)
        used = budget.spent + budget.held
    left = demand.limit - used
    if left >= demand.amount:
        return left, 0, 0, budget
    return left, 0, WINDOW_END_US if demand.amount <= demand.limit else NEVER, budget


def _slide_budget(budget: _Budget, now_us: int, demand: Demand) -> None:
    oldest = (now_us - demand.period_us) // _grain_us(demand)
    for slot in [slot for slot in budget.slots if slot < oldest]:
        budget.spent -= budget.slots.pop(slot)


def _take_budget(state: TenantState, now_us: int, demand: Demand, found: _Found) -> Demand:
    """The demand with the window that it was really taken from: another replica's clock may already
    have begun the next one."""
    assert isinstance(found, _Budget)
    budget = found
    if budget.window_us < demand.window_us:
        _roll(budget, demand.window_us)
    budget.held += demand.amount
    if budget.window_us == demand.window_us:
        return demand
    return replace(demand, window_us=budget.window_us)


def _settle(state: TenantState, now_us: int, demand: Demand, amount: int, ended_us: int) -> None:
    match demand.kind:
        case Kind.WINDOW:
            return  # a request that was admitted was a request
        case Kind.CONCURRENCY:
            found = state.concurrency.get(demand.key)
            if found is not None:
                found.held = max(0, found.held - demand.amount)
        case Kind.BUCKET:
            if demand.key in state.buckets:
                bucket = _filled(state, now_us, demand)
                bucket.level = min(demand.limit, bucket.level + demand.amount - amount)
                _keep_bucket(state, now_us, demand, bucket)
        case Kind.BUDGET:
            budget = state.budgets.get(demand.key)
            if budget is None or budget.window_us > demand.window_us:
                return
            budget.held = max(0, budget.held - demand.amount)
            if amount:
                slot = ended_us // _grain_us(demand)
                budget.slots[slot] = budget.slots.get(slot, 0) + amount
                budget.spent += amount


# By Kind, which counts from 1.
_LOOK = (_look_window, _look_window, _look_bucket, _look_concurrency, _look_budget)
_TAKE = (_take_window, _take_window, _take_bucket, _take_concurrency, _take_budget)
