"""CPU that admission costs: in process, over one shared connection to Redis, and over redis-py.

`make bench ARGS=admission` prints microseconds of this process per admitted and settled
request, with the machine's other load left out (process time).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.limits import MemoryStore, RedisStore
from gateway.limits.arithmetic import MINUTE_US, Demand, Kind, Spent
from gateway.limits.redis_store import SCRIPT, SHA, _flat, _head
from telemetry.clock import SystemClock
from tests import services
from tests.bench.report import Table

LEASE_US = 60_000_000
TENANTS = 10_000
CONCURRENT = 64
BUDGET = Spent(key="m", period_us=0, window_us=0, before=0, cut=0, slots={})
Step = Callable[[str, str], Awaitable[None]]


def demands() -> tuple[Demand, ...]:
    """Five scopes: requests and tokens of key and tenant, concurrency of the user, a budget."""
    return (
        Demand("k", Kind.WINDOW, 10**9, 1, MINUTE_US),
        Demand("t", Kind.BUCKET, 10**12, 900, MINUTE_US),
        Demand("u", Kind.CONCURRENCY, 10**6, 1),
        Demand("r", Kind.BUCKET, 10**12, 900, MINUTE_US),
        Demand("m", Kind.BUDGET, 10**15, 10**6),
    )


async def cpu_us(step: Step, count: int, tenants: int) -> float:
    """Process time per step, with CONCURRENT of them in flight."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await step(f"t{number % tenants}", f"h{number}")

    began = time.process_time()
    await asyncio.gather(*(work() for _ in range(CONCURRENT)))
    return (time.process_time() - began) / count * 1e6


async def in_process(tenants: int) -> float:
    store, wanted = MemoryStore(SystemClock()), demands()
    for number in range(tenants):
        await store.rebase(f"t{number}", BUDGET)

    async def step(tenant: str, hold: str) -> None:
        assert (await store.admit(tenant, hold, LEASE_US, wanted)).admitted
        store.settle(tenant, hold, (1, 500, 1, 500, 10**5), 0)

    await cpu_us(step, 2_000, tenants)
    return await cpu_us(step, 30_000, tenants)


async def shared(url: str, tenants: int) -> float:
    wanted = demands()
    async with RedisStore(url, node="bench", budget_s=5) as store:
        await asyncio.gather(*(store.rebase(f"t{number}", BUDGET) for number in range(tenants)))

        async def step(tenant: str, hold: str) -> None:
            assert (await store.admit(tenant, hold, LEASE_US, wanted)).admitted
            store.settle(tenant, hold, (1, 500, 1, 500, 10**5), 0)

        await cpu_us(step, 2_000, tenants)
        return await cpu_us(step, 20_000, tenants)


async def redis_py(url: str) -> float:
    wanted = demands()
    client = Redis.from_url(url, retry=Retry(NoBackoff(), 0), max_connections=CONCURRENT)
    await client.script_load(SCRIPT)

    async def call(tenant: str, keys: list[str], *rest: object) -> list[int]:
        return await client.execute_command(  # type: ignore[no-any-return]  # untyped there
            *_head(f"ml:{{{tenant}}}:", keys), *rest
        )

    await call("p", ["m"], "rebase", 0, 0, 0, 0)
    assert SHA

    async def step(_: str, hold: str) -> None:
        keys = [demand.key for demand in wanted]
        answer = await call("p", keys, "admit", hold, LEASE_US, *_flat(wanted))
        assert answer[0] == 1
        await call("p", [], "settle", hold, 0, 1, 500, 1, 500, 10**5)

    await cpu_us(step, 500, 1)
    value = await cpu_us(step, 4_000, 1)
    await client.aclose()
    return value


def run() -> Table:
    """The table of `make bench`."""
    table = Table("admission", ["counters", "µs CPU to admit and settle, 64 concurrent"])
    for name, value in asyncio.run(measure()):
        table.add(name, round(value, 1))
    return table


async def measure() -> list[tuple[str, float]]:
    rows = [
        ("in process, 1 tenant", await in_process(1)),
        (f"in process, {TENANTS} tenants", await in_process(TENANTS)),
    ]
    with services.redis() as server:
        rows.append(("Redis, shared connection, 1 tenant", await shared(server.url, 1)))
        rows.append((f"Redis, shared connection, {TENANTS}", await shared(server.url, TENANTS)))
        rows.append(("Redis, redis-py", await redis_py(server.url)))
    return rows
