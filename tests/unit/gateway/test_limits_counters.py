"""The counters that workers share in their parent: the arithmetic of one process, for several."""

import asyncio
from pathlib import Path

import pytest

from gateway.limits import CounterClient, CounterServer, MemoryStore, StoreGone
from gateway.limits.arithmetic import Demand, Kind, Spent
from tests.fakes.clock import FakeClock

MINUTE = 60_000_000


def requests(limit: int) -> tuple[Demand, ...]:
    return (Demand("r", Kind.WINDOW, limit, 1, MINUTE),)


async def test_two_workers_share_a_limit(tmp_path: Path) -> None:
    """Ten concurrent requests of two workers on a limit of seven: seven are admitted."""
    path = tmp_path / "c.sock"
    async with (
        CounterServer(MemoryStore(FakeClock()), path),
        CounterClient(path, budget_s=5) as one,
        CounterClient(path, budget_s=5) as two,
    ):
        verdicts = await asyncio.gather(
            *(
                worker.admit("t", f"{name}{number}", MINUTE, requests(7))
                for name, worker in (("a", one), ("b", two))
                for number in range(5)
            )
        )
    assert sum(verdict.admitted for verdict in verdicts) == 7


async def test_every_step_crosses(tmp_path: Path) -> None:
    """A budget is begun, held, settled and read as if its counters were here."""
    path = tmp_path / "c.sock"
    budget = Demand("b", Kind.BUDGET, 100, 30, window_us=1)
    async with (
        CounterServer(MemoryStore(FakeClock()), path),
        CounterClient(path, budget_s=5) as worker,
    ):
        cold = await worker.admit("t", "h", MINUTE, (budget,))
        assert cold.cold == (0,)
        await worker.rebase(
            "t", Spent(key="b", period_us=0, window_us=1, before=50, cut=3, slots={3: 1})
        )
        assert (await worker.admit("t", "h", MINUTE, (budget,))).admitted
        await worker.renew("t", ["h"], MINUTE)
        worker.settle("t", "h", (10,), 0)
        state = await worker.budget("t", "b")
        assert state is not None
        assert (state.spent, state.held) == (61, 0)
        assert await worker.budget("t", "other") is None


async def test_a_parent_that_is_gone(tmp_path: Path) -> None:
    """Whoever asks is told at once, and so is whoever waits; settling neither waits nor raises."""
    path = tmp_path / "c.sock"
    parent = CounterServer(MemoryStore(FakeClock()), path)
    await parent.__aenter__()
    async with CounterClient(path, budget_s=5) as worker:
        assert worker.is_up
        assert (await worker.admit("t", "h", MINUTE, requests(1))).admitted
        await parent.__aexit__()
        for _ in range(100):
            if not worker.is_up:
                break
            await asyncio.sleep(0.01)
        assert not worker.is_up
        worker.settle("t", "h", (1,), 0)
        with pytest.raises(StoreGone):
            await worker.admit("t", "h", MINUTE, requests(1))
