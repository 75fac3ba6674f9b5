"""A whole gateway for tests: all parts as they are started in production, on a loopback socket, in
the test's own loop, and what is needed to look at each of its books."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import override

from backends.scripted import Player, ScriptedApp
from backends.settings import Script
from gateway.api.protocol import Protocol
from gateway.app import Service, open_service
from gateway.config import load, parse
from telemetry import metrics as metric
from telemetry.clock import SystemClock
from telemetry.database import open_engine
from telemetry.ledger.conservation import Law
from telemetry.ledger.reconcile import reconcile
from telemetry.record import RequestRecord
from telemetry.tables import ChargeLineRow, RequestRow, UsageEventRow

ADMIN_KEY = "admin-canary-0123456789abcdef"
ENVIRONMENT = {"ADMIN_KEY": ADMIN_KEY, "UPSTREAM_KEY": "upstream-canary-4711"}


class _Quiet(uvicorn.Server):
    """Leaves the process's signals alone."""

    @override
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Server:
    """A uvicorn in this loop. `stop` is what SIGTERM does."""

    def __init__(self, app: Any, *, grace_s: int = 5) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._server = _Quiet(
            uvicorn.Config(
                app,
                http=Protocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._running: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def __aenter__(self) -> "Server":
        self._running = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        return self

    async def stop(self) -> None:
        self._server.should_exit = True
        assert self._running is not None
        await self._running

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._listener.close()


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[tuple[Server, ScriptedApp]]:
    """The scripted upstream as a real server in this loop."""
    app = ScriptedApp(script)
    async with Server(app, grace_s=1) as server:
        yield server, app


class Rows(Struct, frozen=True):
    """What the database holds of one request."""

    requests: list[Any]
    events: list[Any]
    lines: list[Any]


class Harness:
    """One running gateway with a tenant, and its books."""

    def __init__(
        self,
        service: Service,
        config_path: Path,
        engine: AsyncEngine,
        server: Server,
        upstream: Server,
        app: ScriptedApp,
    ) -> None:
        self._upstream = upstream
        self._scripted = app
        self.service = service
        self.config_path = config_path
        self.engine = engine
        self.server = server
        self.client = httpx.AsyncClient(base_url=server.base_url, timeout=20)
        self.settled: list[RequestRecord] = []
        self.key = ""
        self.tenant_id = ""
        self.key_id = ""
        service.gateway.ledger.observers.append(self.settled.append)

    async def issue(self, name: str) -> None:
        tenants = self.service.tenants
        tenant = await tenants.create_tenant(name, {}, actor="test")
        issued = await tenants.create_key(tenant.id, name="k", actor="test")
        self.key, self.tenant_id, self.key_id = issued.secret.reveal(), tenant.id, issued.key.id

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def configure(self, tables: str) -> None:
        """Other backends and routes, as a reload gives them; prices stay those of the start."""
        head = self.config_path.read_text().split("# tables\n")[0]
        self.forget_failures()
        self.service.gateway.runtimes.reload(parse((head + tables).encode()))

    def forget_failures(self) -> None:
        """Close all circuits."""
        runtimes = self.service.gateway.runtimes
        for name in runtimes.current.upstreams:
            runtimes.health.forget(name)

    def play(self, script: Script) -> Player:
        """What the scripted upstream at `scripted_url` plays from now on."""
        self._scripted.player = Player(script)
        return self._scripted.player

    @property
    def scripted_url(self) -> str:
        return f"{self._upstream.base_url}/v1"

    async def next_settled(self, count: int, timeout_s: float = 5) -> list[RequestRecord]:
        """Wait until `count` records are settled in all."""
        async with asyncio.timeout(timeout_s):
            while len(self.settled) < count or self.service.gateway.ledger.in_flight:
                await asyncio.sleep(0.002)
        return self.settled

    async def rows(self, request_id: str) -> Rows:
        """Flush, and read what the database holds of a request."""
        await self.service.worker.flush()
        async with self.engine.connect() as db:
            found = [
                list(
                    await db.execute(select(table.__table__).where(table.request_id == request_id))
                )
                for table in (RequestRow, UsageEventRow, ChargeLineRow)
            ]
        return Rows(*found)

    async def broken_laws(self) -> list[str]:
        """What reconciliation finds, once the roll-ups are current."""
        config = self.service.gateway.runtimes.current.config
        laws: list[Law] = []
        async with asyncio.timeout(10):
            while not any(law.name == "hours" for law in laws):
                await self.service.worker.flush()
                laws = await reconcile(self.engine, config.wal_dir, clock=SystemClock())
        return [law.line for law in laws if not law.holds]

    def requests_total(self) -> dict[str, float]:
        """The counter of requests by outcome, as a scrape shows it."""
        text = self.service.metrics.render(openmetrics=False).decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == metric.REQUESTS.name:
                    outcome = sample.labels["outcome"]
                    totals[outcome] = totals.get(outcome, 0) + sample.value
        return totals


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, server: str = "", store: str = "", telemetry: str = "", tables: str = ""
) -> AsyncIterator[Harness]:
    """A gateway with its data in `folder`, a tenant with a key, and the scripted upstream."""
    path = folder / "meterline.toml"
    limit = "" if "max_body_mb" in server else "max_body_mb = 1\n"
    path.write_text(
        f'[server]\nport = 0\nadmin_key = "env:ADMIN_KEY"\n{limit}{server}\n'
        f'[store]\ndata_dir = "{folder / "data"}"\n{store}\n'
        f"[telemetry]\n{telemetry}\n# tables\n{tables}"
    )
    config = load(path)
    async with (
        open_service(config, environment=ENVIRONMENT, config_path=path) as service,
        Server(service.app) as front,
        scripted(Script()) as (upstream, app),
    ):
        engine = open_engine(f"sqlite:///{folder / 'data' / 'meterline.db'}")
        harness = Harness(service, path, engine, front, upstream, app)
        await harness.issue("acme")
        try:
            yield harness
        finally:
            await harness.client.aclose()
            await engine.dispose()


def backend(name: str, base_url: str, *, more: str = "", price: str = '"1", output = "2"') -> str:
    """A table of kind `openai` for an upstream on this machine."""
    return (
        f'[[backends]]\nname = "{name}"\nkind = "openai"\nprovider = "scripted"\n'
        f'base_url = "{base_url}"\napi_key = "env:UPSTREAM_KEY"\nallow_private = true\n'
        f"price = {{ input = {price} }}\n{more}\n"
    )


def route(model: str, *targets: str) -> str:
    """A route to backends: `name` or `name=model`; the first gets all first attempts."""
    tables = []
    for place, target in enumerate(targets):
        name, _, there = target.partition("=")
        model_there = f', model = "{there}"' if there else ""
        tables.append(f'{{ backend = "{name}"{model_there}, weight = {0 if place else 1} }}')
    return f'[[routes]]\nmodel = "{model}"\ntargets = [{", ".join(tables)}]\n'


def events_of(text: str) -> list[str]:
    """The data of each event of an SSE body."""
    assert text.endswith("\n\n") or not text
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


def error_of(text: str) -> dict[str, Any]:
    """The error object; asserts its shape."""
    found = json.loads(text)
    assert list(found) == ["error"]
    error: dict[str, Any] = found["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    return error
