"""What each tenant pays of owned hardware, idle time included. Pure, and exact to the last unit.

For each engine and hour:

    used (by tenant and phase) + overhead + idle = capacity        in integer microseconds
    the cost of the hour = rate x devices x capacity                in integer nano-dollars
    the shares of used, overhead and idle = the cost of the hour    by largest remainder

Used is what the engine charged to requests. A request counts where it began; what of it exceeds the
steps of that hour ran in the next one and is carried there, within the month. Overhead is loading,
warming up, and steps that no request of ours paid for. What overhead and idle cost goes to whom the
policy names; if it names nobody, the platform keeps it: cost never vanishes. Rounding happens in
one place: an engine's hour is rounded half up to a nano-dollar.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Literal, get_args

from msgspec import Struct

from telemetry.capacity.heartbeat import LeaseHour
from telemetry.money import split

IdlePolicy = Literal["keep", "proportional-used", "proportional-entitlement", "peak-share", "even"]
POLICIES: tuple[IdlePolicy, ...] = get_args(IdlePolicy)
PLATFORM = "(platform)"  # the tenant that keeps what nobody else pays; no id looks like it
Bucket = Literal["used", "overhead", "idle"]

NANO = 10**9
_HOUR_US = 3_600 * 10**6


class Payer(Struct, frozen=True, order=True):
    """Whose device time it was, and for what."""

    tenant_id: str
    key_id: str = ""
    asked_model: str = ""
    provider: str = ""
    model: str = ""


class Used(Struct, frozen=True, kw_only=True):
    """Device time that was charged to requests which began in one hour."""

    backend: str
    hour: datetime
    payer: Payer
    phase: str  # prefill | decode | sampling | recompute | spec_rejected
    us: int


class Share(Struct, frozen=True, kw_only=True):
    """A part of one engine's hour, in time and in money."""

    backend: str
    hour: datetime
    bucket: Bucket
    payer: Payer
    phase: str  # of used time; else empty
    us: int
    nano: int

    @property
    def amount(self) -> Decimal:
        return Decimal(self.nano).scaleb(-9)


class EngineHour(Struct, frozen=True, kw_only=True):
    """One engine's hour, added up. used + overhead + idle = capacity."""

    backend: str
    hour: datetime
    capacity_us: int
    used_us: int
    overhead_us: int
    idle_us: int
    nano: int


class Allocation(Struct, frozen=True, kw_only=True):
    """A month of owned hardware, or of it so far."""

    policy: IdlePolicy
    hours: tuple[EngineHour, ...]
    shares: tuple[Share, ...]


def allocate(
    leases: Sequence[LeaseHour],
    used: Iterable[Used],
    *,
    policy: IdlePolicy,
    entitlements: Mapping[str, int] | None = None,
) -> Allocation:
    """Split the hours of one month. `entitlements`: tenant → weight, for the policy of that name.
    Used time of an engine that reported no hours is left out: it is priced as it was settled."""
    by_hour: dict[str, dict[datetime, list[LeaseHour]]] = defaultdict(dict)
    for lease in leases:
        by_hour[lease.backend].setdefault(lease.hour, []).append(lease)
    by_backend: dict[str, list[Used]] = defaultdict(list)
    for item in used:
        by_backend[item.backend].append(item)
    hours: list[EngineHour] = []
    shares: list[Share] = []
    for backend in sorted(by_hour):
        mine = _placed(by_hour[backend], by_backend[backend])
        weigh = _Weigher(policy, mine, entitlements or {})
        for hour in sorted(by_hour[backend]):
            facts, parts = _hour(backend, hour, by_hour[backend][hour], mine[hour], weigh)
            hours.append(facts)
            shares += parts
    return Allocation(policy=policy, hours=tuple(hours), shares=tuple(shares))


