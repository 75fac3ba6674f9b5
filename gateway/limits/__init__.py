"""Admission: limits, budgets and the counters behind them."""

from gateway.limits.admission import Limits
from gateway.limits.cluster import ClusterStore
from gateway.limits.counters import CounterClient, CounterServer
from gateway.limits.follow import SpendSource
from gateway.limits.growth import Growth
from gateway.limits.redis_store import RedisStore
from gateway.limits.slices import Slices
from gateway.limits.store import MemoryStore, Store, StoreGone
from gateway.limits.topology import CLUSTER, place_of


def shared_store(
    url: str, *, node: str, budget_s: float, heartbeat_s: float = 5.0
) -> RedisStore | ClusterStore:
    """The counters that all replicas share, wherever the URL says that they are."""
    place = place_of(url)
    if place.scheme == CLUSTER:
        return ClusterStore(place, node=node, budget_s=budget_s, heartbeat_s=heartbeat_s)
    return RedisStore(url, node=node, budget_s=budget_s, heartbeat_s=heartbeat_s)


__all__ = [
    "ClusterStore",
    "CounterClient",
    "CounterServer",
    "Growth",
    "Limits",
    "MemoryStore",
    "RedisStore",
    "Slices",
    "SpendSource",
    "Store",
    "StoreGone",
    "shared_store",
]
