"""Ask each engine that is ours for its step clock, and book what passed.

It runs beside the requests and never in their way: an engine that does not answer, or a database
that is away, costs freshness only, since the clock goes on and the next reading holds everything.
"""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from backends.base import Clocked
from backends.settings import Gpu
from gateway.config import Config
from gateway.runtime import RuntimeHolder
from telemetry.capacity import store
from telemetry.capacity.heartbeat import Heartbeat
from telemetry.clock import Clock
from telemetry.money import PRICE_SCALE

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class Heartbeats:
    """`run()` until cancelled; `beat()` once. Plain counters: `booked`, `missed`."""

    def __init__(self, runtimes: RuntimeHolder, engine: AsyncEngine, clock: Clock) -> None:
        self.booked = 0
        self.missed = 0
        self._runtimes = runtimes
        self._engine = engine
        self._clock = clock

    async def run(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(EVERY_S)

    async def beat(self) -> None:
        """One reading of every engine with a price."""
        runtime = self._runtimes.current
        for name, gpu in owned(runtime.config).items():
            upstream = runtime.upstreams.get(name)
            if upstream is None or not isinstance(upstream.backend, Clocked):
                continue
            times = await upstream.backend.step_times()
            if times is None:
                self.missed += 1
                continue
            heartbeat = Heartbeat(
                backend=name,
                at=datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC),
                times=times,
                rate_per_hour=gpu.rate_per_hour.quantize(PRICE_SCALE),
                devices=gpu.count,
            )
            try:
                await store.book(self._engine, heartbeat)
                self.booked += 1
            except (SQLAlchemyError, OSError) as error:
                self.missed += 1
                reason = type(error).__name__
                log.warning("heartbeat_not_booked", extra={"backend": name, "reason": reason})


def owned(config: Config) -> dict[str, Gpu]:
    """Backends and engines whose hardware is ours, by name."""
    bought = {b.name: b.gpu for b in config.backends if b.gpu is not None}
    return bought | {engine.name: engine.gpu for engine in config.engines}
