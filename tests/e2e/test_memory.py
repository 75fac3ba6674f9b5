"""A worker forgets what it has answered: memory after some thousand requests is what it was after
the first ones. The million is `make bench ONLY=soak`."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import load
from tests.e2e.served import serve
from tests.e2e.streams import wait_for
from tests.services import free_port

ROUNDS = 3
NOISE_MB = 6.0  # of allocators and caches that fill up
LEAK_KB = 1.0  # a request's record alone takes more


def accepts(port: int) -> bool:
    async def connect() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    try:
        asyncio.run(connect())
    except OSError:
        return False
    return True


@pytest.mark.timeout(150)
def test_memory_is_flat(tmp_path: Path) -> None:
    """Whole and streamed, sixteen at a time, everything on."""
    mock = free_port()
    config = (
        f'[[backends]]\nname = "mock"\nkind = "openai"\nallow_private = true\n'
        f'base_url = "http://127.0.0.1:{mock}/v1"\nprice = {{ input = 1, output = 2 }}\n'
        f'[[routes]]\nmodel = "bench"\ntargets = [{{ backend = "mock" }}]\n'
    )
    with subprocess.Popen([sys.executable, "-m", "tests.bench.upstream", str(mock)]) as upstream:
        try:
            wait_for(lambda: accepts(mock))
            with serve(tmp_path, config=config) as served:
                port = int(served.base_url.split(":")[2].split("/")[0])
                pid = served.process.pid

                def ask(seconds: float) -> int:
                    return sum(
                        asyncio.run(
                            load.run(
                                port,
                                served.key,
                                pid,
                                connections=16,
                                seconds=seconds,
                                stream=stream,
                            )
                        ).requests
                        for stream in (False, True)
                    )

                ask(2.5)
                before = load.resident_mb(pid)
                requests = sum(ask(1.5) for _ in range(ROUNDS))
                grown = load.resident_mb(pid) - before
        finally:
            upstream.terminate()
    assert grown < NOISE_MB or grown * 1024 / requests < LEAK_KB, (grown, requests)
