"""Beside the requests: ask each server whether it is ready and how busy it is, and take up what
operators drained.

It reads the runtime in force and writes what it finds into `Health` and the servers. No request
waits for it. Invariants: of one server at most one probe is under way, so that one that hangs holds
up none but its own; a server is down after so many bad answers in a row and up after so many good
ones, and only servers that the config says to probe are ever down by it.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from backends.fleet import Member, Server
from backends.server_load import Loaded
from backends.settings import Probe
from gateway.drains import Drains
from gateway.errors import GatewayError
from gateway.health import Health
from gateway.runtime import RuntimeHolder

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
DRAINS_EVERY_S: Final = 1.0
JITTER: Final = 0.2  # of the interval, so that replicas do not all ask at once


class Standing(Struct, frozen=True):
    """What the last probes of a server said: good ones or bad ones in a row, never both."""

    good: int = 0
    bad: int = 0
    is_down: bool = False


def after_probe(standing: Standing, is_ready: bool, settings: Probe) -> Standing:
    """The standing once another probe was answered."""
    if is_ready:
        good = standing.good + 1
        return Standing(good, 0, standing.is_down and good < settings.successes)
    bad = standing.bad + 1
    return Standing(0, bad, standing.is_down or bad >= settings.failures)


class _Watched:
    """A server that is probed."""

    __slots__ = ("due", "running", "standing")

    def __init__(self) -> None:
        self.standing = Standing()
        self.due = 0.0
        self.running: asyncio.Task[None] | None = None


class Probes:
    """`run()` until cancelled. Counters: `probes`, `failed`."""

    def __init__(
        self,
        runtimes: RuntimeHolder,
        drains: Drains | None,
        *,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.probes = 0
        self.failed = 0
        self._runtimes = runtimes
        self._health: Health = runtimes.health
        self._drains = drains
        self._dice = dice
        self._watched: dict[tuple[str, Server], _Watched] = {}
        self._drains_due = 0.0

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                except Exception:  # the loop outlives what fails in it, and tries again
                    log.exception("probes_broke")
                await asyncio.sleep(TICK_S)
        finally:
            running = [one.running for one in self._watched.values() if one.running is not None]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def look(self) -> None:
        """Start what is due."""
        now = asyncio.get_running_loop().time()
        if self._drains is not None and now >= self._drains_due:
            self._drains_due = now + DRAINS_EVERY_S
            await self.take_up_drains()
        found: set[tuple[str, Server]] = set()
        runtime = self._runtimes.current
        for settings in runtime.config.backends:
            upstream = runtime.upstreams.get(settings.name)
            if settings.probe is None or upstream is None:
                continue
            for member in upstream.members:
                place = settings.name, member.server
                if place in found:  # asked with another of our keys already
                    continue
                found.add(place)
                self._start(place, member, settings.probe, now)
        for place in self._watched.keys() - found:
            self._health.release(place[0], place[1].name, "down")
            gone = self._watched.pop(place)
            if gone.running is not None:
                gone.running.cancel()

    def _start(
        self, place: tuple[str, Server], member: Member, settings: Probe, now: float
    ) -> None:
        watched = self._watched.get(place)
        if watched is None:
            watched = self._watched[place] = _Watched()
        if watched.running is not None or now < watched.due:
            return
        watched.due = now + settings.every_s * (1 + JITTER * (2 * self._dice() - 1))
        task = asyncio.get_running_loop().create_task(self._probe(place, watched, member, settings))
        watched.running = task
        task.add_done_callback(lambda _: setattr(watched, "running", None))

    async def _probe(
        self, place: tuple[str, Server], watched: _Watched, member: Member, settings: Probe
    ) -> None:
        server = member.server
        try:
            async with asyncio.timeout(settings.timeout_s):
                is_ready = await member.backend.is_ready()
                if is_ready and settings.load_path and isinstance(member.backend, Loaded):
                    server.reports(await member.backend.load(settings.load_path))
        except TimeoutError:
            is_ready = False
        except Exception:  # a probe that breaks says nothing good
            log.exception("probe_broke", extra={"backend": place[0]})
            is_ready = False
        self.probes += 1
        self.failed += not is_ready
        was_down = watched.standing.is_down
        watched.standing = after_probe(watched.standing, is_ready, settings)
        if watched.standing.is_down == was_down:
            return
        backend, name = place[0], server.name
        if was_down:
            self._health.release(backend, name, "down")
            server.warms_up_from(asyncio.get_running_loop().time())
        else:
            self._health.hold(backend, name, "down")
            server.reports(None)
        log.warning(
            "server_up" if was_down else "server_down", extra={"backend": backend, "server": name}
        )

    async def take_up_drains(self) -> None:
        """What the database says now. While it is away, what it said last holds."""
        assert self._drains is not None
        try:
            wanted = {(drain.backend, drain.endpoint) for drain in await self._drains.all()}
        except GatewayError:
            return
        before = self._health.holds("drained")
        now = asyncio.get_running_loop().time()
        for backend, endpoint in wanted - before:
            self._health.hold(backend, endpoint, "drained")
            log.warning("drained", extra={"backend": backend, "server": endpoint})
        for backend, endpoint in before - wanted:
            self._health.release(backend, endpoint, "drained")
            upstream = self._runtimes.current.upstreams.get(backend)
            for member in upstream.members if upstream is not None else ():
                if endpoint in ("", member.server.name):
                    member.server.warms_up_from(now)
            log.warning("resumed", extra={"backend": backend, "server": endpoint})
