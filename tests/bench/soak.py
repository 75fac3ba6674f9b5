"""Memory over a million requests: `make bench ONLY=soak` (`SOAK_REQUESTS` for fewer). A worker that
forgets what it has answered has slope zero."""

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from tests.bench import load
from tests.bench.gateway import gateway, start
from tests.bench.report import Table
from tests.services import free_port

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000000"))
STEPS = 10
CONNECTIONS = 16


def run() -> Table:
    """The memory after each tenth of the requests, one in ten of them streamed."""
    table = Table("gateway-soak", ["requests", "own MB", "MB per million since the middle"])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock = free_port()
        start(stack, [sys.executable, "-m", "tests.bench.upstream", str(mock)], mock)
        target = gateway(stack, mock, folder)
        done = first = 0
        base = 0.0
        for step in range(STEPS):
            goal = done + REQUESTS // STEPS
            while done < goal:
                for stream in (False, True):
                    found = asyncio.run(
                        load.run(
                            target.port,
                            target.key,
                            target.pid,
                            connections=CONNECTIONS,
                            seconds=0.5 if stream else 4.5,
                            stream=stream,
                        )
                    )
                    done += found.requests
            now = load.own_mb(target.pid)
            if step <= STEPS // 2:  # until then caches fill up
                first, base = done, now
            slope = (now - base) / (done - first) * 1e6 if done > first else 0.0
            table.add(done, round(now, 1), round(slope, 2))
    return table
