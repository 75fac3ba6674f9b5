"""The parent of several gateway workers: starts them, replaces them, and never loses a request.

Workers are processes of this program that accept from one listening socket, which the parent holds
open from first to last: a connection that no worker has accepted yet waits for the next one. A
worker that must go is told to retire: it accepts no more, answers what it has, and ends. What may
exist only once on a machine is here: the engines and, without Redis, the counters of limits. Knows
nothing of HTTP. Invariant: no worker outlives the parent for longer than its drain (a worker whose
line to the parent ends drains by itself), and a slot has at most one worker that is not retiring.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

READY: Final = b"ready\n"
RETIRE: Final = b"retire\n"
HANGING_S: Final = 10.0


class Place(Struct, frozen=True, kw_only=True):
    """What a worker is told when it starts, as one line of JSON."""

    slot: int
    listener: int  # file descriptors: the socket of all workers,
    own: int  # and this slot's own, where its metrics are scraped
    targets: tuple[str, ...]  # host:port of every slot
    engines: dict[str, str]  # name → path of its socket
    counters: str | None  # path of their socket; None: they are on Redis
    greets: bool = False


class Patience(Struct, frozen=True, kw_only=True):
    """How long the parent waits for what, in seconds."""

    start_s: float = 120.0  # from a worker's start to its readiness
    drain_s: float = 30.0  # that a retiring worker's requests get
    grace_s: float = 20.0  # beyond its drain, for the ledger; then it is killed
    backoff_s: float = 0.1  # before a dead worker is replaced; doubles
    backoff_max_s: float = 30.0
    stable_s: float = 60.0  # alive for so long: the back-off starts over


class WorkerFailed(Exception):
    """The first worker did not start. It has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the first worker ended with exit code {exit_code}")
        self.exit_code = exit_code


