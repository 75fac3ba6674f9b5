"""Several models in one server, each with its own engine: routed by name, put to sleep, replaced.

A model is replaced without a failed request: the new version is loaded beside the old one, then new
requests go to it, and the old one ends when its last request has. A request belongs to a version
from the moment it is routed, so none meets an engine that is closing. Each engine has its own KV
pool, so nothing computed by one version can be found by another.

`/admin/models…` may be called by whoever can open the engine's Unix socket, which is the user it
runs as; on TCP these routes do not exist.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from backends.engine.account import WallPhase
from backends.engine.engine import Engine, State
from backends.engine.errors import EngineError
from backends.engine.metrics import CONTENT_TYPE
from backends.engine.server import MAX_BODY_BYTES, AsgiMessage, EngineApp, Receive, Scope, Send
from backends.engine.turns import Turns
from telemetry import metrics as declared
from telemetry.clock import Clock

log = logging.getLogger(__name__)

_ADMIN = re.compile(r"/admin/models/(?P<name>[^/]{1,200})/(?P<action>sleep|wake|swap)")
_CANCEL = re.compile(r"/v1/requests/(?P<id>[^/]{1,200})/cancel")
_STEPS: tuple[WallPhase, ...] = ("prefill", "decode", "mixed")
_STEP_FAMILY = declared.ENGINE_STEP_SECONDS.name.removesuffix("_total")
_JSON = b"application/json"

WhenAsleep = Literal["refuse", "wake"]


class Built(Struct, frozen=True):
    """An engine and its app, not started. `release` gives its memory back, after its end."""

    engine: Engine
    app: EngineApp
    release: Callable[[], None] = lambda: None


class Served(Struct, frozen=True):
    """A model's public name, the weights that it begins with, and how to build it from any."""

    name: str
    model: str
    make: Callable[[str], Built]


class _Named(Struct, frozen=True):
    model: str | None = None


class _Swap(Struct, frozen=True, forbid_unknown_fields=True):
    model: str


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        param = "model" if code == "model_not_found" else None
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Version:
    """One engine, and how many requests are with it."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.requests = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()

    @contextmanager
    def used(self) -> Iterator[EngineApp]:
        self.requests += 1
        self._is_unused.clear()
        try:
            yield self.built.app
        finally:
            self.requests -= 1
            if self.requests == 0:
                self._is_unused.set()

    async def unused(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_unused.wait(), timeout_s)


class _Slot:
    """One model by its public name. `current` is None while it sleeps."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.model = served.model
        self.current: _Version | None = None
        self.number = 0  # of the version
        self.changing = asyncio.Lock()  # one change at a time
        self.stepped_us: Counter[str] = Counter()  # of versions that are over

    @property
    def state(self) -> str:
        return "asleep" if self.current is None else str(self.current.built.engine.state)


