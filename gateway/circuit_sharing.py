"""Circuits that all replicas share through Redis: what one has learned the others need not.

A task exchanges what changed and hears what all know, twice a second and at once when something
changes here; no request ever waits for it. A circuit that is half open is probed by the one replica
that holds its lease. Invariant: while the store is away each replica goes by its own circuits.
"""

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import hiredis

from gateway.health import Circuit, Health, Key
from gateway.limits.store import StoreGone
from gateway.limits.wire import Argument, Connection, connect

log = logging.getLogger(__name__)

SCRIPT: Final = (Path(__file__).parent / "circuits.lua").read_text()
CIRCUITS: Final = "ml:{health}:circuits"
PROBES: Final = "ml:{health}:probes"
EVERY_S: Final = 0.5
KEEP_S: Final = 900.0  # after its end: a circuit that nobody probes is forgotten
LONGEST_PAUSE_S: Final = 5.0


class CircuitSharing:
    """`run()` until cancelled. Counters: `exchanges`, `outages`."""

    def __init__(self, url: str, health: Health, *, node: str, every_s: float = EVERY_S) -> None:
        self.is_up = False
        self.exchanges = 0
        self.outages = 0
        self._url = url
        self._health = health
        self._node = node
        self._every_s = every_s
        self._lease_s = 3 * every_s  # renewed while the probe is under way
        self._changed: set[Key] = set()
        self._given_up: set[Key] = set()
        self._granted: dict[Key, float] = {}  # until when, of the loop's clock
        self._passed_on: dict[Key, float] = {}  # leases that we had no use for: another's turn
        self._now = asyncio.Event()
        health.sharing = self

    # -- health's side; see `health.Sharing` --

    def changed(self, key: Key) -> None:
        self._changed.add(key)
        self._granted.pop(key, None)
        self._now.set()

    def may_probe(self, key: Key) -> bool:
        if not self.is_up:
            return True
        return self._granted.get(key, 0.0) > asyncio.get_running_loop().time()

    def gave_up(self, key: Key) -> None:
        if key not in self._changed:
            self._given_up.add(key)
            self._granted.pop(key, None)
            self._now.set()

    # -- the loop --

    async def run(self) -> None:
        pause_s = self._every_s
        while True:
            try:
                connection = await connect(self._url, lost=self._lost)
            except StoreGone:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # jitter
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            pause_s = self._every_s
            try:
                await self._exchange_until_lost(connection)
            except (StoreGone, hiredis.ReplyError) as error:
                log.warning("circuits_not_shared", extra={"reason": type(error).__name__})
                await asyncio.sleep(self._every_s)
            finally:
                self._lost()
                connection.close()

    def _lost(self) -> None:
        if self.is_up:
            self.outages += 1
        self.is_up = False
        self._granted.clear()

    async def _exchange_until_lost(self, connection: Connection) -> None:
        self._changed |= self._health.tripped().keys()  # what was learned alone
        while True:
            await self.exchange(connection)
            try:
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()
            except TimeoutError:
                continue

    async def exchange(self, connection: Connection) -> None:
        """Tell what changed here, and hear what all know."""
        self._now.clear()
        changed, self._changed = self._changed, set()
        given_up, self._given_up = self._given_up, set()
        tripped = self._health.tripped()
        updates: list[Argument] = []
        for key in changed:
            circuit = tripped.get(key)
            left_s = 0.0 if circuit is None else self._health.remaining_s(circuit)
            updates += (_field(key), 0 if circuit is None else circuit.trips, round(left_s * 1000))
        for key in given_up - changed:
            updates += (_field(key), -1, 0)
        asked_at = asyncio.get_running_loop().time()
        wanted = self._wanted(tripped, asked_at)
        try:
            reply = await connection.call(
                "EVAL", SCRIPT, 2, CIRCUITS, PROBES,
                self._node, round(self._lease_s * 1000), round(KEEP_S * 1000), len(updates) // 3,
                *updates, *map(_field, wanted),
            )  # fmt: skip
        except BaseException:
            self._changed |= changed
            raise
        granted, *flat = reply
        known = {
            _key(flat[place]): (int(flat[place + 1]), int(flat[place + 2]) / 1000)
            for place in range(0, len(flat), 3)
        }
        for field in granted:
            self._granted[_key(field)] = asked_at + self._lease_s
        self.is_up = True
        self.exchanges += 1
        self._health.heard(self._unless_changed(known))

    def _wanted(self, tripped: Mapping[Key, Circuit], now: float) -> list[Key]:
        """The circuits that we would probe, or go on probing. A lease that ran out unused is not
        asked for again at once: there may be a replica that has requests for it."""
        for key in [key for key, until in self._granted.items() if until <= now]:
            del self._granted[key]
            self._passed_on[key] = now + self._lease_s
        self._passed_on = {key: until for key, until in self._passed_on.items() if until > now}
        return [
            key
            for key, circuit in tripped.items()
            if self._health.is_probing(circuit)
            or (
                self._health.remaining_s(circuit) <= self._every_s
                and key not in self._granted
                and key not in self._passed_on
            )
        ]

    def _unless_changed(
        self, known: Mapping[Key, tuple[int, float]]
    ) -> Mapping[Key, tuple[int, float]]:
        """What changed here while the answer was on its way is told first."""
        return {key: value for key, value in known.items() if key not in self._changed}


def _field(key: Key) -> str:
    return json.dumps(key)


def _key(field: bytes) -> Key:
    fault, backend, place, model = json.loads(field)
    return cast(Key, (fault, backend, place, model))
