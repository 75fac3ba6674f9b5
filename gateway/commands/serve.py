"""`meterline serve`: listen, say what to do next, run until told to stop, drain.

With several workers this process is their parent (`gateway.workers`), and each of them is this
command again, told by `--worker` where the line to the parent is.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click
import msgspec
import uvicorn
import uvloop
from msgspec import structs
from typing_extensions import override

from gateway.api.protocol import Protocol
from gateway.app import (
    VERSION,
    Service,
    StartupError,
    open_service,
    private_folder,
    start_engines,
)
from gateway.commands import BadInput
from gateway.commands.files import ConfigRefused, config_option, read_config
from gateway.config import BUNDLED_MODEL, Config, ConfigInvalid, check_references
from gateway.limits import CounterServer, MemoryStore
from gateway.workers import (
    Line,
    Patience,
    Place,
    WorkerFailed,
    Workers,
    worker_command,
    write_targets,
)
from telemetry import logs
from telemetry.clock import SystemClock
from telemetry.redaction import Secret

DEFAULT_TENANT = "default"
IDLE_S = 2.0  # of a retiring worker's connections, until they are closed


@click.command()
@config_option
@click.option("--host", help="Listen on this address instead of the file's.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port instead.")
@click.option("--workers", type=click.IntRange(1, 64), help="Serve with so many processes.")
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "console"]),
    default="auto",
    show_default=True,
    help="auto: for people on a terminal, JSON elsewhere.",
)
@click.option("--worker", type=int, hidden=True, help="The line to the parent.")
def serve(
    config: Path,
    host: str | None,
    port: int | None,
    workers: int | None,
    log_format: logs.LogFormat,
    worker: int | None,
) -> None:
    """Serve the gateway, its engines and the ledger. Without a file: the bundled model.

    SIGTERM drains and ends. With several workers SIGHUP replaces them one after another and loses
    no request; with one it reads the config again.

    \b
    Example:
      meterline serve
      meterline serve --config meterline.toml --port 9000 --workers 4
    """

    def with_options(written: Config) -> Config:
        server = written.server
        server = structs.replace(
            server,
            host=server.host if host is None else host,
            port=server.port if port is None else port,
            workers=server.workers if workers is None else workers,
        )
        return structs.replace(written, server=server)

    settings, path = read_config(config)
    try:
        check_references(settings, os.environ)
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error
    logs.configure(fmt=log_format)
    settings = with_options(settings)
    if worker is not None:
        work = _work(settings, path, with_options, worker)
    elif settings.server.workers > 1:
        options = {"--config": config, "--host": host, "--port": port, "--workers": workers}
        given = [part for name, value in options.items() if value is not None
                 for part in (name, str(value))]  # fmt: skip
        work = _lead(settings, worker_command([*given, "--log-format", log_format]))
    else:
        work = _serve(settings, path, with_options)
    try:
        uvloop.run(work)
    except StartupError as error:
        raise BadInput(str(error)) from error
    except WorkerFailed as error:
        raise SystemExit(error.exit_code or 1) from error


async def _serve(config: Config, path: Path | None, adapt: Callable[[Config], Config]) -> None:
    """One process that does everything."""
    listener = _listen(config.server.host, config.server.port)
    with listener:
        async with open_service(
            config, environment=os.environ, config_path=path, adapt=adapt
        ) as service:
            if service.watcher is not None:
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, service.watcher.now.set)
            await _greet(service, config, listener)
            await _Server(service, config).run_on([listener])


async def _lead(config: Config, command: list[str]) -> None:
    """The parent of several: what may exist once is here, requests are not."""
    server, data = config.server, Path(config.store.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(server.host, server.port))
        own = [
            stack.enter_context(
                _listen(server.host, server.worker_port and server.worker_port + slot)
            )
            for slot in range(server.workers)
        ]
        targets = tuple(_address(each) for each in own)
        sockets = private_folder(stack)
        engines = await start_engines(config, stack, sockets)
        counters = None
        if config.store.redis is None:
            counters = sockets / "counters.sock"
            store = MemoryStore(SystemClock())
            await stack.enter_async_context(CounterServer(store, counters))
        write_targets(data / "scrape-targets.json", targets)

        def place(slot: int) -> Place:
            return Place(
                slot=slot,
                listener=listener.fileno(),
                own=own[slot].fileno(),
                targets=targets,
                engines={name: str(sockets / f"{name}.sock") for name in engines},
                counters=None if counters is None else str(counters),
                greets=True,
            )

        group = Workers(
            server.workers,
            command=command,
            place=place,
            patience=Patience(drain_s=server.drain_s),
        )
        loop = asyncio.get_running_loop()
        rolls: set[asyncio.Task[None]] = set()

        def roll() -> None:
            task = loop.create_task(group.roll())
            rolls.add(task)
            task.add_done_callback(rolls.discard)

        loop.add_signal_handler(signal.SIGHUP, roll)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, group.stop)
        await group.run()
        for task in tuple(rolls):
            task.cancel()


async def _work(
    config: Config, path: Path | None, adapt: Callable[[Config], Config], fd: int
) -> None:
    """One of several workers."""
    line = await Line.open(fd)
    place = line.place
    with socket.socket(fileno=place.listener) as listener, socket.socket(fileno=place.own) as own:
        async with open_service(
            config, environment=os.environ, config_path=path, adapt=adapt, place=place
        ) as service:
            server = _Server(service, config)
            if place.greets:
                await _greet(service, config, listener)
            obeying = asyncio.create_task(_obey(line, server))
            try:
                await server.run_on([listener, own], started=line.ready)
            finally:
                obeying.cancel()


async def _obey(line: Line, server: "_Server") -> None:
    """Retire when told to; drain when the parent is gone."""
    if await line.until_told():
        server.retire()
        await line.until_told()
    server.handle_exit(signal.SIGTERM, None)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    """Bind first: a busy port must be one line, and nothing must have been started for it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.set_inheritable(True)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """Fails readiness first at SIGTERM, then lets streams finish. Retiring is quieter: others take
    the new connections, and what this one has, or is still asked on an open connection, it answers
    as ever, saying that the connection ends with it."""

    def __init__(self, service: Service, config: Config) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                loop="uvloop",
                http=Protocol,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                timeout_graceful_shutdown=1,  # after `shutdown` has waited for the requests
                timeout_keep_alive=75,  # longer than a load balancer's, so that it closes first
            )
        )
        self._service = service
        self._drain_s = config.server.drain_s
        self._started: Callable[[], None] = lambda: None
        self._retiring = False

    async def run_on(
        self, sockets: list[socket.socket], started: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until told to stop; `started` is called once requests are accepted."""
        self._started = started
        gc.collect()
        gc.freeze()  # what was built at start lives to the end: never walk it again
        await self.serve(sockets=sockets)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    def retire(self) -> None:
        """Take no new connections, and end when those that are open have ended."""
        self._retiring = True
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        self.should_exit = True

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own: that one raises the signal again once it has stopped, and the process
        would die before the ledger is flushed. A second Ctrl-C does not wait for requests."""
        self._service.gateway.draining = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Go on listening while requests run: readiness says no, and whoever still comes is told
        to go elsewhere, which a closed port could not tell them."""
        loop = asyncio.get_running_loop()
        if self._retiring:
            await self._until_unused(loop.time() + self._drain_s)
        until = loop.time() + self._drain_s
        ledger = self._service.gateway.ledger
        while ledger.in_flight and loop.time() < until and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    async def _until_unused(self, until: float) -> None:
        """Wait for the connections to end: each does so with its next answer. Those that say
        nothing for IDLE_S are closed: whoever keeps one open has to expect that anyway."""
        loop = asyncio.get_running_loop()
        ledger, state = self._service.gateway.ledger, self.server_state
        quiet_since, seen = loop.time(), state.total_requests
        while state.connections and loop.time() < until and not self._service.gateway.draining:
            if ledger.in_flight or state.total_requests != seen:
                quiet_since, seen = loop.time(), state.total_requests
            elif loop.time() - quiet_since >= IDLE_S:
                return
            await asyncio.sleep(0.02)


async def _greet(service: Service, config: Config, listener: socket.socket) -> None:
    """What a person at a terminal needs: where, with what key, and a line that works."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}/v1"
    key = await _first_key(service)
    model = next(iter(service.gateway.runtimes.current.routes), BUNDLED_MODEL)
    lines = [f"Meterline {VERSION}", f"  base URL    {base}"]
    if service.new_admin_key is not None:
        kept = Path(config.store.data_dir) / "admin-key"
        lines.append(f"  admin key   {service.new_admin_key.reveal()}  (kept in {kept})")
    if key is not None:
        lines.append(f"  API key     {key.reveal()}  (tenant `default`; shown this once)")
    else:
        lines.append("  API key     another one: meterline key create default")
    bearer = key.reveal() if key is not None else "$METERLINE_API_KEY"
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
    ).decode()
    lines.append(
        f"  try it      curl {base}/chat/completions"
        f' -H "Authorization: Bearer {bearer}" -H "Content-Type: application/json"'
        f" -d '{body}'"
    )
    click.echo("\n".join(lines))
    sys.stdout.flush()


async def _first_key(service: Service) -> Secret | None:
    """On an empty database: a tenant and a key, so that the first request needs no set-up."""
    if (await service.tenants.tenants(limit=1)).items:
        return None
    tenant = await service.tenants.create_tenant(DEFAULT_TENANT, {}, actor="first-start")
    issued = await service.tenants.create_key(tenant.id, name="first", actor="first-start")
    return issued.secret
