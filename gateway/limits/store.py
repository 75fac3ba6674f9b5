"""Where the counters are. `Store` is what admission asks; `MemoryStore` keeps them in the process.

A store knows tenants, holds and demands; not callers, prices or HTTP."""

from collections.abc import Sequence
from typing import Final, Protocol

from gateway.limits import arithmetic
from gateway.limits.arithmetic import BudgetState, Demand, Spent, TenantState, Verdict
from telemetry.clock import Clock

FORGET_EVERY_US: Final = 300_000_000


class StoreGone(Exception):
    """The store did not answer within its budget of time, or cannot be reached. `was_sent`: it may
    have done what it was asked for all the same."""

    def __init__(self, reason: str = "", *, was_sent: bool = False) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class Store(Protocol):
    """One atomic step for each call. `settle` neither waits nor raises: what the store cannot take
    now it is told when it is back."""

    async def admit(
        self, tenant: str, hold_id: str, lease_us: int, demands: Sequence[Demand]
    ) -> Verdict: ...

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None: ...

    async def renew(self, tenant: str, hold_ids: Sequence[str], lease_us: int) -> None: ...

    async def rebase(self, tenant: str, spent: Spent) -> None: ...

    async def budget(self, tenant: str, key: str) -> BudgetState | None: ...


class MemoryStore:
    """The counters of one process. Counters that are as good as new are forgotten now and then, so
    that memory follows the users of the last period and not all there ever were."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, TenantState] = {}
        self._forget_at_us = 0

    def _state(self, tenant: str) -> TenantState:
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = TenantState()
        return state

    def now_us(self) -> int:
        return self._clock.now_ns() // 1000

    def try_admit(
        self, tenant: str, hold_id: str, lease_us: int, demands: Sequence[Demand]
    ) -> Verdict:
        now_us = self.now_us()
        if now_us >= self._forget_at_us:
            self._forget_at_us = now_us + FORGET_EVERY_US
            for state in self._tenants.values():
                arithmetic.forget(state, now_us)
        return arithmetic.admit(self._state(tenant), now_us, hold_id, lease_us, demands)

    async def admit(
        self, tenant: str, hold_id: str, lease_us: int, demands: Sequence[Demand]
    ) -> Verdict:
        return self.try_admit(tenant, hold_id, lease_us, demands)

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None:
        arithmetic.settle(self._state(tenant), self.now_us(), hold_id, actual, ended_us)

    def try_renew(self, tenant: str, hold_id: str, lease_us: int) -> None:
        arithmetic.renew(self._state(tenant), self.now_us(), (hold_id,), lease_us)

    async def renew(self, tenant: str, hold_ids: Sequence[str], lease_us: int) -> None:
        arithmetic.renew(self._state(tenant), self.now_us(), hold_ids, lease_us)

    def try_rebase(self, tenant: str, spent: Spent) -> None:
        arithmetic.rebase(self._state(tenant), spent)

    async def rebase(self, tenant: str, spent: Spent) -> None:
        self.try_rebase(tenant, spent)

    def begin(self, tenant: str, spent: Spent) -> None:
        """Start a budget's counter, if there is none."""
        if self._state(tenant).budget(spent.key) is None:
            self.try_rebase(tenant, spent)

    def try_budget(self, tenant: str, key: str) -> BudgetState | None:
        state = self._state(tenant)
        arithmetic.expire(state, self.now_us())
        return state.budget(key)

    async def budget(self, tenant: str, key: str) -> BudgetState | None:
        return self.try_budget(tenant, key)

    def holds(self, tenant: str) -> int:
        state = self._state(tenant)
        arithmetic.expire(state, self.now_us())
        return len(state.holds)
