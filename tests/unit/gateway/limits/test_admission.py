"""Admission above a store: who is asked, how long, and what happens when nobody answers."""

import asyncio
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest
from typing_extensions import override

from gateway.allowances import Budget, BudgetSettings, Limit, LimitSettings
from gateway.auth import Caller
from gateway.budgets import Spend
from gateway.call import Asked, Call, Presence
from gateway.errors import BudgetSpent, GatewayError, LimitsUnavailable, StoreUnavailable
from gateway.limits import Limits, MemoryStore, Slices, StoreGone
from gateway.limits.arithmetic import Demand, Verdict
from gateway.routing import Target
from telemetry.ids import KeyId, RequestId, TenantId
from telemetry.pricing import PriceBook
from tests.fakes.clock import FakeClock

TARGET = Target("b", "m", 1)


def budget(amount: str = "1", **more: Any) -> Budget:
    facts: dict[str, Any] = {
        "id": "b1",
        "tenant_id": "t",
        "scope": "tenant",
        "subject": None,
        "amount_usd": Decimal(amount),
        "window": "month",
        "hours": None,
        "zone": "UTC",
        "mode": "hard",
        "strict": False,
    }
    return Budget(**(facts | more))


def requests(amount: int, **more: Any) -> Limit:
    facts: dict[str, Any] = {
        "id": "l1",
        "tenant_id": "t",
        "scope": "tenant",
        "subject": None,
        "counts": "requests",
        "amount": Decimal(amount),
        "per_s": 60,
        "strict": False,
    }
    return Limit(**(facts | more))


class Ledger:
    """Says that nothing was spent, after a while."""

    def __init__(self, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.asked = 0
        self._takes_s = takes_s
        self._error = error

    async def of(self, owner: str, filters: Mapping[str, str], **_: Any) -> Spend:
        self.asked += 1
        await asyncio.sleep(self._takes_s)
        if self._error is not None:
            raise self._error
        return Spend(0, {})


class AwayStore(MemoryStore):
    """Answers as long as it is told to."""

    is_up = True
    within: float | None = None

    @override
    async def admit(
        self,
        tenant: str,
        hold_id: str,
        lease_us: int,
        demands: Sequence[Demand],
        *,
        within_s: float | None = None,
    ) -> Verdict:
        self.within = within_s
        if not self.is_up:
            raise StoreGone
        return await super().admit(tenant, hold_id, lease_us, demands)


class Setup:
    """Limits over a store that may go away."""

    def __init__(self, ledger: Ledger, *, replicas: int | None = 2, patience_s: float = 5) -> None:
        self.clock = FakeClock()
        self.store = AwayStore(self.clock)
        self.limits = Limits(
            self.store,
            slices=Slices(MemoryStore(self.clock), 0.5),
            replicas=lambda: replicas,
            is_up=lambda: self.store.is_up,
            spend=ledger,
            prices=PriceBook,
            provider_of=lambda backend: backend,
            settings=lambda: (LimitSettings(), BudgetSettings()),
            clock=self.clock,
            patience_s=patience_s,
        )
        self.number = 0

    async def ask(self, caller: Caller) -> Call:
        """One request of the caller. Raises what refuses it."""
        self.number += 1
        call = Call(
            request_id=RequestId(f"r{self.number}"),
            surface="chat",
            body=b"{}",
            headers=(),
            presence=Presence(),
        )
        asked = Asked(
            model="m", stream=False, include_usage=False, choices=1, output_limit=9,
            input_estimate=1,
        )  # fmt: skip
        await self.limits.admit(call, caller, asked, [TARGET])
        return call

    async def codes(self, caller: Caller, count: int) -> list[str]:
        """What became of so many requests at once."""
        found = await asyncio.gather(
            *(self.ask(caller) for _ in range(count)), return_exceptions=True
        )
        return [one.code if isinstance(one, GatewayError) else "ok" for one in found]


def caller(*allowed: Limit | Budget) -> Caller:
    return Caller(
        tenant_id=TenantId("t"),
        tenant="acme",
        key_id=KeyId("k"),
        model_allow=None,
        limits=tuple(one for one in allowed if isinstance(one, Limit)),
        budgets=tuple(one for one in allowed if isinstance(one, Budget)),
    )


async def test_a_slow_ledger_is_waited_for_and_asked_once() -> None:
    """Sixty requests on a new budget, and a ledger that takes longer than the store may: all are
    decided by the store, after one question."""
    ledger = Ledger(takes_s=0.2)
    setup = Setup(ledger)
    assert await setup.codes(caller(budget()), 60) == ["ok"] * 60
    assert ledger.asked == 1
    assert setup.limits.counts.sliced == 0
    assert setup.store.within is not None
    assert 0 < setup.store.within <= 0.05  # waiting for the ledger is no waiting for the store


async def test_a_ledger_that_hangs_is_not_waited_for_twice() -> None:
    """Who comes when it has hung for long goes on with the slice at once."""
    setup = Setup(Ledger(takes_s=60), patience_s=0.1)
    who = caller(budget())
    assert (await setup.ask(who)).answer_headers["x-meterline-limits"] == "degraded"
    began = asyncio.get_running_loop().time()
    await setup.ask(who)
    assert asyncio.get_running_loop().time() - began < 0.09


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), StoreGone()])
async def test_without_ledger_the_slice_decides(error: Exception) -> None:
    """A budget that nobody can read is spent within this replica's share of it."""
    setup = Setup(Ledger(error=error))
    assert await setup.codes(caller(budget()), 3) == ["ok"] * 3
    assert setup.limits.counts.sliced == 3


async def test_a_slice_that_is_spent_is_no_spent_budget() -> None:
    """With the counters away and no share left the client is told to retry, not that its money is
    gone; a budget of nothing is nothing all the same."""
    setup = Setup(Ledger(), replicas=None)
    await setup.ask(caller(budget()))
    setup.store.is_up = False
    with pytest.raises(LimitsUnavailable, match="counters are away"):
        await setup.ask(caller(budget()))
    with pytest.raises(BudgetSpent):
        await setup.ask(caller(budget("0")))


async def test_strict_limits_refuse_and_others_are_sliced() -> None:
    """With the counters away: strict is 503, and a quarter of the limit is this replica's."""
    setup = Setup(Ledger())
    setup.store.is_up = False
    assert await setup.codes(caller(requests(8, strict=True)), 2) == ["limits_unavailable"] * 2
    codes = await setup.codes(caller(requests(8)), 4)
    assert (codes.count("ok"), codes.count("rate_limit_exceeded")) == (2, 2)
