"""The shared counters behind Sentinel and on a Cluster: a fail-over in the middle of the work stays
within the bound, and nothing stays held."""

import asyncio
import contextlib
import signal
from collections.abc import Callable

import pytest

from gateway.limits import ClusterStore, RedisStore, StoreGone, shared_store
from gateway.limits.arithmetic import MINUTE_US, Demand, Kind, Spent
from gateway.limits.cluster import replicas_key, slot_of
from gateway.limits.topology import place_of
from tests.fakes.redis_topologies import cluster, sentinels
from tests.services import Redis

LEASE_US = 60_000_000
LIMIT = 40
TENANTS = ("a", "b", "c", "d", "e", "f")
Shared = RedisStore | ClusterStore


class Work:
    """Replicas of ours that admit as fast as they may, hold a moment, and settle."""

    def __init__(self, stores: list[Shared]) -> None:
        self.stores = stores
        self.admitted = dict.fromkeys(TENANTS, 0)
        self.is_over = False

    async def run(self, number: int) -> None:
        store = self.stores[number % len(self.stores)]
        demands = (
            Demand("w", Kind.WINDOW, LIMIT, 1, 60 * MINUTE_US),
            Demand("c", Kind.CONCURRENCY, 1000, 1),
        )
        count = 0
        while not self.is_over:
            for tenant in TENANTS:
                count += 1
                hold = f"{number}-{count}"
                admitted, was_sent = False, True
                try:
                    admitted = (await store.admit(tenant, hold, LEASE_US, demands)).admitted
                except StoreGone as error:
                    was_sent = error.was_sent
                self.admitted[tenant] += admitted
                await asyncio.sleep(0.01)
                if admitted or was_sent:
                    store.settle(tenant, hold, [int(admitted)] * 2, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.05)


async def check(stores: list[Shared], fail_over: Callable[[], None]) -> None:
    """What was admitted in all is the limit, and once more what the new primary had not heard of;
    with the old primary gone others go on; at the end nothing is held or left to be told."""
    work = Work(stores)
    outages = sum(store.outages for store in stores)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(work.run(number))
        await until(lambda: min(work.admitted.values()) == LIMIT)
        fail_over()
        await until(lambda: sum(store.outages for store in stores) >= outages + len(stores))
        await until(lambda: all(store.is_up for store in stores))
        await asyncio.sleep(0.5)
        work.is_over = True
    for admitted in work.admitted.values():
        assert LIMIT <= admitted <= 2 * LIMIT
    await until(lambda: not any(store.backlog for store in stores))
    for tenant in TENANTS:
        assert await stores[0].holds(tenant) == 0
        await stores[0].rebase(
            tenant, Spent(key="m", period_us=0, window_us=0, before=0, cut=0, slots={})
        )
        budget = Demand("m", Kind.BUDGET, 10, 7)
        assert (await stores[0].admit(tenant, "x", LEASE_US, (budget,))).admitted
        assert await stores[1].extend(tenant, "x", [3])
        assert not await stores[1].extend(tenant, "x", [1])


async def test_sentinel_fails_over() -> None:
    """The primary dies; whoever the Sentinels make primary is found, by all replicas of ours."""
    async with sentinels() as world, contextlib.AsyncExitStack() as stack:
        stores: list[Shared] = [
            await stack.enter_async_context(
                shared_store(world.url, node=f"n{n}", budget_s=0.5, heartbeat_s=0.3)
            )
            for n in range(2)
        ]
        assert all(store.is_up for store in stores)
        await check(stores, world.primary.kill)


async def pause(node: Redis, store: Shared) -> None:
    """Its tenants are told in time, the others do not notice."""
    of_first = next(t for t in TENANTS if slot_of(t) <= 5460)
    of_last = next(t for t in TENANTS if slot_of(t) > 10922)
    demand = (Demand("p", Kind.WINDOW, 9, 1, MINUTE_US),)
    node.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreGone):
            await store.admit(of_first, "p1", LEASE_US, demand)
        assert not store.is_up
        assert (await store.admit(of_last, "p1", LEASE_US, demand)).admitted
    finally:
        node.signal(signal.SIGCONT)
    for tenant in (of_first, of_last):
        store.settle(tenant, "p1", [1], 0)


async def test_a_cluster_fails_over() -> None:
    """Tenants are spread over three primaries. One of them is paused: an outage of its tenants, not
    of others. It dies: its tenants wait for its replica."""
    async with cluster() as nodes, contextlib.AsyncExitStack() as stack:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        stores: list[Shared] = [
            await stack.enter_async_context(
                shared_store(url, node=f"n{n}", budget_s=0.5, heartbeat_s=0.3)
            )
            for n in range(2)
        ]
        assert all(store.is_up for store in stores)
        assert len({slot_of(tenant) // 5462 for tenant in TENANTS}) == 3
        await until(lambda: all(store.replicas == 2 for store in stores))
        await pause(nodes[0], stores[0])
        await until(lambda: all(store.is_up for store in stores))
        await check(stores, nodes[0].kill)


def test_urls_are_read() -> None:
    """Credentials, ports and services; what is wrong is said without the URL."""
    place = place_of("redis+sentinel://u:p%40ss@h1,h2:7,[::1]:8/main/2")
    assert place.hosts == (("h1", 26379), ("h2", 7), ("::1", 8))
    assert (place.service, place.db) == ("main", 2)
    assert place.url_of(("h3", 5)) == "redis://u:p%40ss@h3:5/2"
    assert place_of("redis+cluster://h").hosts == (("h", 6379),)
    for url in (
        "http://secret", "redis+sentinel://secret", "redis+sentinel:///x", "redis+cluster://h/1",
        "redis+cluster://h:port", "redis+sentinel://h/x/y",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"name|must|path|number|HOST") as caught:
            place_of(url)
        assert "secret" not in str(caught.value)


def test_each_part_of_a_cluster_counts_our_replicas_in_a_slot_of_its_own() -> None:
    """The key for counting is in one of the part's slots."""
    for slots in (frozenset(range(5461)), frozenset({16383, 12})):
        key = replicas_key(slots)
        assert slot_of(key.split("{")[1].split("}")[0]) in slots
