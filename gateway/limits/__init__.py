"""Admission: limits, budgets and the counters behind them."""

from gateway.limits.admission import Limits, SpendSource
from gateway.limits.counters import CounterClient, CounterServer
from gateway.limits.redis_store import RedisStore
from gateway.limits.slices import Slices
from gateway.limits.store import MemoryStore, Store, StoreGone

__all__ = [
    "CounterClient",
    "CounterServer",
    "Limits",
    "MemoryStore",
    "RedisStore",
    "Slices",
    "SpendSource",
    "Store",
    "StoreGone",
]
