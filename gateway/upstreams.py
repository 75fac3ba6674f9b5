"""A backend as the runtime knows it: its timeouts, and the places that a target of a route stands
for, one for each server and key. It chooses among them and knows nothing of requests or retries.
Invariant: a backend with one server and one key is one place, which is the target itself."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from backends.base import Backend, Timeouts
from backends.fleet import Fleet, Member, Server
from backends.settings import Dialect
from gateway.health import Fault, Health
from gateway.routing import Candidate, Target, least_loaded

MAX_KNOWN: Final = 1_000  # targets whose places are remembered


class Place(Struct, frozen=True, gc=False):
    """A server and key, as a target that health can speak of."""

    target: Target
    member: Member

    def shares(self, fault: Fault, other: "Place") -> bool:
        """Whether what failed there would fail here too."""
        if fault == "endpoint":
            return self.target.endpoint == other.target.endpoint
        if fault == "credential" or self.target.key:
            return self.target.key == other.target.key
        return self.target.endpoint == other.target.endpoint


class Upstream:
    """`backend` is the whole of it, and its only server where it has just one."""

    def __init__(
        self, backend: Backend, timeouts: Timeouts, dialect: Dialect | None = None
    ) -> None:
        self.backend = backend
        self.timeouts = timeouts
        self.dialect = dialect or Dialect()
        self._fleet = backend if isinstance(backend, Fleet) else None
        self._alone = Member(backend, Server(""))
        self._version = 0
        self._known: dict[Target, Sequence[Place]] = {}

    @property
    def members(self) -> Sequence[Member]:
        return (self._alone,) if self._fleet is None else self._fleet.members

    def places(self, target: Target) -> Sequence[Place]:
        """Where a target's requests can go now."""
        fleet = self._fleet
        if fleet is not None and fleet.version != self._version:
            self._version = fleet.version
            self._known.clear()
        places = self._known.get(target)
        if places is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            places = self._known[target] = [
                Place(_at(target, member), member) for member in self.members
            ]
        return places

    def choose(
        self, target: Target, health: Health, failed: Sequence[tuple[Place, Fault]], dice: float
    ) -> Place | None:
        """The one to ask now, which health lets through (`Health.begin`): with the least to do, and
        none that shares what has failed already. None: there is none."""
        places = self.places(target)
        if len(places) == 1:
            place = places[0]
            return place if not failed and health.begin(place.target) else None
        usable = [
            place
            for place in places
            if health.is_usable(place.target)
            and not any(place.shares(fault, other) for other, fault in failed)
        ]
        if not usable:
            return None
        now = asyncio.get_running_loop().time()
        place = usable[least_loaded([_candidate(one.member.server, now) for one in usable], dice)]
        return place if health.begin(place.target) else None

    def is_usable(self, target: Target, health: Health) -> bool:
        """Whether `choose` would find one."""
        return any(health.is_usable(place.target) for place in self.places(target))


def _candidate(server: Server, now: float) -> Candidate:
    return Candidate(server.busy, server.warmth(now))


def _at(target: Target, member: Member) -> Target:
    if not member.server.name and not member.key:
        return target
    return msgspec.structs.replace(target, endpoint=member.server.name, key=member.key)
