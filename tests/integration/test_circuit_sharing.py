"""Circuits of several replicas on a real Redis: one learns, all know, one probes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from backends.base import BackendAuth, BackendRateLimited, BackendUnavailable
from gateway.circuit_sharing import CircuitSharing
from gateway.config import HealthSettings
from gateway.health import Health, State
from gateway.routing import Target
from telemetry.clock import SystemClock
from tests import services

SETTINGS = HealthSettings(failures=1, open_s=0.3, open_max_s=2.0, credential_s=60)
DOWN = BackendUnavailable("down", backend="a")


@pytest.fixture(scope="module")
def redis() -> Iterator[services.Redis]:
    """One server for the module; each test has backends of its own."""
    with services.redis() as server:
        yield server


@contextlib.asynccontextmanager
async def replicas(redis: services.Redis, count: int) -> AsyncIterator[list[Health]]:
    """So many replicas, each with its own circuits and its own connection."""
    healths = [Health(SystemClock(), SETTINGS) for _ in range(count)]
    sharings = [
        CircuitSharing(redis.url, health, node=f"node-{number}", every_s=0.05)
        for number, health in enumerate(healths)
    ]
    tasks = [asyncio.create_task(sharing.run()) for sharing in sharings]
    await until(lambda: all(sharing.is_up for sharing in sharings))
    try:
        yield healths
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def test_what_one_learns_all_know(redis: services.Redis) -> None:
    """Each kind of circuit, with the time that is left; and the one that closes it closes all."""
    target = Target("learned", "m", 1, endpoint="e", key="2")
    async with replicas(redis, 3) as (one, two, three):
        one.failed(target, BackendAuth("x", backend="learned", status=401))
        two.failed(target, BackendRateLimited("x", backend="learned", retry_after_s=60))
        others = [Target("learned", "m", 1, endpoint="e"), Target("learned", "m", 1, key="1")]
        await until(lambda: three.state(target, "credential") is State.OPEN)
        await until(lambda: three.state(target, "limit") is State.OPEN)
        await until(lambda: one.state(target, "limit") is State.OPEN)
        assert three.blocked(target) is not None
        assert all(three.is_usable(other) for other in others)
        assert three.state(target, "endpoint") is State.CLOSED


async def test_one_replica_probes_and_its_success_is_everybodys(redis: services.Redis) -> None:
    """When the time is over, exactly one of three lets exactly one request through."""
    target = Target("probed", "m", 1)
    async with replicas(redis, 3) as healths:
        healths[0].failed(target, DOWN)
        await until(lambda: all(not health.is_usable(target) for health in healths))
        await until(lambda: any(health.is_usable(target) for health in healths))
        let = [health for health in healths for _ in range(5) if health.begin(target)]
        await asyncio.sleep(0.3)
        let += [health for health in healths for _ in range(5) if health.begin(target)]
        assert len(let) == 1
        let[0].succeeded(target)
        await until(lambda: all(health.is_usable(target) for health in healths))
        assert all(health.state(target, "endpoint") is State.CLOSED for health in healths)


async def test_a_replica_without_requests_keeps_no_probe(redis: services.Redis) -> None:
    """The lease goes round until it is with one that has a request for that backend."""
    target = Target("idle", "m", 1)
    async with replicas(redis, 3) as healths:
        healths[0].failed(target, DOWN)
        await until(lambda: all(not health.is_usable(target) for health in healths))
        for health in healths[1:]:  # each in turn is the only one with requests
            await until(lambda health=health: health.begin(target))  # type: ignore[misc]
            health.gave_up(target)


async def test_a_failed_probe_keeps_all_away_for_longer(redis: services.Redis) -> None:
    """The time doubles for everybody, and a probe that was given up is another one's."""
    target = Target("again", "m", 1)
    async with replicas(redis, 2) as healths:
        healths[1].failed(target, DOWN)
        await until(lambda: all(not health.is_usable(target) for health in healths))
        await until(lambda: any(health.begin(target) for health in healths))
        (prober,) = [one for one in healths if one.tripped() and _is_probing(one)]
        prober.gave_up(target)
        await until(lambda: any(health.begin(target) for health in healths))
        (prober,) = [one for one in healths if _is_probing(one)]
        prober.failed(target, DOWN)
        await until(
            lambda: all(
                [health.tripped()[key].trips for key in health.tripped() if key[1] == "again"]
                == [2]
                for health in healths
            )
        )
        assert not any(health.is_usable(target) for health in healths)


def _is_probing(health: Health) -> bool:
    return any(circuit.probe_until_ns for circuit in health.tripped().values())


async def test_without_the_store_each_goes_by_itself(redis: services.Redis) -> None:
    """A circuit that opened stays open, its time runs, and the replica probes by itself; what it
    learned alone is told when the store is back."""
    target = Target("alone", "m", 1)
    async with replicas(redis, 2) as (one, two):
        redis.kill()
        try:
            await until(lambda: one.sharing is not None and one.sharing.may_probe(("limit",) * 4))  # type: ignore[arg-type]
            one.failed(target, DOWN)
            assert not one.is_usable(target)
            assert two.is_usable(target)
            await until(lambda: one.begin(target))
            one.failed(target, BackendUnavailable("down", backend="alone"))
        finally:
            redis.start()
        await until(lambda: two.state(target, "endpoint") is not State.CLOSED)
