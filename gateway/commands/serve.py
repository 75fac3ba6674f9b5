"""`meterline serve`: listen, say what to do next, run until told to stop, drain."""

import asyncio
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

from gateway.app import VERSION, Service, StartupError, open_service
from gateway.commands import BadInput
from gateway.commands.files import ConfigRefused, config_option, read_config
from gateway.config import BUNDLED_MODEL, Config, ConfigInvalid, check_references
from gateway.errors import Conflict
from telemetry import logs
from telemetry.redaction import Secret

DEFAULT_TENANT = "default"


@click.command()
@config_option
@click.option("--host", help="Listen on this address instead of the file's.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port instead.")
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "console"]),
    default="auto",
    show_default=True,
    help="auto: for people on a terminal, JSON elsewhere.",
)
def serve(config: Path, host: str | None, port: int | None, log_format: logs.LogFormat) -> None:
    """Serve the gateway, its engines and the ledger. Without a file: the bundled model.

    \b
    Example:
      meterline serve
      meterline serve --config meterline.toml --port 9000
    """

    def with_options(written: Config) -> Config:
        server = written.server
        server = structs.replace(
            server,
            host=server.host if host is None else host,
            port=server.port if port is None else port,
        )
        return structs.replace(written, server=server)

    settings, path = read_config(config)
    try:
        check_references(settings, os.environ)
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error
    logs.configure(fmt=log_format)
    try:
        uvloop.run(_serve(with_options(settings), path, with_options))
    except StartupError as error:
        raise BadInput(str(error)) from error


async def _serve(config: Config, path: Path | None, adapt: Callable[[Config], Config]) -> None:
    listener = _listen(config.server.host, config.server.port)
    with listener:
        async with open_service(
            config, environment=os.environ, config_path=path, adapt=adapt
        ) as service:
            server = _Server(service, config)
            if service.watcher is not None:
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, service.watcher.now.set)
            await _greet(service, config, listener)
            gc.collect()
            gc.freeze()  # what was built at start lives to the end: never walk it again
            await server.serve(sockets=[listener])


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
    """Fails readiness first at SIGTERM, then lets streams finish."""

    def __init__(self, service: Service, config: Config) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                loop="uvloop",
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                timeout_graceful_shutdown=1,  # after `shutdown` has waited for the requests
                timeout_keep_alive=75,  # longer than a load balancer's, so that it closes first
                h11_max_incomplete_event_size=64 * 1024,
            )
        )
        self._service = service
        self._drain_s = config.server.drain_s

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
        until = loop.time() + self._drain_s
        ledger = self._service.gateway.ledger
        while ledger.in_flight and loop.time() < until and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


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
    try:
        tenant = await service.tenants.create_tenant(DEFAULT_TENANT, {}, actor="first-start")
    except Conflict:
        return None  # of several replicas on one database another one was first
    issued = await service.tenants.create_key(tenant.id, name="first", actor="first-start")
    return issued.secret
