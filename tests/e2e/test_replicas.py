"""Four gateway processes on one Redis and one PostgreSQL let through together what one would."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.replicas import Replicas, Tenant, replicas

PARALLEL = 200
PERIOD_S = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Four of them. Answers take a second, so that requests of one burst overlap; a busy machine
    may sleep for longer than the 50 ms of production."""
    folder = tmp_path_factory.mktemp("replicas")
    more = "[limits]\nstore_budget_ms = 1000\n"
    with replicas(folder, 4, first_token_s=1.0, more=more) as world:
        yield world


async def burst(world: Replicas, tenant: Tenant, count: int, **more: object) -> Counter[int]:
    """So many at once, spread over the replicas."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    headers = {"authorization": f"Bearer {tenant.key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, headers=headers, limits=limits) as client:
        answers = await asyncio.gather(
            *(
                client.post(f"{world.urls[n % 4]}/v1/chat/completions", json=body)
                for n in range(count)
            )
        )
    return Counter(answer.status_code for answer in answers)


async def obeyed(world: Replicas, tenant: Tenant) -> None:
    """Wait until all replicas have heard: a poll is a second at most."""
    await asyncio.sleep(1.5)


async def test_room_for_seven_requests_is_room_for_seven(world: Replicas) -> None:
    """Two hundred in parallel over four replicas: seven."""
    tenant = world.tenant("seven requests")
    world.admin("PUT", "limits", tenant=tenant.id, counts="requests", amount=7, per_s=3600)
    await obeyed(world, tenant)
    assert await burst(world, tenant, PARALLEL, max_tokens=4) == {200: 7, 429: PARALLEL - 7}


async def test_room_for_seven_by_money_is_room_for_seven(world: Replicas) -> None:
    """The same for a budget in dollars, which no replica has read from the ledger before. Its
    requests can take $0.007 for output and little for input."""
    tenant = world.tenant("seven by money")
    world.admin("PUT", "budgets", tenant=tenant.id, amount_usd="0.05")
    await obeyed(world, tenant)
    assert await burst(world, tenant, PARALLEL, max_tokens=3500) == {200: 7, 429: PARALLEL - 7}


async def test_a_live_burst_across_window_edges_stays_exact(world: Replicas) -> None:
    """Bursts at all times of a window of two seconds, over four replicas: never more than the limit
    and one in any two seconds, as clients see the requests go out."""
    tenant = world.tenant("bursts")
    world.admin("PUT", "limits", tenant=tenant.id, counts="requests", amount=9, per_s=PERIOD_S)
    await obeyed(world, tenant)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    passed: list[tuple[float, float]] = []  # when it was sent, when its answer came
    headers = {"authorization": f"Bearer {tenant.key}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:

        async def one(number: int) -> None:
            sent = time.monotonic()
            answer = await client.post(f"{world.urls[number % 4]}/v1/chat/completions", json=body)
            if answer.status_code == 200:
                passed.append((sent, time.monotonic() - 1.0))  # an answer takes a second

        tasks = []
        for number in range(200):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0.35 if number % 20 == 19 else 0.002)
        await asyncio.gather(*tasks)
    assert len(passed) >= 18  # it was more than one window
    for first, _ in passed:
        # Admitted between being sent and being answered: those that certainly lie in the span.
        inside = [1 for sent, ended in passed if sent >= first and ended <= first + PERIOD_S]
        assert len(inside) <= 9 + 1
