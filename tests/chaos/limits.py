"""Redis is killed, comes back empty, and is paused, under four gateways with load.

`python -m tests.chaos.limits [--quick]` (or `make chaos`) prints the table of
docs/reference/bounds.md and exits 1 if a bound does not hold. Three tenants ask all the time:
one has a limit on requests, one a budget, one neither. Looked at afterwards: how much
passed, how long a request waited for Redis, whether every hold is back, and whether the counters
are the ledger.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from gateway.limits import RedisStore, StoreGone
from tests.chaos.replicas import Replicas, Tenant, replicas

REPLICAS = 4
WORKERS = 3  # of each tenant at each replica
REST_S = 0.4  # of a worker between two requests: what two cores answer without queueing
LIMIT = 300  # requests per hour
BUDGET = "0.003"  # dollars; a request costs about 9 millionths, and is held at twice that
SHARE = 0.5  # limits.offline_share
MORE = f"[limits]\noffline_share = {SHARE}\nlease_s = 20\n[budgets]\nrebase_s = 5\n"
SLICES_AFTER_S = 13  # a replica has a slice when all others have had the time to count it
LATE = 0.01  # share of requests that may have waited longer: the machine's own lateness


class Plan(Struct, frozen=True):
    """Seconds: load before Redis is killed; without it; with it, empty; paused; with it again."""

    before: float = 8
    killed: float = 20
    empty: float = 10
    paused: float = 10
    after: float = 10


class Load:
    """What clients saw of one tenant."""

    def __init__(self, name: str, tenant: Tenant) -> None:
        self.name = name
        self.tenant = tenant
        self.codes: Counter[int] = Counter()
        self.degraded = 0

    async def work(self, client: httpx.AsyncClient, url: str, is_over: Callable[[], bool]) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        headers = {"authorization": f"Bearer {self.tenant.key}"}
        while not is_over():
            answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            self.codes[answer.status_code] += 1
            if answer.status_code == 200:
                self.degraded += "x-meterline-limits" in answer.headers
            await asyncio.sleep(REST_S)


async def drive(world: Replicas, loads: list[Load], plan: Plan) -> "Waits":
    """Returns how long requests had waited before the first failure: all of them came at once."""
    is_over = False
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client,
        asyncio.TaskGroup() as group,
    ):
        for url in world.urls:
            for load in loads:
                for _ in range(WORKERS):
                    group.create_task(load.work(client, url, lambda: is_over))
        await asyncio.sleep(plan.before)
        warm = await asyncio.to_thread(Waits.of, world)
        world.redis.kill()
        await asyncio.sleep(plan.killed)
        world.redis.start()
        await asyncio.sleep(plan.empty)
        world.redis.signal(signal.SIGSTOP)
        await asyncio.sleep(plan.paused)
        world.redis.signal(signal.SIGCONT)
        await asyncio.sleep(plan.after)
        is_over = True
    return warm


async def settled(world: Replicas, loads: list[Load]) -> list[tuple[int, int, int, int, int]]:
    """Of each tenant, when all is quiet: open holds, held and spent of its budget, and what the
    ledger has: answers and nano-dollars."""
    deadline = time.monotonic() + 60
    async with RedisStore(world.redis.url, node="looker", budget_s=5) as store:
        while True:
            found = []
            for load in loads:
                tenant = load.tenant.id
                try:
                    holds = await store.holds(tenant)
                    state = await store.budget(tenant, "b:tenant::month:UTC")
                except StoreGone:
                    continue
                assert state is not None
                found.append((holds, state.held, state.spent, *await world.books(tenant)))
            is_quiet = len(found) == len(loads) and all(
                (holds, held, served) == (0, 0, load.codes[200])
                and (spent == cost or load is not loads[1])
                for load, (holds, held, spent, served, cost) in zip(loads, found, strict=True)
            )
            if is_quiet or time.monotonic() > deadline:
                return found
            await asyncio.sleep(1)


def run(plan: Plan, *, show: Callable[[str], None]) -> list[str]:
    """What did not hold, if anything."""
    broken: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        replicas(Path(folder), REPLICAS, more=MORE) as world,
    ):
        loads = [Load(name, world.tenant(name)) for name in ("by requests", "by money", "free")]
        by_requests, by_money, _ = loads
        world.admin(
            "PUT", "limits", tenant=by_requests.tenant.id, counts="requests", amount=LIMIT,
            per_s=3600,
        )  # fmt: skip
        world.admin("PUT", "budgets", tenant=by_money.tenant.id, amount_usd=BUDGET)
        time.sleep(SLICES_AFTER_S)
        warm = asyncio.run(drive(world, loads, plan))
        books = asyncio.run(settled(world, loads))
        waits = Waits.of(world).since(warm)
        nano = round(float(BUDGET) * 1e9)
        allowed = 2 * LIMIT + int(LIMIT * SHARE)
        table = Table("tenant", "admitted", "of them by slices", "the most that may pass")
        for load, (holds, held, spent, served, cost) in zip(loads, books, strict=True):
            passed, most = str(load.codes[200]), "no limit"
            if load is by_requests:
                most = f"{LIMIT} + {LIMIT} (emptied) + {int(LIMIT * SHARE)} = {allowed}"
                check(broken, load.codes[200] <= allowed, "requests passed the bound")
                check(broken, load.codes[200] > LIMIT, "the run never came to the limit")
            elif load is by_money:
                most = f"${BUDGET} + ${nano * SHARE / 1e9}"
                passed = f"${cost / 1e9:.6f} in {passed}"
                check(broken, cost <= nano * (1 + SHARE), "money passed the bound")
                check(broken, spent == cost, f"counter {spent}, ledger {cost}")
            check(broken, (holds, held) == (0, 0), f"still held: {holds}, {held}")
            check(broken, served == load.codes[200], f"{served} in the ledger, {load.codes}")
            check(broken, load.codes[500] == 0, f"defects: {load.codes}")
            table.add_row(load.name, passed, str(load.degraded), most)
        Console(width=120).print(table)
        show(f"answers: {[dict(load.codes) for load in loads]}")
        show(f"waited for Redis: {waits}")
        check(broken, waits.longer <= waits.all * LATE, f"{waits.longer:.0f} waited too long")
        up = [httpx.get(f"{url}/readyz", timeout=30).json()["limits"] for url in world.urls]
        check(broken, up == ["ok"] * REPLICAS, f"readyz: {up}")
    return broken


class Waits(Struct, frozen=True):
    """How long requests waited for Redis, from the histograms of all replicas."""

    all: float
    short: float
    longer: float
    longest: float

    @classmethod
    def of(cls, world: Replicas) -> "Waits":
        name = "meterline_limits_store_wait_seconds"
        total = cls(0, 0, 0, 0)
        for url in world.urls:  # one scrape of each, so that its numbers are of one moment
            samples = {
                (sample.name, sample.labels.get("le")): sample.value
                for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
                for sample in family.samples
                if family.name == name
            }
            count = samples[f"{name}_count", None]
            short, fair, long = (samples[f"{name}_bucket", le] for le in ("0.005", "0.05", "0.1"))
            total = total.since(cls(-count, -short, fair - count, long - count))
        return total

    def since(self, other: "Waits") -> "Waits":
        return Waits(
            self.all - other.all,
            self.short - other.short,
            self.longer - other.longer,
            self.longest - other.longest,
        )

    def __str__(self) -> str:
        return (
            f"{self.all:.0f} requests, {self.short / self.all:.2%} at most 5 ms, "
            f"{self.longer:.0f} more than 50 ms, {self.longest:.0f} more than 100 ms"
        )


def check(broken: list[str], holds: bool, what: str) -> None:
    if not holds:
        broken.append(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the time")
    quick = parser.parse_args().quick
    plan = Plan(before=3, killed=7, empty=4, paused=3, after=3) if quick else Plan()
    broken = run(plan, show=print)
    for line in broken:
        print(f"BROKEN: {line}")  # noqa: T201  # a program's output
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
