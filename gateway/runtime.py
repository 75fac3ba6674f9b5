"""The running form of a Config: secrets resolved, backends connected, routes compiled.

A request takes one Runtime at its start and uses it to its end, so a reload changes nothing under
its feet. Building either succeeds whole or leaves the old one serving and says why.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path

from backends.base import Backend, Timeouts
from backends.registry import dialect
from backends.settings import BackendSettings, Dialect
from gateway.auth import Caller
from gateway.config import COLD, Config, ConfigInvalid, load, resolve
from gateway.dispatch import Upstream
from gateway.errors import ModelUnknown
from gateway.health import Health
from gateway.routing import Route, Target
from telemetry.clock import Clock

log = logging.getLogger(__name__)

BuildBackend = Callable[[BackendSettings, str | None], Backend]


class Runtime:
    """One config in force. Immutable; `upstreams` of supervised engines are shared by all."""

    def __init__(
        self,
        config: Config,
        upstreams: Mapping[str, Upstream],
        routes: Mapping[str, Route],
        salt_key: bytes,
        created: int,
    ) -> None:
        self.config = config
        self.created = created  # Unix seconds: `created` of the model list
        self.upstreams = upstreams
        self.routes = routes
        self.salt = lru_cache(maxsize=10_000)(
            lambda tenant: hmac.new(salt_key, (tenant or "").encode(), hashlib.sha256).hexdigest()
        )

    def route(self, model: str, caller: Caller) -> Route:
        """The route of a model that this caller may use. A model that is not theirs looks exactly
        like one that does not exist."""
        route = self.routes.get(model)
        if route is None or not caller.may_use(model):
            shown = model if len(model) <= 100 else f"{model[:100]}…"
            raise ModelUnknown(
                f"The model '{shown}' does not exist or you do not have access to it. "
                "GET /v1/models lists what you can use.",
                param="model",
            )
        return route

    def models(self, caller: Caller) -> list[str]:
        return [model for model in self.routes if caller.may_use(model)]


def routes_of(config: Config) -> dict[str, Route]:
    """What each route's targets cannot do: what the config says, and what their backends lack."""
    dialects = {settings.name: dialect(settings) for settings in config.backends}
    return {
        route.model: Route(
            route.model,
            tuple(
                Target(
                    target.backend,
                    target.model or route.model,
                    target.weight,
                    frozenset(target.lacks) | _lacks(dialects.get(target.backend, Dialect())),
                )
                for target in route.targets
            ),
            route.attempts,
        )
        for route in config.routes
    }


def _lacks(dialect: Dialect) -> frozenset[str]:
    """What a backend's API has no words for, whatever its model can do."""
    lacks = {name for name in ("embeddings", "completions") if name not in dialect.speaks}
    if not dialect.speaks & {"chat", "responses"}:
        lacks |= {"n", "logprobs", "json_object"}
    return frozenset(lacks)


