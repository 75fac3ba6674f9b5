"""An engine as a supervised child process: started, watched, restarted, and never orphaned.

It knows how to keep a process alive and reachable on a Unix socket; it knows nothing of requests
or tokens. Invariants: at most one child at a time; no child outlives this process, not even after
`kill -9`; a configuration error (exit code 2) is reported and not retried.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import httpx
import msgspec
from msgspec import Struct, structs

from backends import egress
from backends.base import BackendUnavailable, ChatRequest, Event
from backends.openai_compat import EngineServer
from backends.settings import EngineSettings
from telemetry.capacity.heartbeat import StepTimes
from telemetry.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

EXIT_CONFIGURATION: Final = 2
SOCKET_PATH_BYTES: Final = 107  # sun_path of unix(7), less the closing NUL
LINES_HELD: Final = 100
LINE_BYTES: Final = 2_000  # of a line of the engine's stderr that is kept

# Runs in the child before the engine: ask the kernel to kill it when its parent dies (prctl(2),
# PR_SET_PDEATHSIG = 1, survives execve), then check that the parent had not died already. Not a
# preexec_fn, which may deadlock in a process with threads.
_LAUNCH: Final = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

Phase = Literal["starting", "ready", "restarting", "failed", "stopped"]


class EngineState(Struct, frozen=True, kw_only=True):
    """Where the engine is. `reason` says why, for people: the last line of its stderr."""

    phase: Phase
    reason: str | None = None
    restarts: int = 0
    pid: int | None = None


class Patience(Struct, frozen=True, kw_only=True):
    """How long the supervisor waits for what, in seconds."""

    load_s: float = 600.0  # from start to ready: a large model from a slow disk
    poll_s: float = 0.1  # between health checks while it loads
    check_s: float = 2.0  # between health checks when it is ready
    hang_s: float = 30.0  # of unanswered health checks before it is killed
    grace_s: float = 10.0  # between SIGTERM and SIGKILL
    backoff_s: float = 0.5  # before the first restart; doubles
    backoff_max_s: float = 30.0
    stable_s: float = 60.0  # ready for so long: the backoff starts over


class EngineTelemetry(Struct, frozen=True, kw_only=True):
    """Where an engine sends its spans: to a collector, or into a file of its own."""

    otlp_endpoint: str | None = None
    spans_file: Path | None = None
    service_name: str = "meterline-engine"


def engine_command(
    settings: EngineSettings, socket_path: Path, telemetry: EngineTelemetry | None = None
) -> list[str]:
    """The command line of `python -m backends.engine`."""
    command = [sys.executable, "-m", "backends.engine"]
    command += ["--name", settings.name, "--model", settings.model]
    command += ["--device", settings.device, "--dtype", settings.dtype]
    command += ["--weights", settings.weights]
    command += ["--kv-memory-gb", str(settings.kv_memory_gb)]
    command += ["--swap-memory-gb", str(settings.swap_memory_gb)]
    command += ["--swap-file-gb", str(settings.swap_file_gb)]
    if settings.swap_folder is not None:
        command += ["--swap-folder", settings.swap_folder]
    command += ["--max-batch-size", str(settings.max_batch_size)]
    command += ["--max-batch-tokens", str(settings.max_batch_tokens)]
    command += ["--when-asleep", settings.when_asleep]
    for model in settings.models:
        command += ["--also", msgspec.json.encode(model).decode()]
    command += ["--kernels", settings.kernels, "--step-target-s", str(settings.step_target_s)]
    command.append("--prefix-cache" if settings.prefix_cache else "--no-prefix-cache")
    guesses = settings.speculative
    command += ["--speculative", guesses.method, "--draft-tokens", str(guesses.max_tokens)]
    if guesses.draft_model is not None:
        command += ["--draft-model", guesses.draft_model, "--draft-dtype", guesses.draft_dtype]
    if settings.threads is not None:
        command += ["--threads", str(settings.threads)]
    if settings.tool_calls != "auto":
        command += ["--tool-calls", settings.tool_calls]
    if telemetry is not None:
        command += ["--service-name", telemetry.service_name]
        if telemetry.otlp_endpoint is not None:
            command += ["--otlp-endpoint", telemetry.otlp_endpoint]
        elif telemetry.spans_file is not None:
            command += ["--spans-file", str(telemetry.spans_file)]
    return [*command, "--exit-with-parent", "--uds", str(socket_path)]


class EngineProcess:
    """One supervised engine. `start` returns at once; `aclose` stops the child and waits for it.

    The socket's folder should be private to this user: whoever can open the socket can ask."""

    def __init__(
        self,
        settings: EngineSettings,
        socket_path: Path,
        *,
        telemetry: EngineTelemetry | None = None,
        command: Sequence[str] | None = None,
        patience: Patience | None = None,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES:
            raise ValueError(f"the socket path of engine {settings.name} is too long for a socket")
        self.name = settings.name
        self.socket_path = socket_path
        self._command = list(command or engine_command(settings, socket_path, telemetry))
        self._patience = patience or Patience()
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()  # noqa: S311 - spreads restarts, guards nothing
        self._state = EngineState(phase="starting")
        self._changed = asyncio.Condition()
        self._keeper: asyncio.Task[None] | None = None
        self._answers = False  # it has listened once: its settings and its model's file are good
        self._unsaid: deque[str] = deque(maxlen=LINES_HELD)
        self._last_line: str | None = None  # of the running child's stderr
        self._verdict: str | None = None  # why we killed it
        self._ready_ns: int | None = None  # since when it is ready

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_ready(self) -> bool:
        return self._state.phase == "ready"

    async def start(self) -> None:
        """Begin to keep it alive, in the background. Once."""
        assert self._keeper is None, "started twice"
        self._keeper = asyncio.create_task(self._keep(), name=f"engine {self.name}")

    async def wait_checked(self, timeout_s: float) -> bool:
        """Wait until it has checked its settings and its model's file, which it does before it
        listens: what an operator must mend is known then. False: it refused, or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._answers or self._state.phase in ("failed", "stopped")
                )
        return self._answers

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is ready, has failed for good, or time is up. Whether it is ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._state.phase in ("ready", "failed", "stopped")
                )
        return self.is_ready

    async def aclose(self) -> None:
        """SIGTERM, then SIGKILL after the grace. Safe to call twice."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._become(EngineState(phase="stopped", restarts=self._state.restarts))

    async def _keep(self) -> None:
        try:
            await self._keep_alive()
        except Exception:  # noqa: BLE001 - the background loop: logged, and shown in `state`
            _log.exception("supervision ended", extra={"engine": self.name})
            reason = "its supervision ended by a defect; the log says where"
            await self._become(
                structs.replace(self._state, phase="failed", reason=reason, pid=None)
            )

    async def _keep_alive(self) -> None:
        """Run the child again and again until it fails for good or we are told to stop."""
        failures = 0
        restarts = 0
        while True:
            exit_code = await self._run_once("restarting" if restarts else "starting", restarts)
            reason = (
                self._verdict or self._last_line or f"the engine ended with exit code {exit_code}"
            )
            if exit_code == EXIT_CONFIGURATION:
                if restarts:  # at the first start whoever waits for its check tells it
                    _log.error(
                        "engine misconfigured", extra={"engine": self.name, "reason": reason}
                    )
                await self._become(EngineState(phase="failed", reason=reason, restarts=restarts))
                return
            self._speak()
            failures = 1 if self._ready_s() >= self._patience.stable_s else failures + 1
            restarts += 1
            await self._become(EngineState(phase="restarting", reason=reason, restarts=restarts))
            pause_s = self._pause_s(failures)
            _log.warning(
                "engine ended, restarting",
                extra={
                    "engine": self.name,
                    "exit_code": exit_code,
                    "reason": reason,
                    "pause_s": round(pause_s, 3),
                },
            )
            await asyncio.sleep(pause_s)

    def _pause_s(self, failures: int) -> float:
        """Exponential, with half of it at random so that engines do not restart in step."""
        doubled: float = self._patience.backoff_s * 2 ** min(failures - 1, 30)
        return min(doubled, self._patience.backoff_max_s) * self._jitter.uniform(0.5, 1.0)

    def _ready_s(self) -> float:
        """For how long the child that has just ended was ready."""
        if self._ready_ns is None:
            return 0.0
        return (self._clock.monotonic_ns() - self._ready_ns) / 1e9

    async def _run_once(self, phase: Phase, restarts: int) -> int:
        """Start the child and stay with it to its end: its exit code. Whatever happens, it is
        gone when this returns or raises."""
        self._last_line = self._verdict = self._ready_ns = None
        self.socket_path.unlink(missing_ok=True)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-c", _LAUNCH, str(os.getpid())),
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is ours to act on: streams end before their engine
        )
        assert child.stderr is not None
        try:
            await self._become(
                EngineState(
                    phase=phase, reason=self._state.reason, restarts=restarts, pid=child.pid
                )
            )
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._forward(child.stderr))
                watching = group.create_task(self._watch(child, restarts))
                exit_code = await child.wait()
                watching.cancel()
                await asyncio.wait((reading,), timeout=1.0)  # its last words
                reading.cancel()
        finally:
            await self._stop(child)
            self.socket_path.unlink(missing_ok=True)
        return exit_code

    async def _watch(self, child: asyncio.subprocess.Process, restarts: int) -> None:
        """Ask for its health; kill it when it loads too long or hangs."""
        patience = self._patience
        deadline_ns = self._clock.monotonic_ns() + round(patience.load_s * 1e9)
        base_url = f"{egress.UNIX_SCHEME}{self.socket_path}"
        async with egress.client(base_url, max_connections=1) as client:
            while True:
                is_healthy = await self._is_healthy(client)
                now_ns = self._clock.monotonic_ns()
                if is_healthy:
                    deadline_ns = now_ns + round(patience.hang_s * 1e9)
                    if self._ready_ns is None:
                        self._ready_ns = now_ns
                        _log.info("engine ready", extra={"engine": self.name, "pid": child.pid})
                        await self._become(
                            EngineState(phase="ready", restarts=restarts, pid=child.pid)
                        )
                elif now_ns >= deadline_ns:
                    self._verdict = (
                        f"the engine was not ready within {patience.load_s:g} s"
                        if self._ready_ns is None
                        else f"the engine did not answer for {patience.hang_s:g} s"
                    )
                    _kill(child, signal.SIGKILL)
                    return
                is_loading = self._ready_ns is None
                await asyncio.sleep(patience.poll_s if is_loading else patience.check_s)

    async def _is_healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            async with asyncio.timeout(min(self._patience.hang_s, 5.0)):
                response = await client.get(f"http://{egress.UNIX_HOST}/health")
        except (httpx.HTTPError, TimeoutError):
            return False
        if not self._answers:  # it listens, so it has checked what it was given
            self._answers = True
            self._speak()
            async with self._changed:
                self._changed.notify_all()
        return response.status_code == 200

    async def _forward(self, stderr: asyncio.StreamReader) -> None:
        """Its stderr, line by line, into our log. The last line is kept as the reason."""
        rest = b""
        while piece := await stderr.read(65_536):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._say(line)
            if len(rest) > LINE_BYTES:
                self._say(rest)
                rest = b""
        self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line[:LINE_BYTES].decode("utf-8", "replace").strip()
        if text:
            self._last_line = text
            self._unsaid.append(text)
            if self._answers:
                self._speak()

    def _speak(self) -> None:
        """Log what it said. Held back until it has passed its own check: what it says in refusing
        to start is for whoever waits for that."""
        for text in self._unsaid:
            _log.info("engine says", extra={"engine": self.name, "line": text})
        self._unsaid.clear()

    async def _stop(self, child: asyncio.subprocess.Process) -> None:
        if child.returncode is not None:
            return
        _kill(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._patience.grace_s):
                await child.wait()
        except TimeoutError:
            _log.warning("engine killed after its grace", extra={"engine": self.name})
        finally:
            if child.returncode is None:
                _kill(child, signal.SIGKILL)
                await child.wait()

    async def _become(self, state: EngineState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()


def _kill(child: asyncio.subprocess.Process, sent: signal.Signals) -> None:
    """To the child and what it started: it leads its own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, sent)


class Keeper(Protocol):
    """Whoever knows how an engine is: its owner's `EngineProcess`, or a worker's view of it."""

    @property
    def state(self) -> EngineState: ...

    @property
    def is_ready(self) -> bool: ...

    async def start(self) -> None: ...

    async def wait_checked(self, timeout_s: float) -> bool: ...

    async def wait_ready(self, timeout_s: float) -> bool: ...

    async def aclose(self) -> None: ...


class Supervised:
    """A backend whose server is a supervised child: requests wait for it while it loads.

    On the first load they wait for as long as they would wait for a first token, after a crash
    only for as long as for a connection, so that a fallback is tried soon."""

    def __init__(
        self, backend: EngineServer, process: Keeper, *, clock: Clock | None = None
    ) -> None:
        self.name = backend.name
        self.provider = backend.provider
        self.process = process
        self._backend = backend
        self._clock = clock or SystemClock()

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        if not self.process.is_ready:
            request = await self._waited(request)
        async with contextlib.aclosing(self._backend.chat(request)) as events:  # type: ignore[type-var]  # it is a generator
            async for event in events:
                yield event

    async def cancel(self, request_id: str, /) -> bool:
        """See `Cancellable`. While it loads nothing runs there, and nothing is told."""
        return self.process.is_ready and await self._backend.cancel(request_id)

    async def is_ready(self) -> bool:
        return self.process.is_ready and await self._backend.is_ready()

    async def step_times(self) -> StepTimes | None:
        """What the engine's step clock shows; None while it is not there."""
        if not self.process.is_ready:
            return None
        return await self._backend.step_times()

    async def aclose(self) -> None:
        await self._backend.aclose()
        await self.process.aclose()

    async def _waited(self, request: ChatRequest) -> ChatRequest:
        """The request with what is left of its time, once the engine is ready."""
        timeouts = request.timeouts
        is_first = self.process.state.phase == "starting"
        budget_s = min(timeouts.first_token_s if is_first else timeouts.connect_s, timeouts.total_s)
        began_ns = self._clock.monotonic_ns()
        if not await self.process.wait_ready(budget_s):
            raise BackendUnavailable(self._why(), backend=self.name)
        waited_s = (self._clock.monotonic_ns() - began_ns) / 1e9
        left = structs.replace(
            timeouts,
            first_token_s=max(timeouts.first_token_s - waited_s, 0.001),
            total_s=max(timeouts.total_s - waited_s, 0.001),
        )
        return structs.replace(request, timeouts=left)

    def _why(self) -> str:
        phase = self.process.state.phase
        if phase == "failed":
            return "the engine could not be started; its log says why"
        if phase == "starting":
            return "the engine is still loading its model"
        return "the engine is restarting"