class Worker:
    """One child, and the line to it."""

    def __init__(
        self,
        slot: int,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.slot = slot
        self.process = process
        self.began_s = asyncio.get_running_loop().time()
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return self.process.pid

    async def is_ready(self, within_s: float) -> bool:
        """Wait until it says so, ends, or time is up."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(within_s):
                return await self._reader.readline() == READY
        return False

    def retire(self) -> None:
        self._writer.write(RETIRE)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> int:
        code = await self.process.wait()
        self._writer.close()
        return code


class Workers:
    """One worker per slot. `run` until `stop`; `roll` replaces all of them, one after another.

    `command` is what a worker runs, its control socket's number appended; `place` says where."""

    def __init__(
        self,
        count: int,
        *,
        command: Sequence[str],
        place: Callable[[int], Place],
        patience: Patience,
        jitter: random.Random | None = None,
    ) -> None:
        self.restarts = 0
        self.rolled = 0
        self._count = count
        self._command = list(command)
        self._place = place
        self._patience = patience
        self._jitter = jitter or random.Random()  # noqa: S311 - spreads restarts, guards nothing
        self._current: dict[int, Worker] = {}
        self._alive: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: dict[int, int] = {}
        self._rolling = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._greeted = False

    @property
    def pids(self) -> dict[int, int]:
        """Slot → process id of the worker in charge."""
        return {slot: worker.pid for slot, worker in sorted(self._current.items())}

    async def run(self) -> None:
        """The first worker alone, since it prepares the data folder; then the others. Returns when
        stopped and all have ended. Raises WorkerFailed."""
        try:
            first = await self._start(0)
            if first is None:
                return
            log.info("workers_starting", extra={"workers": self._count})
            for slot in range(1, self._count):
                self._task(self._replace(slot, pause=False))
            await self._stopping.wait()
        finally:
            await self._end()

    def stop(self) -> None:
        """Every worker drains, and `run` returns. Again: nobody waits for requests."""
        if self._stopping.is_set():
            for worker in self._alive:
                worker.signal(signal.SIGINT)
        self._stopping.set()

    async def roll(self) -> None:
        """Replace each worker: its successor is ready before it retires. If one does not become
        ready, everything stays as it is and the log says so."""
        async with self._rolling:
            for slot in sorted(self._current):
                if self._stopping.is_set():
                    return
                successor = await self._spawn(slot)
                if not await successor.is_ready(self._patience.start_s):
                    successor.signal(signal.SIGKILL)
                    log.error("rolling_restart_stopped", extra={"slot": slot})
                    return
                former = self._current.get(slot)
                self._current[slot] = successor
                if former is not None:
                    self._retire(former)
            self.rolled += 1
            log.info("rolling_restart_done", extra={"workers": self._count})

    # -- one worker

    async def _start(self, slot: int) -> Worker | None:
        worker = await self._spawn(slot)
        if await worker.is_ready(self._patience.start_s):
            self._current[slot] = worker
            return worker
        if self._stopping.is_set():
            return None
        with contextlib.suppress(TimeoutError):  # it has hung up, and is about to end
            async with asyncio.timeout(HANGING_S):
                await worker.process.wait()
        worker.signal(signal.SIGKILL)
        raise WorkerFailed(await worker.ended())

    async def _spawn(self, slot: int) -> Worker:
        ours, theirs = socket.socketpair()
        place = self._place(slot)
        if self._greeted:
            place = msgspec.structs.replace(place, greets=False)
        self._greeted = True
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), place.listener, place.own),
                start_new_session=True,  # a terminal's Ctrl-C is the parent's to pass on
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(msgspec.json.encode(place) + b"\n")
        worker = Worker(slot, process, reader, writer)
        self._alive.add(worker)
        self._task(self._watch(worker))
        return worker

    async def _watch(self, worker: Worker) -> None:
        code = await worker.ended()
        self._alive.discard(worker)
        if self._current.get(worker.slot) is not worker or self._stopping.is_set():
            return
        self.restarts += 1
        log.error(
            "worker_died",
            extra={"slot": worker.slot, "died_pid": worker.pid, "exit_code": code},
        )
        lived_s = asyncio.get_running_loop().time() - worker.began_s
        if lived_s >= self._patience.stable_s:
            self._failures.pop(worker.slot, None)
        await self._replace(worker.slot, pause=True, former=worker)

    async def _replace(self, slot: int, *, pause: bool, former: Worker | None = None) -> None:
        """A new worker for the slot, however many tries it takes."""
        while not self._stopping.is_set():
            if pause:
                await self._pause(slot)
            if self._current.get(slot) is not former:  # a rolling restart was faster
                return
            worker = await self._spawn(slot)
            if await worker.is_ready(self._patience.start_s):
                if self._current.get(slot) is former:
                    self._current[slot] = worker
                else:
                    self._retire(worker)
                return
            worker.signal(signal.SIGKILL)
            pause = True

    async def _pause(self, slot: int) -> None:
        failures = self._failures.get(slot, 0)
        self._failures[slot] = failures + 1
        pause_s = min(self._patience.backoff_s * 2**failures, self._patience.backoff_max_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s * self._jitter.uniform(0.75, 1.25)):
                await self._stopping.wait()

    def _retire(self, worker: Worker) -> None:
        """Tell it, and see to it that it ends."""
        worker.retire()
        self._task(self._kill_when_late(worker))

    async def _kill_when_late(self, worker: Worker) -> None:
        await asyncio.sleep(self._patience.drain_s + self._patience.grace_s)
        if worker in self._alive:
            log.error("worker_killed", extra={"slot": worker.slot, "killed_pid": worker.pid})
            worker.signal(signal.SIGKILL)

    async def _end(self) -> None:
        self._stopping.set()
        loop = asyncio.get_running_loop()
        for worker in self._alive:
            worker.signal(signal.SIGTERM)
        until = loop.time() + self._patience.drain_s + self._patience.grace_s
        while self._alive and loop.time() < until:  # noqa: ASYNC110 - the set shrinks by watchers
            await asyncio.sleep(0.02)
        for worker in self._alive:
            worker.signal(signal.SIGKILL)
        while self._alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker_supervision_failed", exc_info=error)


class Line:
    """A worker's end of the line to its parent."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Place
    ) -> None:
        self.place = place
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, fd: int) -> "Line":
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
        line = await reader.readline()
        if not line:
            raise SystemExit(1)  # the parent is gone already
        place = msgspec.json.decode(line, type=Place)
        return cls(reader, writer, place)

    def ready(self) -> None:
        self._writer.write(READY)

    async def until_told(self) -> bool:
        """True: retire. False: the parent is gone."""
        with contextlib.suppress(OSError):
            return await self._reader.readline() == RETIRE
        return False


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a worker, but for the number that is appended."""
    return [sys.executable, "-m", "gateway", "serve", *arguments, "--worker"]


class TargetGroup(Struct, frozen=True):
    """As Prometheus's file_sd and http_sd read it."""

    targets: list[str]
    labels: dict[str, str]


def target_groups(targets: Sequence[str]) -> list[TargetGroup]:
    return [TargetGroup([target], {"worker": str(slot)}) for slot, target in enumerate(targets)]


def write_targets(path: Path, targets: Sequence[str]) -> None:
    """The workers' scrape targets for file_sd. Replaced at once."""
    groups = target_groups(targets)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(groups)) + b"\n")
    draft.replace(path)
