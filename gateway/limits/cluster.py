"""The counters on a Redis Cluster: each tree of tenants on the primary that has its hash slot.

A `RedisStore` per primary, so outages are those of a part of the tenants. Must not know the steps.
Invariants: every settlement reaches the primary that has its slot by then, also when the slot has
moved since; the map is read anew by one task, when something went wrong and now and then.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final, Self

from redis.crc import key_slot

from gateway.limits.arithmetic import BudgetState, Demand, Spent, Verdict
from gateway.limits.redis_store import RedisStore
from gateway.limits.store import StoreGone
from gateway.limits.topology import Address, Place, slots_of

log = logging.getLogger(__name__)

LOOK_S: Final = 15.0  # between two looks at the map while nothing is wrong
SOON_S: Final = 0.3  # between two looks while something is


class ClusterStore:
    """Use as an async context manager, as `RedisStore`."""

    def __init__(
        self,
        place: Place,
        *,
        node: str,
        budget_s: float = 0.05,
        heartbeat_s: float = 5.0,
        on_recovered: Callable[[], None] | None = None,
    ) -> None:
        self.on_recovered = on_recovered
        self._place = place
        self._node = node
        self._budget_s = budget_s
        self._heartbeat_s = heartbeat_s
        self._shards: dict[Address, RedisStore] = {}
        self._of_slot: Sequence[Address | None] = ()
        self._trouble = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._replaced_outages = self._replaced_dropped = 0

    async def __aenter__(self) -> Self:
        with contextlib.suppress(StoreGone):
            await self._look()
        self._task = asyncio.create_task(self._keep(), name="limits-cluster")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        for shard in self._shards.values():
            await shard.__aexit__()

    @property
    def is_up(self) -> bool:
        """Every part of it."""
        return bool(self._shards) and all(shard.is_up for shard in self._shards.values())

    @property
    def outages(self) -> int:
        return self._replaced_outages + sum(shard.outages for shard in self._shards.values())

    @property
    def dropped(self) -> int:
        return self._replaced_dropped + sum(shard.dropped for shard in self._shards.values())

    @property
    def backlog(self) -> int:
        return sum(shard.backlog for shard in self._shards.values())

    @property
    def replicas(self) -> int | None:
        """Of us. None, while one part has not counted all."""
        counts = [shard.replicas for shard in self._shards.values()]
        known = [count for count in counts if count is not None]
        return max(known) if known and len(known) == len(counts) else None

    # -- steps

    async def admit(
        self,
        tenant: str,
        hold_id: str,
        lease_us: int,
        demands: Sequence[Demand],
        *,
        within_s: float | None = None,
    ) -> Verdict:
        shard = self._shard(tenant)
        return await shard.admit(tenant, hold_id, lease_us, demands, within_s=within_s)

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None:
        address = self._address(tenant)
        shard = next(iter(self._shards.values())) if address is None else self._shards[address]
        shard.settle(tenant, hold_id, actual, ended_us)  # kept there until it can be told

    async def extend(self, tenant: str, hold_id: str, more: Sequence[int]) -> bool | None:
        return await self._shard(tenant).extend(tenant, hold_id, more)

    async def renew(self, tenant: str, hold_ids: Sequence[str], lease_us: int) -> None:
        await self._shard(tenant).renew(tenant, hold_ids, lease_us)

    async def rebase(self, tenant: str, spent: Spent) -> None:
        await self._shard(tenant).rebase(tenant, spent)

    async def budget(self, tenant: str, key: str) -> BudgetState | None:
        return await self._shard(tenant).budget(tenant, key)

    async def holds(self, tenant: str) -> int:
        return await self._shard(tenant).holds(tenant)

    def _address(self, tenant: str) -> Address | None:
        address = self._of_slot[slot_of(tenant)] if self._of_slot else None
        return address if address in self._shards else None

    def _shard(self, tenant: str) -> RedisStore:
        address = self._address(tenant)
        if address is None:
            raise StoreGone
        return self._shards[address]

    # -- the map

    async def _look(self) -> None:
        """Read the map and follow it. Raises StoreGone."""
        of_slot = await slots_of(self._place)
        slots: dict[Address, list[int]] = {}
        for slot, address in enumerate(of_slot):
            if address is not None:
                slots.setdefault(address, []).append(slot)
        gone = [address for address in self._shards if address not in slots]
        for address, held in slots.items():
            key = replicas_key(frozenset(held))
            if address in self._shards:
                self._shards[address].replicas_key = key
                continue
            shard = RedisStore(
                self._place.url_of(address),
                node=self._node,
                budget_s=self._budget_s,
                heartbeat_s=self._heartbeat_s,
                on_recovered=self._recovered,
                on_trouble=self._trouble.set,
                replicas_key=key,
            )
            self._shards[address] = await shard.__aenter__()
        self._of_slot = of_slot
        for address in gone:
            await self._replace(self._shards.pop(address))
        if gone:
            self._recovered()

    async def _replace(self, shard: RedisStore) -> None:
        """What it could not tell its server is told to whoever has the slot now."""
        log.warning("limit store moved")
        self._replaced_outages += shard.outages
        self._replaced_dropped += shard.dropped
        await shard.__aexit__()
        for (tenant, hold_id), command in shard.take_backlog():
            address = self._address(tenant)
            if address is not None:
                self._shards[address].send((tenant, hold_id), command)

    def _recovered(self) -> None:
        if self.on_recovered is not None:
            self.on_recovered()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._trouble.wait()
            self._trouble.clear()
            try:
                await self._look()
            except StoreGone:
                self._trouble.set()
            except Exception:  # the loop outlives its bugs; requests go on within slices
                log.exception("limit store: reading the cluster's map failed")
                self._trouble.set()
            if not self.is_up:
                self._trouble.set()
                await asyncio.sleep(SOON_S)


@functools.lru_cache(maxsize=100_000)
def slot_of(tenant: str) -> int:
    return int(key_slot(tenant.encode()))


def replicas_key(slots: frozenset[int]) -> str:
    """A key in one of these slots, for counting the replicas there."""
    number = 0
    while slot_of(f"r{number}") not in slots:
        number += 1
    return f"ml:{{r{number}}}:replicas"
