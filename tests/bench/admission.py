"""CPU that admission costs: in process, over one shared connection to Redis, and over redis-py.

`make bench ARGS=admission` prints microseconds of this process per admitted and settled
request, with the machine's other load left out (process time): of the counters alone, and of the
whole stage, from a caller and a parsed request to the settled record, with rules, estimates,
prices and headers. Each request is on five limits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.allowances import Budget, BudgetSettings, Counts, Limit, LimitSettings, Scope
from gateway.auth import Caller
from gateway.budgets import Spend
from gateway.call import Asked, Call, Presence
from gateway.limits import Limits, MemoryStore, RedisStore, Slices, Store
from gateway.limits.arithmetic import MINUTE_US, Demand, Kind, Spent
from gateway.limits.redis_store import SCRIPT, SHA, _flat, _head
from gateway.routing import Target
from telemetry.clock import SystemClock
from telemetry.ids import KeyId, RequestId, TenantId
from telemetry.pricing import PriceBook
from telemetry.record import Attempt, RequestRecord
from telemetry.usage import Usage, UsageSource
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


class NothingSpent:
    """A ledger without entries."""

    async def of(self, owner: str, filters: Mapping[str, str], **_: object) -> Spend:
        return Spend(0, {})


def caller(number: int) -> Caller:
    tenant = TenantId(f"t{number}")

    def limit(scope: Scope, counts: Counts, per_s: int | None) -> Limit:
        return Limit(
            id=f"{scope}{counts}", tenant_id=tenant, scope=scope, subject=None, counts=counts,
            amount=Decimal(10**9), per_s=per_s, strict=False,
        )  # fmt: skip

    return Caller(
        tenant_id=tenant,
        tenant=tenant,
        key_id=KeyId(f"k{number}"),
        model_allow=None,
        limits=(
            limit("key", "requests", 60),
            limit("tenant", "tokens", 60),
            limit("user", "concurrency", None),
            limit("route", "tokens", 60),
        ),
        budgets=(
            Budget(
                id="b", tenant_id=tenant, scope="tenant", subject=None, amount_usd=Decimal(10**6),
                window="month", hours=None, zone="Europe/Berlin", mode="hard", strict=False,
            ),
        ),
    )  # fmt: skip


def record(request_id: str) -> RequestRecord:
    """A request that took less than it held."""
    attempt = Attempt(
        attempt_no=1, reason="primary", backend="b", provider="openai", model="m", span_id="0",
        started_ns=0, first_token_ns=1, usage=Usage(in_uncached_text=50, out_text=200),
        usage_source=UsageSource.REPORTED,
    )  # fmt: skip
    return RequestRecord(
        request_id=RequestId(request_id), node="n", surface="chat", opened_ns=0, deadline_ns=0,
        trace_id="0", span_id="0", asked_model="m", attempts=[attempt], ended_ns=time.time_ns(),
    )  # fmt: skip


async def whole_stage(store: Store, tenants: int) -> float:
    clock = SystemClock()
    written, book = (LimitSettings(store_budget_ms=1000), BudgetSettings()), PriceBook()
    limits = Limits(
        store,
        slices=Slices(MemoryStore(clock), 0.5),
        replicas=lambda: 1,
        is_up=lambda: True,
        spend=NothingSpent(),
        prices=lambda: book,
        provider_of=lambda _: "openai",
        settings=lambda: written,
        clock=clock,
        patience_s=60,
    )
    callers = {f"t{number}": caller(number) for number in range(tenants)}
    asked = Asked(
        model="m", stream=True, include_usage=False, choices=1, output_limit=900,
        input_estimate=50, text_bytes=200, user="u",
    )  # fmt: skip
    plan = [Target("b", "m", 1)]
    body, presence = b"{}", Presence()

    async def step(tenant: str, hold: str) -> None:
        call = Call(
            request_id=RequestId(f"{tenant}{hold}"), surface="chat", body=body, headers=(),
            presence=presence,
        )  # fmt: skip
        await limits.admit(call, callers[tenant], asked, plan)
        limits.settle(record(call.request_id))

    await cpu_us(step, max(2_000, 2 * tenants), tenants)  # all budgets have begun
    without = await cpu_us(_nothing, 20_000, tenants)
    return await cpu_us(step, 20_000, tenants) - without


async def _nothing(tenant: str, hold: str) -> None:
    """What the bench itself costs."""
    request_id = RequestId(f"{tenant}{hold}")
    Call(request_id=request_id, surface="chat", body=b"{}", headers=(), presence=Presence())
    record(request_id)


def run() -> Table:
    """The table of `make bench`."""
    table = Table("admission", ["counters, tenants", "µs CPU to admit and settle, 64 concurrent"])
    for name, value in asyncio.run(measure()):
        table.add(name, round(value, 1))
    return table


async def measure() -> list[tuple[str, float]]:
    sizes = (1, TENANTS)
    with services.redis() as server:
        rows = [(f"in process, {size}", await in_process(size)) for size in sizes]
        rows += [
            (f"Redis, one connection, {size}", await shared(server.url, size)) for size in sizes
        ]
        rows.append(("Redis, redis-py, 1", await redis_py(server.url)))
        for size in sizes:
            memory = await whole_stage(MemoryStore(SystemClock()), size)
            rows.append((f"the whole stage, in process, {size}", memory))
            async with RedisStore(server.url, node="bench", budget_s=1) as store:
                rows.append((f"the whole stage, Redis, {size}", await whole_stage(store, size)))
    return rows
