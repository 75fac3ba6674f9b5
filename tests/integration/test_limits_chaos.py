"""Four processes on one Redis: exactly as many as there is room for, and within the stated bound
while it is killed, restarted and paused."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.limits import RedisStore
from gateway.limits.arithmetic import Demand, Kind
from tests import services
from tests.fakes.limit_replica import TENANT

ROOT = Path(__file__).parents[2]
REPLICAS = 4


async def start(url: str, name: str, *arguments: object) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.limit_replica", url, name, *map(str, arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        cwd=ROOT, limit=1 << 24,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"ready\n"
    return process


async def finish(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert await process.wait() == 0
    facts: dict[str, Any] = json.loads(line)
    return facts


async def go(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await process.stdin.drain()


async def replicas(url: str, *arguments: object) -> list[asyncio.subprocess.Process]:
    return list(await asyncio.gather(*(start(url, f"r{n}", *arguments) for n in range(REPLICAS))))


@pytest.mark.parametrize(("kind", "limit", "amount"), [("WINDOW", 7, 1), ("BUDGET", 7_999, 1_000)])
async def test_four_processes_share_room_for_seven(kind: str, limit: int, amount: int) -> None:
    """Two hundred workers in four processes: seven get in, by requests and by money."""
    with services.redis() as redis:
        running = await replicas(redis.url, 5, 1, kind, limit, amount, 0.5)
        await go(running)
        facts = await asyncio.gather(*map(finish, running))
        assert sum(fact["admitted"] for fact in facts) == 7
        assert sum(fact["sliced"] for fact in facts) == 0
        assert facts[-1]["holds"] == 0


async def test_an_outage_stays_within_the_bound() -> None:
    """Redis is killed, comes back empty, and is paused. What passes in any period is at most what
    the shared counters let in (the limit, and once more after they were emptied) and the slices;
    nobody waited longer than the budget of the store; at the end nothing is held."""
    limit, share = 400, 0.5
    with services.redis() as redis:
        running = await replicas(redis.url, 0.05, 9, "WINDOW", limit, 1, share)
        await go(running)
        await asyncio.sleep(1.5)
        redis.kill()
        await asyncio.sleep(2)
        redis.start()
        await asyncio.sleep(1.5)
        redis.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        redis.signal(signal.SIGCONT)
        facts = await asyncio.gather(*map(finish, running))
        admitted = sum(fact["admitted"] for fact in facts)
        sliced = sum(fact["sliced"] for fact in facts)
        assert limit < admitted <= 2 * limit + limit * share
        assert 0 < sliced <= limit * share
        longest = max(fact["longest_ms"] for fact in facts)
        print(f"admitted {admitted}, {sliced} by slices, waited {longest:.0f} ms")  # noqa: T201  # for docs/reference/bounds.md
        assert all(fact["outages"] >= 2 for fact in facts)
        # 50 ms, and what a busy machine needs to wake four processes up.
        assert longest < 400
        async with RedisStore(redis.url, node="after") as store:
            assert await store.holds(TENANT) == 0
            probe = await store.admit(
                TENANT, "probe", 1_000_000, (Demand("c", Kind.CONCURRENCY, 1, 1),)
            )
            assert probe.admitted
