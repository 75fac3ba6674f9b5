"""One replica of the limiter as a process, for tests that kill and pause the Redis that replicas
share: it admits as fast as it may, holds each request for a moment, settles it, and writes one JSON
line at the end.

`python -m tests.fakes.limit_replica URL NAME BUDGET_S SECONDS KIND LIMIT AMOUNT SHARE`"""

import asyncio
import contextlib
import json
import sys
import time

from gateway.limits import MemoryStore, RedisStore, Slices, StoreGone
from gateway.limits.arithmetic import MINUTE_US, Demand, Kind, Spent, Verdict
from telemetry.clock import SystemClock

TENANT = "chaos"
LEASE_US = 20_000_000
HELD_S = 0.02


class Replica:
    """What admission does with a store and slices, and nothing else."""

    def __init__(self, store: RedisStore, name: str, demands: tuple[Demand, ...], share: float):
        self.store = store
        self.slices = Slices(MemoryStore(SystemClock()), share)
        self.name = name
        self.demands = demands
        self.admitted: list[float] = []
        self.sliced = 0
        self.longest_s = 0.0
        self._count = 0

    async def one(self) -> None:
        self._count += 1
        hold = f"{self.name}-{self._count}"
        began = time.perf_counter()
        in_slice = was_sent = False
        try:
            verdict = await self.store.admit(TENANT, hold, LEASE_US, self.demands)
            if verdict.cold:
                raise StoreGone
        except StoreGone as error:
            was_sent = error.was_sent
            verdict = self._slice(hold)
            in_slice = True
        self.longest_s = max(self.longest_s, time.perf_counter() - began)
        if verdict.admitted:
            self.admitted.append(time.time())
            self.sliced += in_slice
            await asyncio.sleep(HELD_S)
        if verdict.admitted or was_sent:
            taken = [demand.amount if verdict.admitted else 0 for demand in self.demands]
            now_us = time.time_ns() // 1000
            if in_slice:
                self.slices.settle(TENANT, hold, taken, now_us)
            if was_sent or not in_slice:
                self.store.settle(TENANT, hold, taken, now_us)

    def _slice(self, hold: str) -> Verdict:
        return self.slices.admit(TENANT, hold, LEASE_US, self.demands, self.store.replicas)

    async def work(self, until: float) -> None:
        while time.monotonic() < until:
            await self.one()
            await asyncio.sleep(0.01)


async def main(
    url: str,
    name: str,
    budget_s: float,
    seconds: float,
    kind: str,
    limit: int,
    amount: int,
    share: float,
) -> None:
    period_us = 0 if kind in ("BUDGET", "CONCURRENCY") else MINUTE_US
    demands = (
        Demand("x", Kind[kind], limit, amount, period_us),
        Demand("c", Kind.CONCURRENCY, 10_000, 1),
    )
    async with RedisStore(url, node=name, budget_s=budget_s, heartbeat_s=0.5) as store:
        replica = Replica(store, name, demands, share)
        begun = kind != "BUDGET"
        while not begun:
            with contextlib.suppress(StoreGone):
                await store.rebase(
                    TENANT,
                    Spent(key="x", period_us=0, window_us=0, before=0, cut=0, slots={}),
                )
                begun = True
            await asyncio.sleep(0.05)
        while store.replicas is None:
            await asyncio.sleep(0.05)
        print("ready", flush=True)  # noqa: T201  # the test waits for it
        await asyncio.to_thread(sys.stdin.readline)
        until = time.monotonic() + seconds
        await asyncio.gather(*(replica.work(until) for _ in range(50)))
        deadline = time.monotonic() + 10
        while store.backlog or not store.is_up:
            assert time.monotonic() < deadline, "the store did not come back"
            await asyncio.sleep(0.05)
        holds = None
        while holds is None:
            with contextlib.suppress(StoreGone):
                holds = await store.holds(TENANT)
            await asyncio.sleep(0.05)
        facts = {
            "admitted": len(replica.admitted),
            "times": replica.admitted,
            "sliced": replica.sliced,
            "longest_ms": replica.longest_s * 1000,
            "outages": store.outages,
            "holds": holds,
        }
        print(json.dumps(facts), flush=True)  # noqa: T201  # the test reads it


if __name__ == "__main__":
    _, url_, name_, budget_, seconds_, kind_, limit_, amount_, share_ = sys.argv
    numbers = (float(budget_), float(seconds_), kind_, int(limit_), int(amount_), float(share_))
    asyncio.run(main(url_, name_, *numbers))
