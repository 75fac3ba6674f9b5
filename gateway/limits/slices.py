"""What one replica may spend of each limit while the shared counters are away.

A replica's slice is floor(limit x offline_share / replicas), counted here with the same arithmetic.
The slices of all replicas together are at most limit x offline_share, which is the bound of
docs/reference/bounds.md. A replica that nobody has counted yet has no slice. What was spent in one
outage still counts in the next, so that a store that comes and goes gives nothing away.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec.structs import replace

from gateway.limits.arithmetic import MINUTE_US, MOST, Demand, Kind, Spent, Verdict
from gateway.limits.store import MemoryStore

MAX_KNOWN = 100_000


class Slices:
    """`saw` what the store last said was left of a budget: nobody spends more than that of it."""

    def __init__(self, store: MemoryStore, share: float) -> None:
        self._store = store
        self._share = share
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()

    def saw(self, tenant: str, demand: Demand, left: int) -> None:
        self._left[tenant, demand.key] = left
        if len(self._left) > MAX_KNOWN:
            self._left.popitem(last=False)

    def admit(
        self,
        tenant: str,
        hold_id: str,
        lease_us: int,
        demands: Sequence[Demand],
        replicas: int | None,
    ) -> Verdict:
        now_us = self._store.now_us()
        parts = [self._slice(tenant, demand, replicas) for demand in demands]
        for part in parts:
            if part.kind is Kind.BUDGET:
                self._store.begin(
                    tenant,
                    Spent(
                        key=part.key,
                        period_us=part.period_us,
                        window_us=part.window_us,
                        before=0,
                        cut=now_us // MINUTE_US,
                        slots={},
                    ),
                )
        return self._store.try_admit(tenant, hold_id, lease_us, parts)

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None:
        self._store.settle(tenant, hold_id, actual, ended_us)

    def renew(self, tenant: str, hold_id: str, lease_us: int) -> None:
        self._store.try_renew(tenant, hold_id, lease_us)

    def _slice(self, tenant: str, demand: Demand, replicas: int | None) -> Demand:
        if demand.limit >= MOST:  # soft: never refuses
            return demand
        share = 0 if replicas is None else int(demand.limit * self._share) // replicas
        if demand.kind is Kind.BUDGET:
            left = self._left.get((tenant, demand.key))
            if left is not None and replicas is not None:
                share = min(share, left // replicas)
        return replace(demand, limit=share)


__all__ = ["Slices"]
