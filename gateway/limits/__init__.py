"""Admission: limits, budgets and the counters behind them."""

from gateway.limits.admission import Limits
from gateway.limits.follow import SpendSource
from gateway.limits.growth import Growth
from gateway.limits.redis_store import RedisStore
from gateway.limits.slices import Slices
from gateway.limits.store import MemoryStore, Store, StoreGone

__all__ = [
    "Growth",
    "Limits",
    "MemoryStore",
    "RedisStore",
    "Slices",
    "SpendSource",
    "Store",
    "StoreGone",
]