class Fleet:
    """The ASGI app over all models, and their lives. Used on the event loop only."""

    def __init__(
        self,
        served: Sequence[Served],
        clock: Clock,
        turns: Turns,
        *,
        is_private: bool,
        when_asleep: WhenAsleep = "refuse",
        drain_s: float = 30.0,
    ) -> None:
        """Builds the first versions. `is_private`: listens where only its own user can ask."""
        self._clock = clock
        self._turns = turns
        self._is_private = is_private
        self._when_asleep = when_asleep
        self._drain_s = drain_s
        self._slots = {one.name: _Slot(one) for one in served}
        self._first = self._slots[served[0].name]
        for slot in self._slots.values():
            slot.current = _Version(slot.served.make(slot.model))
            slot.number = 1
        self._retiring: dict[_Version, _Slot] = {}
        self._defect = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_plain = len(served) == 1  # one engine, ever: its own clock is the process's
        self._load_us = 0  # of the first versions; together with their warm-up, of several
        self._warmup_us = 0
        self._idle_us = 0
        self._began_ns = clock.monotonic_ns()

    # ── their lives ──────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        for version in self._versions():
            self._begin(version)

    async def loaded(self) -> None:
        """Wait for all first versions. Raises what loading raised."""
        await asyncio.gather(*(version.built.engine.loaded() for version in self._versions()))
        now_ns = self._clock.monotonic_ns()
        if self._is_plain:
            [version] = self._versions()
            phases = version.built.engine.step_clock.by_phase_us
            self._load_us, self._warmup_us = phases["load"], phases["warmup"]
            self._began_ns = now_ns - 1000 * (self._load_us + self._warmup_us)
        else:
            self._warmup_us = max(1, (now_ns - self._began_ns) // 1000)

    async def ended(self) -> None:
        """Wait until an engine has ended by a defect."""
        await self._defect.wait()

    async def drain(self, timeout_s: float) -> None:
        everybody = [*self._versions(), *self._retiring]
        await asyncio.gather(*(version.built.engine.drain(timeout_s) for version in everybody))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        everybody = [*self._versions(), *self._retiring]
        await asyncio.gather(*(version.built.engine.close() for version in everybody))

    def _versions(self) -> list[_Version]:
        return [slot.current for slot in self._slots.values() if slot.current is not None]

    def _begin(self, version: _Version) -> None:
        version.built.engine.start()
        self._keep(self._watch(version))

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, version: _Version) -> None:
        engine = version.built.engine
        with suppress(Exception):  # whoever waits for it to load hears of it
            await engine.loaded()
            await engine.ended()
            if version in self._versions():
                self._defect.set()

    async def _retire(self, slot: _Slot, version: _Version) -> None:
        """It is in `_retiring`. Its requests end, then its engine, then its memory is free."""
        await version.unused(self._drain_s)
        engine = version.built.engine
        await engine.drain(0.0)
        await engine.close()
        slot.stepped_us += _stepped(engine)
        del self._retiring[version]
        version.built.release()

    async def _load(self, slot: _Slot, model: str) -> _Version:
        """Another version, ready. Raises what hindered it; nothing has changed then."""
        self._leave_plain()
        built = await asyncio.to_thread(slot.served.make, model)
        version = _Version(built)
        self._begin(version)
        try:
            await built.engine.loaded()
        except BaseException:
            await built.engine.close()
            built.release()
            raise
        return version

    def _leave_plain(self, version: _Version | None = None) -> None:
        """From here on several engines' steps are summed up; the clock goes on from where the
        first one's stands, so that it stays one life."""
        if self._is_plain:
            [version] = [version] if version else self._versions()
            self._idle_us = version.built.engine.step_clock.by_phase_us["idle"]
            self._is_plain = False

    async def _swap(self, slot: _Slot, model: str) -> None:
        async with slot.changing:
            version = await self._load(slot, model)
            old, slot.current = slot.current, version
            slot.model = model
            slot.number += 1
            if old is not None:
                self._retiring[old] = slot
        if old is not None:
            self._keep(self._retire(slot, old))

    async def _sleep(self, slot: _Slot) -> None:
        async with slot.changing:
            old, slot.current = slot.current, None
            if old is not None:
                self._leave_plain(old)
                self._retiring[old] = slot
                await self._retire(slot, old)

    async def _wake(self, slot: _Slot) -> None:
        async with slot.changing:
            if slot.current is None:
                slot.current = await self._load(slot, slot.model)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._any(scope, receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except _Refusal as refusal:
            await _reply(send, refusal.status, msgspec.json.encode(refusal.body))
        except EngineError as error:  # of an admin's request: what hindered loading
            hindered = _Refusal(409, error.message, "cannot_load")
            await _reply(send, hindered.status, msgspec.json.encode(hindered.body))

    async def _any(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For what concerns no model: any app knows the answer."""
        version = next(iter([*self._versions(), *self._retiring]), None)
        if version is None:
            raise _Refusal(503, "all models are asleep", "asleep")
        await version.built.app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path.startswith("/admin/") and self._is_private:
            await self._admin(path, method, receive, send)
        elif path == "/metrics" and method == "GET":
            await _reply(send, 200, self._metrics(), CONTENT_TYPE.encode())
        elif path == "/health" and method == "GET":
            await self._health(scope, receive, send)
        elif path == "/v1/models" and method == "GET" and len(self._slots) > 1:
            cards = [version.built.app.model_card() for version in self._versions()]
            listing = {"object": "list", "data": cards}
            await _reply(send, 200, msgspec.json.encode(listing))
        elif found := _CANCEL.fullmatch(path):
            everybody = [*self._versions(), *self._retiring]
            knows = [one for one in everybody if one.built.app.is_running(found["id"])]
            await (knows or everybody)[0].built.app(scope, receive, send)
        elif path.startswith("/v1/models/"):
            await self._forward(path.removeprefix("/v1/models/"), scope, receive, send)
        elif len(self._slots) == 1:
            await self._forward(self._first.served.name, scope, receive, send)
        elif method == "POST":
            data = await _body(receive)
            await self._forward(_model_of(data), scope, _replayed(data, receive), send)
        else:
            await self._any(scope, receive, send)

    async def _forward(self, name: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        """To the version that is current now. A name that nobody has is the first's to refuse."""
        slot = self._slots.get(name or "", self._first)
        if slot.current is None and self._when_asleep == "wake":
            await self._wake(slot)
        version = slot.current
        if version is None:
            raise _Refusal(503, f"{slot.served.name} is asleep: wake it or try later", "asleep")
        with version.used() as app:
            await app(scope, receive, send)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._slots) == 1 and self._first.current is not None:
            await self._first.current.built.app(scope, receive, send)
            return
        states = {name: slot.state for name, slot in self._slots.items()}
        bad = [state for state in states.values() if state not in (State.READY, "asleep")]
        body = {"status": bad[0] if bad else State.READY, "model": self._first.served.name,
                "models": states}  # fmt: skip
        await _reply(send, 503 if bad else 200, msgspec.json.encode(body))

    async def _admin(self, path: str, method: str, receive: Receive, send: Send) -> None:
        if path == "/admin/models" and method == "GET":
            await _reply(send, 200, msgspec.json.encode({"data": self._cards()}))
            return
        found = _ADMIN.fullmatch(path)
        if found is None or method != "POST":
            raise _Refusal(404, f"there is nothing at {path[:100]}", "not_found")
        slot = self._slots.get(found["name"])
        if slot is None:
            raise _Refusal(
                404, f"model `{found['name'][:100]}` is not served here", "model_not_found"
            )
        data = await _body(receive)
        match found["action"]:
            case "sleep":
                await self._sleep(slot)
            case "wake":
                await self._wake(slot)
            case _:
                try:
                    wanted = msgspec.json.decode(data, type=_Swap).model
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise _Refusal(400, f"the body is not a swap: {error}", "invalid") from error
                await self._swap(slot, wanted)
        await _reply(send, 200, msgspec.json.encode(self._card(slot)))

    def _cards(self) -> list[dict[str, object]]:
        return [self._card(slot) for slot in self._slots.values()]

    def _card(self, slot: _Slot) -> dict[str, object]:
        return {
            "name": slot.served.name,
            "model": slot.model,
            "version": slot.number,
            "state": slot.state,
        }

    # ── metrics ──────────────────────────────────────────────────────────────────────────────

    def _metrics(self) -> bytes:
        families: dict[str, Family] = {}
        for version in self._versions():
            for family in version.built.app.families():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        if not self._is_plain:
            families[_STEP_FAMILY] = self._process_clock()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(list(families.values())))
        return generate_latest(registry)

    def _process_clock(self) -> CounterMetricFamily:
        """The wall time of the process by what it was spent on, each second once: steps by model,
        of versions that are over too; loading and warm-up until the first were ready; idle is the
        rest, seen when nobody computes, and with it the loading of later versions. None falls."""
        steps = {name: Counter(slot.stepped_us) for name, slot in self._slots.items()}
        is_free = self._turns.is_free
        wall_us = (self._clock.monotonic_ns() - self._began_ns) // 1000
        living = dict(self._retiring)
        living |= {slot.current: slot for slot in self._slots.values() if slot.current is not None}
        for version, slot in living.items():
            steps[slot.served.name] += _stepped(version.built.engine)
        total_us = sum(sum(counts.values()) for counts in steps.values())
        if is_free and not self._retiring:
            rest_us = wall_us - self._load_us - self._warmup_us - total_us
            self._idle_us = max(self._idle_us, rest_us)
        metric = declared.ENGINE_STEP_SECONDS
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.label_names)
        first = self._first.served.name
        for name, counts in steps.items():
            for phase in metric.labels[1].values:
                us = counts[phase]
                if name == first:
                    us = {
                        "load": self._load_us, "warmup": self._warmup_us, "idle": self._idle_us
                    }.get(phase, us)  # fmt: skip
                family.add_metric([name, phase], us / 1e6)
        return family


def _stepped(engine: Engine) -> Counter[str]:
    """Microseconds of its steps so far."""
    by_phase = engine.step_clock.by_phase_us
    return Counter({phase: by_phase[phase] for phase in _STEPS})


class _Families(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterator[Family]:
        yield from self._families


def _model_of(data: bytes) -> str | None:
    try:
        return msgspec.json.decode(data, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the app says what is wrong


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while sum(map(len, parts)) <= MAX_BODY_BYTES:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    return b"".join(parts)


def _replayed(data: bytes, receive: Receive) -> Receive:
    """What was read already, then what comes."""
    is_told = False

    async def again() -> AsgiMessage:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": data, "more_body": False}

    return again


async def _reply(send: Send, status: int, body: bytes, content_type: bytes = _JSON) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