class RuntimeHolder:
    """`current` is the runtime in force; `reload` swaps it."""

    def __init__(
        self,
        config: Config,
        *,
        engines: Mapping[str, Backend],
        build: BuildBackend,
        environment: Mapping[str, str],
        salt_key: bytes,
        clock: Clock,
        health: Health | None = None,
    ) -> None:
        self.health = health or Health(clock, config.health)
        self._clock = clock
        self._engines = engines
        self._build = build
        self._environment = environment
        self._salt_key = salt_key
        self._built: dict[str, tuple[BackendSettings, str | None, Backend]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self.reloads = 0
        self.reload_failures = 0
        self.current = self._runtime(config)

    def _runtime(self, config: Config) -> Runtime:
        """Build every backend anew or take over the one whose settings did not change."""
        problems: list[str] = []
        built: dict[str, tuple[BackendSettings, str | None, Backend]] = {}
        for index, settings in enumerate(config.backends):
            try:
                key = resolve(settings.api_key, self._environment) if settings.api_key else None
            except ConfigInvalid as error:
                problems += [f"backends[{index}].api_key: {line}" for line in error.problems]
                continue
            old = self._built.get(settings.name)
            if old is not None and old[:2] == (settings, key):
                built[settings.name] = old
                continue
            try:
                built[settings.name] = (settings, key, self._build(settings, key))
            except ValueError as error:
                problems.append(f"backends[{index}]: {error}")
        if problems:
            raise ConfigInvalid(problems)
        dropped = [
            backend
            for name, (_, _, backend) in self._built.items()
            if name not in built or built[name][2] is not backend
        ]
        upstreams = {
            name: Upstream(backend, settings.timeouts, dialect(settings))
            for name, (settings, _, backend) in built.items()
        }
        upstreams |= {name: Upstream(engine, Timeouts()) for name, engine in self._engines.items()}
        for name in self._built:
            if name not in built or built[name] is not self._built[name]:
                self.health.forget(name)
        self.health.settings = config.health
        self._built = built
        for backend in dropped:
            self._retire(backend, config.server.request_timeout_s)
        return Runtime(
            config, upstreams, routes_of(config), self._salt_key, self._clock.now_ns() // 10**9
        )

    def _retire(self, backend: Backend, grace_s: float) -> None:
        """Close a backend once no request that began with it can still be running."""

        async def later() -> None:
            try:
                await asyncio.sleep(grace_s)
            finally:  # at shutdown, at once
                await backend.aclose()

        task = asyncio.get_running_loop().create_task(later())
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    def reload(self, config: Config) -> None:
        """Swap, or raise ConfigInvalid and keep what is in force."""
        old = self.current.config
        cold = [table for table in COLD if getattr(old, table) != getattr(config, table)]
        if cold:
            raise ConfigInvalid([f"{table}: a change here needs a restart" for table in cold])
        self.current = self._runtime(config)

    async def aclose(self) -> None:
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        for _, _, backend in self._built.values():
            await backend.aclose()


class ConfigWatcher:
    """Reloads when the file changes or on `now` (SIGHUP). A bad file changes nothing."""

    def __init__(
        self,
        path: Path,
        holder: RuntimeHolder,
        *,
        adapt: Callable[[Config], Config] = lambda written: written,
        after: Callable[[Config], Awaitable[None]] | None = None,
        every_s: float = 1.0,
    ) -> None:
        """`adapt` makes what the file says what is meant, e.g. by options of the command line;
        `after` runs with each config that was taken up, e.g. to publish its prices."""
        self.path = path
        self._adapt = adapt
        self._after = after
        self._unfinished: Config | None = None  # taken up, and `after` has not been through
        self.now = asyncio.Event()
        self._holder = holder
        self._every_s = every_s

    async def run(self) -> None:
        seen = self._stamp()
        while True:
            forced = await self._wait()
            stamp = self._stamp()
            try:
                if forced or stamp != seen:
                    seen = stamp
                    await self.reload()
                elif self._unfinished is not None:
                    await self._finish()
            except Exception:  # the loop outlives what fails in it, and tries again
                log.exception("config_reload_failed", extra={"path": str(self.path)})

    async def reload(self) -> None:
        """Read the file and swap. Logs one line for each problem and keeps the old config."""
        try:
            config = self._adapt(load(self.path))
            self._holder.reload(config)
        except ConfigInvalid as error:
            self._holder.reload_failures += 1
            for problem in error.problems:
                log.error("config_rejected", extra={"problem": problem})
        else:
            self._holder.reloads += 1
            self._unfinished = config
            await self._finish()
            log.info("config_reloaded", extra={"path": str(self.path)})

    async def _finish(self) -> None:
        """What follows from the config that was taken up. If it fails it is due again."""
        if self._after is not None and self._unfinished is not None:
            await self._after(self._unfinished)
        self._unfinished = None

    async def _wait(self) -> bool:
        try:
            await asyncio.wait_for(self.now.wait(), self._every_s)
        except TimeoutError:
            return False
        self.now.clear()
        return True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size
