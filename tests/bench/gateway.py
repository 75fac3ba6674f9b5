"""What the gateway costs: CPU per whole request and per streamed event with everything on, beside
nginx, a bare pass-through and other gateways that are installed, all in turns within one run; how
late chunks are and whether any is lost; and what each stage costs, by taking it out.

`BENCH_SECONDS` is the length of one measurement (1.0), `BENCH_PARTS` which of the three tables."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import peers
from tests.bench import load
from tests.bench.report import Table
from tests.bench.stage_off import STAGES
from tests.bench.upstream import PACED_CHUNKS
from tests.peers import Peer
from tests.services import free_port

KEY = re.compile(r"sk-ml-(?!admin)[\w-]+")
ROUNDS = 3
SECONDS = float(os.environ.get("BENCH_SECONDS", "1.0"))
PARTS = os.environ.get("BENCH_PARTS", "cost,streams,stages").split(",")
OURS = "meterline, everything on"


def run() -> list[Table]:
    """Median of ROUNDS, one row per target."""
    tables: list[Table] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock = free_port()
        start(stack, [sys.executable, "-m", "tests.bench.upstream", str(mock)], mock)
        if "cost" in PARTS or "streams" in PARTS:
            with contextlib.ExitStack() as running:
                targets = [*_others(running, mock, folder), gateway(running, mock, folder)]
                if "cost" in PARTS:
                    tables.append(_cost("gateway", targets, (1, 16, 64)))
                if "streams" in PARTS:
                    tables.append(_streams(targets))
        if "stages" in PARTS:
            with contextlib.ExitStack() as running:
                targets = [gateway(running, mock, folder)]
                targets += [gateway(running, mock, folder, without=stage) for stage in STAGES]
                tables.append(_cost("gateway-stages", targets, (16,)))
    return tables


def _cost(name: str, targets: list[Peer], connections: tuple[int, ...]) -> Table:
    columns = [f"CPU µs/request c={count}" for count in connections]
    table = Table(
        name, ["target", *columns, "CPU µs/event c=16", "p50 ms c=1", "p99 ms c=16", "PSS MB"]
    )
    whole: dict[tuple[str, int], list[load.Load]] = {}
    streamed: dict[str, list[load.Load]] = {}
    for target in targets:  # each warm before any is measured
        _load(target, 4, stream=False, seconds=0.5)
        _load(target, 4, stream=True, seconds=0.5)
    for _ in range(ROUNDS):
        for count in connections:
            for target in targets:
                found = _load(target, count, stream=False)
                whole.setdefault((target.name, count), []).append(found)
        for target in targets:
            streamed.setdefault(target.name, []).append(_load(target, 16, stream=True))
    for target in targets:
        cells = [_median([one.cpu_us for one in whole[target.name, c]]) for c in connections]
        events = [one.cpu_us * one.requests / max(1, one.events) for one in streamed[target.name]]
        first, sixteen = whole[target.name, connections[0]], whole[target.name, 16]
        table.add(
            target.name,
            *(round(cell) for cell in cells),
            round(_median(events), 1),
            round(_median([one.p50_ms for one in first]), 2),
            round(_median([one.p99_ms for one in sixteen]), 1),
            round(load.resident_mb(target.pid), 1),
        )
    return table


def _streams(targets: list[Peer]) -> Table:
    """A chunk each 20 ms on each of many streams: how late it is, whether it comes at all."""
    table = Table(
        "gateway-streams", ["target", "streams", "chunks", "lost", "late p50 ms", "late p99 ms"]
    )
    for streams in (100, 500):
        for target in targets:
            if streams > 100 and target.name.startswith("LiteLLM"):
                continue  # minutes, and nothing to learn from them
            found = asyncio.run(
                load.paced(
                    target.port,
                    target.key,
                    streams=streams,
                    chunks=PACED_CHUNKS,
                    headers=target.headers,
                )
            )
            table.add(
                target.name,
                streams,
                found.chunks,
                found.lost,
                round(found.late_p50_ms, 1),
                round(found.late_p99_ms, 1),
            )
    return table


def _load(target: Peer, connections: int, *, stream: bool, seconds: float = SECONDS) -> load.Load:
    return asyncio.run(
        load.run(
            target.port,
            target.key,
            target.pid,
            connections=connections,
            seconds=seconds,
            stream=stream,
            headers=target.headers,
        )
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _others(stack: contextlib.ExitStack, mock: int, folder: Path) -> list[Peer]:
    found = []
    for name in peers.installed():
        home = folder / name
        home.mkdir()
        found.append(stack.enter_context(peers.running(name, mock, home, "bench")))
    port = free_port()
    pid = start(
        stack, [sys.executable, "-m", "tests.bench.passthrough", str(port), str(mock)], port
    )
    return [*found, Peer(name="bare httpx pass-through", port=port, pid=pid)]


def gateway(
    stack: contextlib.ExitStack, mock: int, folder: Path, *, without: str | None = None
) -> Peer:
    """Ours, as it is served, one worker; `without` one stage."""
    port = free_port()
    home = folder / f"gateway-{port}"
    home.mkdir()
    config = home / "meterline.toml"
    config.write_text(
        f'[server]\nport = {port}\n[store]\ndata_dir = "{home}/data"\n'
        f'[[backends]]\nname = "mock"\nkind = "openai"\nallow_private = true\n'
        f"max_concurrency = 1000\n"
        f'base_url = "http://127.0.0.1:{mock}/v1"\nprice = {{ input = 1, output = 2 }}\n'
        f'[[routes]]\nmodel = "bench"\ntargets = [{{ backend = "mock" }}]\n'
        "[limits]\nkey = { requests_per_minute = 100000000 }\n"
    )
    log = home / "log"
    command = ["-m", "gateway", "serve"] if without is None else [
        "-m", "tests.bench.stage_off", without,
    ]  # fmt: skip
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, *command, "--config", config],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while (match := KEY.search(log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    _up(port)
    name = OURS if without is None else f"without {without}"
    return Peer(name=name, port=port, pid=process.pid, key=match[0])


def start(stack: contextlib.ExitStack, command: list[str], port: int) -> int:
    """A process that listens on the port."""
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    _up(port)
    return process.pid


def _up(port: int) -> None:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)

    asyncio.run(wait())
