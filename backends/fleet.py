"""The servers of one backend, and our keys there: one `Member` for each server with each key.

A fleet is a `Backend` of its own, so that whoever needs just one may ask it; who chooses asks for
its `members`. It follows discovery, knows what each server has in flight, and forgets one that is
gone when its last request has ended. It must not know routes, circuits or requests. Invariants: a
member is built once for its server and key; `version` grows with each change of `members`; a server
that discovery no longer names gets no new request and keeps those that run.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from backends.base import Backend, BackendUnavailable, Cancellable, ChatRequest, Event
from backends.discovery import Address, Source, spoken
from backends.egress import is_internal
from backends.server_load import Load

log = logging.getLogger(__name__)

RETIRE_EVERY_S: Final = 1.0  # how often a server that is gone is looked at
RETIRE_LOOKS: Final = 900  # then it is closed, whatever still runs on it
COLDEST: Final = 0.1  # of its due, which a server gets as it begins to warm up


class Server:
    """One address of a backend."""

    __slots__ = ("_asked", "in_flight", "is_gone", "load", "name", "warm_at", "warm_up_s")

    def __init__(self, name: str, *, warm_up_s: float = 0.0, warm_at: float = 0.0) -> None:
        self.name = name  # "": the only one of its backend
        self.in_flight = 0
        self.is_gone = False
        self.load: Load | None = None  # what it says itself, if it is asked
        self._asked = 0  # in flight when it said so
        self.warm_up_s = warm_up_s
        self.warm_at = warm_at  # of the loop's clock

    def reports(self, load: Load | None) -> None:
        """What it says now of how busy it is. None: nothing."""
        self.load, self._asked = load, self.in_flight

    @property
    def busy(self) -> float:
        """Requests on it: what it said, others' included, and what we sent since; or just ours.
        Those that wait count twice, and a full cache as one more."""
        if self.load is None:
            return self.in_flight
        said = self.load.requests + (self.load.waiting or 0) + (self.load.kv_used or 0.0)
        return max(said + self.in_flight - self._asked, self.in_flight)

    def warms_up_from(self, now: float) -> None:
        """It is new, or back: for a while it gets less than its due."""
        self.warm_at = now + self.warm_up_s

    def warmth(self, now: float) -> float:
        """The share of its due that it gets now (0, 1]."""
        left_s = self.warm_at - now
        if left_s <= 0 or self.warm_up_s <= 0:
            return 1.0
        return max(COLDEST, 1.0 - left_s / self.warm_up_s)


class Member(Struct, frozen=True):
    """A server, asked with one of our keys. `key` names it by its place: "1", "2"; "": only one."""

    backend: Backend
    server: Server
    key: str = ""


class Place(Struct, frozen=True):
    """Where a server is: the URL it is asked by, and the address if discovery found it."""

    name: str
    base_url: str
    address: Address | None = None


# the backends of one server, one for each key
BuildMembers = Callable[[Place], Sequence[Backend]]


def places_of(urls: Sequence[str]) -> Sequence[Place]:
    """Written URLs as servers, each named by its host and port, or by more if that is taken."""
    hosts = [urlsplit(url).netloc or url for url in urls]
    return [
        Place(host if hosts.count(host) == 1 else url.partition("://")[2], url)
        for host, url in zip(hosts, urls, strict=True)
    ]


class Fleet:
    """`start()` in a running loop, where something is to be followed; `aclose()` at the end."""

    def __init__(
        self,
        name: str,
        provider: str,
        build: BuildMembers,
        *,
        places: Sequence[Place] = (),
        source: Source | None = None,
        base_url: str = "",
        allow_private: bool = False,
        warm_up_s: float = 0.0,
    ) -> None:
        self.name = name
        self.provider = provider
        self.members: tuple[Member, ...] = ()
        self.version = 0
        self.refused = 0  # addresses that discovery found and egress does not allow
        self._build = build
        self._source = source
        self._base_url = base_url
        self._allow_private = allow_private
        self._warm_up_s = warm_up_s
        self._by_place: dict[Place, tuple[Member, ...]] = {}
        self._retiring: dict[asyncio.Task[None], tuple[Member, ...]] = {}
        self._following: asyncio.Task[None] | None = None
        self._set(places, is_first=True)

    @property
    def source(self) -> Source | None:
        return self._source

    @property
    def servers(self) -> Sequence[Server]:
        return list(dict.fromkeys(member.server for member in self.members))

    def start(self) -> None:
        """Follow discovery from now on."""
        if self._source is not None and self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._source))

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                await source.run(self.found)
            except Exception:  # the loop outlives what fails in it, and tries again
                log.exception("discovery_broke", extra={"backend": self.name})
            await asyncio.sleep(RETIRE_EVERY_S)

    def found(self, addresses: Sequence[Address]) -> None:
        """What discovery says now. An address that may not be reached is none."""
        allowed = [
            address for address in addresses if self._allow_private or not is_internal(address[0])
        ]
        if len(allowed) < len(addresses):
            self.refused += len(addresses) - len(allowed)
            log.warning("discovered_address_refused", extra={"backend": self.name})
        self._set(
            [Place(spoken(address), self._base_url, address) for address in allowed],
            is_first=not self._by_place,
        )

    def _set(self, places: Sequence[Place], *, is_first: bool) -> None:
        wanted = dict.fromkeys(places)
        gone = [place for place in self._by_place if place not in wanted]
        new = [place for place in wanted if place not in self._by_place]
        if not gone and not new:
            return
        for place in gone:
            self._retire(self._by_place.pop(place))
        for place in new:
            server = Server(place.name, warm_up_s=self._warm_up_s)
            if not is_first:
                server.warms_up_from(asyncio.get_running_loop().time())
            backends = self._build(place)
            self._by_place[place] = tuple(
                Member(backend, server, "" if len(backends) == 1 else str(number))
                for number, backend in enumerate(backends, 1)
            )
        self.members = tuple(member for place in wanted for member in self._by_place[place])
        self.version += 1

    def _retire(self, members: tuple[Member, ...]) -> None:
        """Close a server's connections once nothing runs on it."""
        server = members[0].server
        server.is_gone = True
        loop = asyncio.get_running_loop()

        async def later() -> None:
            for _ in range(RETIRE_LOOKS):
                if not server.in_flight:
                    break
                await asyncio.sleep(RETIRE_EVERY_S)
            await _close(members)

        task = loop.create_task(later())
        self._retiring[task] = members
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    # -- as a backend --

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        """Ask the member with the least in flight."""
        if not self.members:
            raise BackendUnavailable("it has no server now", backend=self.name)
        member = min(self.members, key=lambda one: one.server.in_flight)
        member.server.in_flight += 1
        try:
            async for event in member.backend.chat(request):
                yield event
        finally:
            member.server.in_flight -= 1

    async def is_ready(self) -> bool:
        """Whether any of them is."""
        return any(await asyncio.gather(*(one.backend.is_ready() for one in self.members)))

    async def cancel(self, request_id: str, /) -> bool:
        """Whether one of those that can be asked to stop knew the request."""
        asked: list[Awaitable[bool]] = [
            member.backend.cancel(request_id)
            for member in self.members
            if member.server.in_flight and isinstance(member.backend, Cancellable)
        ]
        return any(await asyncio.gather(*asked)) if asked else False

    async def aclose(self) -> None:
        tasks = [*self._retiring]
        if self._following is not None:
            tasks.append(self._following)
            self._following = None
        left = [*self._retiring.values(), *self._by_place.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for members in left:
            await _close(members)


async def _close(members: Sequence[Member]) -> None:
    for member in members:
        await member.backend.aclose()