def cost_nano(leases: Iterable[LeaseHour]) -> int:
    """What the hardware of an hour costs, each lease rounded half up to a nano-dollar."""
    total = 0
    for lease in leases:
        rate = int(lease.rate_per_hour.scaleb(9))  # a rate has nine decimals: exact
        total += (rate * lease.devices * lease.times.wall_us + _HOUR_US // 2) // _HOUR_US
    return total


UsedKey = tuple[Payer, str]


def _placed(
    hours: Mapping[datetime, Sequence[LeaseHour]], used: Iterable[Used]
) -> dict[datetime, dict[UsedKey, int]]:
    """Microseconds by payer and phase in each hour of the engine, never more than its steps.

    What does not fit is carried into the next hour of the month; what is left in the end is not
    charged here. Hours without a lease are left out: they are priced as they were settled."""
    waiting: dict[datetime, dict[UsedKey, int]] = {}
    for item in used:
        if item.hour not in hours:
            continue
        found = waiting.setdefault(item.hour, {})
        key = (item.payer, item.phase)
        found[key] = found.get(key, 0) + item.us
    placed: dict[datetime, dict[UsedKey, int]] = {}
    carried: dict[UsedKey, int] = {}
    for hour in sorted(hours):
        for key, us in waiting.get(hour, {}).items():
            carried[key] = carried.get(key, 0) + us
        # Corrections can take back more than there is: an hour is never used by less than nothing.
        carried = {key: us for key, us in carried.items() if us > 0}
        room = sum(lease.times.step_us for lease in hours[hour])
        keys = sorted(carried)
        total = sum(carried.values())
        parts = (
            [carried[key] for key in keys]
            if total <= room
            else split(room, [carried[key] for key in keys])
        )
        placed[hour] = {key: us for key, us in zip(keys, parts, strict=True) if us}
        carried = {
            key: carried[key] - us for key, us in zip(keys, parts, strict=True) if carried[key] > us
        }
    return placed


class _Weigher:
    """Who shares the idle time of an hour, by weight, over a month of one engine."""

    def __init__(
        self,
        policy: IdlePolicy,
        placed: Mapping[datetime, Mapping[UsedKey, int]],
        entitlements: Mapping[str, int],
    ) -> None:
        self._policy = policy
        self._entitlements = entitlements
        by_hour = {hour: _by_payer(found) for hour, found in placed.items()}
        self._payers = sorted({payer for found in by_hour.values() for payer in found})
        busiest = max(by_hour, key=lambda hour: (sum(by_hour[hour].values()), hour), default=None)
        self._peak = {} if busiest is None else by_hour[busiest]

    def weights(self, used: Mapping[UsedKey, int]) -> dict[Payer, int]:
        """By payer; empty if nobody is to pay."""
        match self._policy:
            case "keep":
                return {}
            case "proportional-used":
                return _by_payer(used)
            case "proportional-entitlement":
                return {
                    Payer(tenant): weight
                    for tenant, weight in sorted(self._entitlements.items())
                    if weight > 0
                }
            case "peak-share":
                return dict(self._peak)
            case "even":
                return {Payer(tenant): 1 for tenant in sorted({p.tenant_id for p in self._payers})}


def _by_payer(used: Mapping[UsedKey, int]) -> dict[Payer, int]:
    found: dict[Payer, int] = {}
    for (payer, _), us in used.items():
        found[payer] = found.get(payer, 0) + us
    return dict(sorted(found.items()))


def _hour(
    backend: str,
    hour: datetime,
    leases: Sequence[LeaseHour],
    used: Mapping[UsedKey, int],
    weigh: _Weigher,
) -> tuple[EngineHour, list[Share]]:
    capacity = sum(lease.times.wall_us for lease in leases)
    idle = sum(lease.times.idle_us for lease in leases)
    used_us = sum(used.values())
    overhead = capacity - idle - used_us
    nano = cost_nano(leases)
    keys = sorted(used)
    parts = split(nano, [*(used[key] for key in keys), overhead, idle])
    shares = [
        Share(
            backend=backend,
            hour=hour,
            bucket="used",
            payer=key[0],
            phase=key[1],
            us=used[key],
            nano=part,
        )
        for key, part in zip(keys, parts, strict=False)
    ]
    weights = weigh.weights(used)
    shared: tuple[tuple[Bucket, int, int], ...] = (
        ("overhead", overhead, parts[-2]),
        ("idle", idle, parts[-1]),
    )
    for bucket, us, part in shared:
        shares += _shared(backend, hour, bucket, us, part, weights)
    facts = EngineHour(
        backend=backend,
        hour=hour,
        capacity_us=capacity,
        used_us=used_us,
        overhead_us=overhead,
        idle_us=idle,
        nano=nano,
    )
    return facts, shares


def _shared(
    backend: str,
    hour: datetime,
    bucket: Bucket,
    us: int,
    nano: int,
    weights: Mapping[Payer, int],
) -> list[Share]:
    if not us and not nano:
        return []
    payers = dict(weights) or {Payer(PLATFORM): 1}
    return [
        Share(
            backend=backend,
            hour=hour,
            bucket=bucket,
            payer=payer,
            phase="",
            us=time,
            nano=part,
        )
        for payer, time, part in zip(
            payers,
            split(us, list(payers.values())),
            split(nano, list(payers.values())),
            strict=True,
        )
        if part or time
    ]


__all__ = [
    "NANO",
    "PLATFORM",
    "POLICIES",
    "Allocation",
    "EngineHour",
    "IdlePolicy",
    "Payer",
    "Share",
    "Used",
    "allocate",
    "cost_nano",
]
