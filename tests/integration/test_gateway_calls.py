"""What a request costs the gateway, everything on, in Python calls: keys, routing, ledger, metrics,
spans, log line, server and framework included. Deterministic where microseconds are not, and what
CI can hold. Measured on Python 3.11 when this was written: 1,005 a request and 50 a chunk."""

import asyncio
import contextlib
import cProfile
import logging
import pstats
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from gateway import probes
from gateway.app import Service, open_service
from gateway.config import load
from telemetry import logs
from telemetry.ledger import worker
from tests.bench import load as bench
from tests.bench.upstream import EVENTS
from tests.fakes.gateway import ADMIN_KEY, Server
from tests.services import free_port

CALLS_PER_REQUEST = 1_500
CALLS_PER_CHUNK = 60
WHOLE, STREAMS = 40, 3


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    """The port of a server that answers with fixed bytes, in a process of its own."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "tests.bench.upstream", str(port)]) as process:
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
            yield port
        finally:
            process.terminate()


def ask(port: int, key: str, count: int, *, stream: bool) -> int:
    """So many requests on one connection, one after the other; the events that came."""
    request = bench.request(port, key, stream=stream)
    events = 0
    with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rb") as file:
        for _ in range(count):
            sock.sendall(request)
            status, length = file.readline(), None
            assert b" 200 " in status
            while (line := file.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if length is not None:
                file.read(length)
                continue
            while True:
                size = int(file.readline(), 16)
                events += file.read(size + 2).count(b"data: ")
                if size == 0:
                    break
    return events


async def measured(
    folder: Path, upstream: int, prepare: Callable[[Service], None] = lambda service: None
) -> tuple[float, float]:
    """(calls per whole request, calls per streamed event). `prepare` may change the service."""
    config = folder / "meterline.toml"
    config.write_text(
        f'[server]\nadmin_key = "env:ADMIN_KEY"\n[store]\ndata_dir = "{folder}/data"\n'
        f'[[backends]]\nname = "mock"\nkind = "openai"\nallow_private = true\n'
        f'base_url = "http://127.0.0.1:{upstream}/v1"\nprice = {{ input = "1", output = "2" }}\n'
        f'[[routes]]\nmodel = "bench"\ntargets = [{{ backend = "mock" }}]\n'
    )
    async with (
        open_service(load(config), environment={"ADMIN_KEY": ADMIN_KEY}) as service,
        Server(service.app) as server,
    ):
        prepare(service)
        tenant = await service.tenants.create_tenant("acme", {}, actor="test")
        key = (await service.tenants.create_key(tenant.id, name="k", actor="test")).secret.reveal()

        async def calls(count: int, *, stream: bool) -> float:
            profile = cProfile.Profile()
            asking = asyncio.to_thread(ask, server.port, key, count, stream=stream)
            profile.enable()
            events = await asking
            profile.disable()
            assert events == (count * (len(EVENTS) - 1) if stream else 0)  # usage: not asked for
            total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]  # undocumented
            return total / count

        await asyncio.to_thread(ask, server.port, key, 2, stream=False)
        await asyncio.to_thread(ask, server.port, key, 1, stream=True)
        whole = await calls(WHOLE, stream=False)
        streamed = await calls(STREAMS, stream=True)
        return whole, (streamed - whole) / len(EVENTS)


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Request lines into a file, as production writes them."""
    with path.open("w") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logs.JsonFormatter())
        level = logs.request_log.level
        logs.request_log.addHandler(handler)
        logs.request_log.setLevel(logging.INFO)
        try:
            yield
        finally:
            logs.request_log.removeHandler(handler)
            logs.request_log.setLevel(level)


def test_calls_per_request_and_chunk(
    tmp_path: Path, upstream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither grows unnoticed. The ledger's batches to the database and the look for drains are
    apart: they come by time, not by request."""
    monkeypatch.setattr(probes, "DRAINS_EVERY_S", 3600.0)
    monkeypatch.setattr(worker, "SHIP_EVERY_S", 3600.0)
    monkeypatch.setattr(worker, "LEAD_EVERY_S", 3600.0)
    with logged(tmp_path / "log"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        whole, chunk = runner.run(measured(tmp_path, upstream))
    lines = (tmp_path / "log").read_text().count('"event":"request"')
    assert lines == 2 + 1 + WHOLE + STREAMS
    assert whole < CALLS_PER_REQUEST, whole
    assert chunk < CALLS_PER_CHUNK, chunk
