"""What the gateway costs: CPU per whole request and per streamed event with everything on (keys,
routing, ledger intent and settlement, metrics, spans), beside a bare pass-through, interleaved."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import load
from tests.bench.report import Table
from tests.services import free_port

KEY = re.compile(r"sk-ml-(?!admin)[\w-]+")
ROUNDS = 3
SECONDS = 3.0


def run() -> Table:
    """Median of ROUNDS, one row per target and concurrency."""
    table = Table(
        "gateway",
        ["target", "connections", "CPU µs/request", "p50 ms", "p99 ms", "CPU µs/event"],
    )
    with _processes() as targets:
        for connections in (1, 16, 64):
            found: dict[str, list[load.Load]] = {name: [] for name in targets}
            streamed: dict[str, list[load.Load]] = {name: [] for name in targets}
            for _ in range(ROUNDS):
                for name, (port, key, pid) in targets.items():
                    found[name].append(_load(port, key, pid, connections, stream=False))
                    streamed[name].append(_load(port, key, pid, connections, stream=True))
            for name in targets:
                whole = sorted(found[name], key=lambda one: one.cpu_us)[ROUNDS // 2]
                stream = sorted(streamed[name], key=lambda one: one.cpu_us)[ROUNDS // 2]
                per_event = stream.cpu_us / (stream.events / stream.requests)
                table.add(
                    name,
                    connections,
                    round(whole.cpu_us),
                    round(whole.p50_ms, 2),
                    round(whole.p99_ms, 2),
                    round(per_event, 1),
                )
    return table


def _load(port: int, key: str, pid: int, connections: int, *, stream: bool) -> load.Load:
    return asyncio.run(
        load.run(port, key, pid, connections=connections, seconds=SECONDS, stream=stream)
    )


@contextlib.contextmanager
def _processes() -> Iterator[dict[str, tuple[int, str, int]]]:
    """name → (port, key, pid), all started and answering."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        mock, bare, full = free_port(), free_port(), free_port()
        _start(stack, [sys.executable, "-m", "tests.bench.upstream", str(mock)])
        bare_pid = _start(
            stack, [sys.executable, "-m", "tests.bench.passthrough", str(bare), str(mock)]
        )
        config = Path(folder) / "meterline.toml"
        config.write_text(
            f'[server]\nport = {full}\n[store]\ndata_dir = "{folder}/data"\n'
            f'[[backends]]\nname = "mock"\nkind = "openai"\nallow_private = true\n'
            f'base_url = "http://127.0.0.1:{mock}/v1"\nprice = {{ input = 1, output = 2 }}\n'
            f'[[routes]]\nmodel = "bench"\ntargets = [{{ backend = "mock" }}]\n'
        )
        log = Path(folder) / "log"
        with log.open("w") as sink:
            gateway = subprocess.Popen(
                [sys.executable, "-m", "gateway", "serve", "--config", config],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        stack.callback(gateway.wait)
        stack.callback(gateway.terminate)
        asyncio.run(_up(mock, bare, full))
        while (match := KEY.search(log.read_text())) is None:
            assert gateway.poll() is None, log.read_text()
            time.sleep(0.1)
        key = match[0]
        yield {
            "bare httpx pass-through": (bare, key, bare_pid),
            "meterline, everything on": (full, key, gateway.pid),
        }


def _start(stack: contextlib.ExitStack, command: list[str]) -> int:
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


async def _up(*ports: int) -> None:
    for port in ports:
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
