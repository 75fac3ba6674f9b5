"""The parent of workers, with workers that do nothing but speak its protocol: who is replaced when,
what stops a rolling restart, and how fast one that keeps dying is tried again."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.workers import Patience, Place, WorkerFailed, Workers, target_groups, write_targets

WORKER = """
import os, pathlib, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
line = socket.socket(fileno=int(sys.argv[-1])).makefile("rwb", buffering=0)
place = line.readline()
if pathlib.Path(sys.argv[1]).exists():
    sys.exit(3)
line.write(b"ready\\n")
sys.exit(0 if line.readline() == b"retire\\n" else 4)
"""
QUICK = Patience(start_s=20, drain_s=5, grace_s=5, backoff_s=0.01, backoff_max_s=0.04)


@contextlib.asynccontextmanager
async def group(tmp_path: Path, count: int = 2) -> AsyncIterator[tuple[Workers, Path]]:
    """Running workers, and the file whose existence makes new ones fail."""
    broken = tmp_path / "broken"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        workers = Workers(
            count,
            command=[sys.executable, "-c", WORKER, str(broken)],
            place=lambda slot: Place(
                slot=slot,
                listener=listener.fileno(),
                own=listener.fileno(),
                targets=("a:1", "b:2"),
                engines={},
                counters=None,
            ),
            patience=QUICK,
        )
        running = asyncio.create_task(workers.run())
        await until(lambda: running.done() or len(workers.pids) == count)
        if running.done():
            await running
        try:
            yield workers, broken
        finally:
            workers.stop()
            await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_roll_replaces_all(tmp_path: Path) -> None:
    """Each has a successor, and the former ones end."""
    async with group(tmp_path) as (workers, _):
        before = workers.pids
        await workers.roll()
        assert not set(before.values()) & set(workers.pids.values())
        assert set(workers.pids) == {0, 1}
        await until(lambda: all(is_gone(pid) for pid in before.values()))
        assert (workers.rolled, workers.restarts) == (1, 0)


async def test_a_successor_that_fails_stops_the_roll(tmp_path: Path) -> None:
    """All serve on as before."""
    async with group(tmp_path) as (workers, broken):
        before = workers.pids
        broken.touch()
        await workers.roll()
        assert workers.pids == before
        assert not any(is_gone(pid) for pid in before.values())
        broken.unlink()
        await workers.roll()
        assert not set(before.values()) & set(workers.pids.values())


async def test_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """However often it takes, and the other one is left alone."""
    async with group(tmp_path) as (workers, broken):
        before = workers.pids
        broken.touch()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: workers.restarts == 1)
        await asyncio.sleep(0.1)
        assert workers.pids == before
        broken.unlink()
        await until(lambda: workers.pids[0] != before[0])
        assert workers.pids[1] == before[1]


async def test_the_first_one_decides(tmp_path: Path) -> None:
    """If it does not start nothing does, and its exit code is the command's."""
    (tmp_path / "broken").touch()
    with pytest.raises(WorkerFailed) as failed:
        async with group(tmp_path):
            pass
    assert failed.value.exit_code == 3


async def test_stopping_ends_all(tmp_path: Path) -> None:
    """No worker is left."""
    async with group(tmp_path, 3) as (workers, _):
        pids = workers.pids.values()
        began = time.monotonic()
    assert all(is_gone(pid) for pid in pids)
    assert time.monotonic() - began < QUICK.drain_s + QUICK.grace_s


def test_scrape_targets(tmp_path: Path) -> None:
    """As Prometheus reads them, and never half written."""
    write_targets(tmp_path / "data" / "targets.json", ["a:1", "b:2"])
    text = (tmp_path / "data" / "targets.json").read_text()
    assert text.count('"targets"') == 2
    assert [group.labels["worker"] for group in target_groups(["a:1", "b:2"])] == ["0", "1"]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["targets.json"]
