"""The supervisor, with a tiny process in the engine's place."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.base import BackendUnavailable, Timeouts
from backends.engine.__main__ import main as engine_main
from backends.engine.__main__ import settings_of
from backends.openai_compat import EngineServer
from backends.registry import build
from backends.settings import BackendSettings, EngineModel, EngineSettings, Speculative
from backends.supervisor import (
    EngineProcess,
    EngineTelemetry,
    Patience,
    Supervised,
    engine_command,
)
from tests.fakes.requests import ask, asking, text_of

FAKE = str(Path(__file__).parents[1] / "fakes" / "engine_process.py")
QUICK = Patience(
    load_s=20, poll_s=0.02, check_s=0.05, hang_s=0.4, grace_s=0.5, backoff_s=0.02, stable_s=30
)


def fake_command(socket_path: Path, *flags: str) -> list[str]:
    """The fake engine's command line."""
    return [sys.executable, "-S", FAKE, "--uds", str(socket_path), *flags]


@asynccontextmanager
async def engine(
    folder: Path, *flags: str, patience: Patience = QUICK, **options: Any
) -> AsyncIterator[EngineProcess]:
    """A supervised fake engine, started, and stopped in the end."""
    socket_path = folder / "e.sock"
    process = EngineProcess(
        EngineSettings(name="small"),
        socket_path,
        command=fake_command(socket_path, *flags, "--life", str(folder / "life")),
        patience=patience,
        jitter=random.Random(1),
        **options,
    )
    await process.start()
    try:
        yield process
    finally:
        await process.aclose()


def supervised(process: EngineProcess) -> Supervised:
    """The backend in front of it."""
    settings = BackendSettings(
        name="small", kind="engine", base_url=f"unix://{process.socket_path}"
    )
    backend = build(settings, ())
    assert isinstance(backend, EngineServer)
    return Supervised(backend, process)


async def until(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    """Wait for a condition of another process."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def lives(folder: Path) -> list[int]:
    """The process ids of all engines that ever started."""
    path = folder / "life"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_it_starts_in_the_background_and_becomes_ready(tmp_path: Path) -> None:
    """`start` does not wait for the model; `state` tells the way."""
    async with engine(tmp_path, "--load-s", "0.3") as process:
        assert process.state.phase == "starting"
        assert not await process.wait_ready(0.05)
        assert await process.wait_ready(15)
        assert process.state.phase == "ready"
        assert process.state.pid == lives(tmp_path)[0]
    assert process.state.phase == "stopped"
    assert not is_alive(lives(tmp_path)[0])
    assert not process.socket_path.exists()


async def test_it_is_restarted_after_a_crash(tmp_path: Path) -> None:
    """Killed from outside, another one takes its place and is reachable."""
    async with engine(tmp_path) as process:
        assert await process.wait_ready(15)
        os.kill(lives(tmp_path)[0], signal.SIGKILL)
        await until(lambda: process.state.phase != "ready")
        assert await process.wait_ready(15)
        assert process.state.restarts == 1
        assert len(lives(tmp_path)) == 2
        async with aclosing(supervised(process)) as backend:
            assert text_of(await ask(backend, asking())) == "hi"


async def test_a_crash_loop_backs_off(tmp_path: Path) -> None:
    """Each pause is longer than the last, so that a broken engine does not eat the machine."""
    patience = Patience(backoff_s=0.1, backoff_max_s=0.4, poll_s=0.02, grace_s=0.5)
    async with engine(
        tmp_path, "--exit-code", "70", "--say", "out of memory", patience=patience
    ) as process:
        await until(lambda: process.state.restarts >= 2)
        assert process.state.reason == "out of memory"
        assert process.state.phase == "restarting"
    # With half of each pause at random: 0.05..0.1, 0.1..0.2, 0.2..0.4, 0.2..0.4, …
    pauses = [process._pause_s(failures) for failures in range(1, 8)]
    for pause, (low, high) in zip(
        pauses, [(0.05, 0.1), (0.1, 0.2), *[(0.2, 0.4)] * 5], strict=True
    ):
        assert low <= pause <= high


async def test_a_configuration_error_is_final(tmp_path: Path) -> None:
    """Exit code 2 is not retried, and its last line is the reason; requests fail at once."""
    async with engine(tmp_path, "--exit-code", "2", "--say", "first\nno such model: x") as process:
        await until(lambda: process.state.phase == "failed")
        assert process.state.reason == "no such model: x"
        await asyncio.sleep(0.1)
        assert len(lives(tmp_path)) == 1
        began = time.monotonic()
        async with aclosing(supervised(process)) as backend:
            with pytest.raises(BackendUnavailable, match="could not be started"):
                await ask(backend, asking())
        assert time.monotonic() - began < 1.0


async def test_a_hanging_engine_is_killed_and_restarted(tmp_path: Path) -> None:
    """One that no longer answers its health route is replaced."""
    async with engine(tmp_path, "--hang-after-s", "0.5") as process:
        assert await process.wait_ready(15)
        first = lives(tmp_path)[0]
        await until(lambda: process.state.restarts == 1)
        assert process.state.reason == "the engine did not answer for 0.4 s"
        assert not is_alive(first)


async def test_an_engine_that_never_loads_is_restarted(tmp_path: Path) -> None:
    """Loading has its own, longer patience."""
    patience = Patience(load_s=0.6, poll_s=0.02, grace_s=0.5, backoff_s=0.02)
    async with engine(tmp_path, "--load-s", "99", patience=patience) as process:
        await until(lambda: process.state.restarts == 1)
        assert process.state.reason == "the engine was not ready within 0.6 s"


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    """Stopping takes the grace and no longer."""
    async with engine(tmp_path, "--ignore-term") as process:
        assert await process.wait_ready(15)
        began = time.monotonic()
        await process.aclose()
        assert 0.4 < time.monotonic() - began < 3.0
        assert not is_alive(lives(tmp_path)[0])


async def test_stopping_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """Whatever moment `aclose` hits, no process is left."""
    for pause_s in (0.0, 0.02, 0.1):
        async with engine(tmp_path, "--load-s", "9") as process:
            await asyncio.sleep(pause_s)
        assert process.state.phase == "stopped"
        await asyncio.sleep(0.1)
        assert not any(map(is_alive, lives(tmp_path)))


async def test_its_stderr_is_in_our_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Line by line, with the engine's name; a line without end is cut, not hoarded."""
    with caplog.at_level("INFO", logger="backends.supervisor"):
        long = "y" * 9_000
        async with engine(tmp_path, "--say", f"loading tensors\n{long}") as process:
            assert await process.wait_ready(15)
            await until(lambda: any("yyy" in str(r.__dict__.get("line")) for r in caplog.records))
    said = [record for record in caplog.records if record.message == "engine says"]
    lines = [str(record.__dict__["line"]) for record in said]
    assert lines[0] == "loading tensors"
    assert max(map(len, lines)) <= 2_000
    assert {record.__dict__["engine"] for record in said} == {"small"}


async def test_requests_wait_for_the_first_load(tmp_path: Path) -> None:
    """A request that comes too early is answered once the model is there."""
    async with (
        engine(tmp_path, "--load-s", "0.4") as process,
        aclosing(supervised(process)) as backend,
    ):
        assert not await backend.is_ready()
        events = await ask(backend, asking(timeouts=Timeouts(connect_s=0.1, first_token_s=15)))
        assert text_of(events) == "hi"
        assert await backend.is_ready()


async def test_requests_do_not_wait_longer_than_their_budget(tmp_path: Path) -> None:
    """They are told that the engine is loading."""
    async with (
        engine(tmp_path, "--load-s", "99") as process,
        aclosing(supervised(process)) as backend,
    ):
        with pytest.raises(BackendUnavailable, match="loading its model"):
            await ask(backend, asking(timeouts=Timeouts(first_token_s=0.1)))


async def test_after_a_crash_requests_wait_for_a_connection_only(tmp_path: Path) -> None:
    """So that a fallback is tried soon."""
    async with engine(tmp_path, "--exit-code", "1") as process:
        await until(lambda: process.state.phase == "restarting")
        began = time.monotonic()
        async with aclosing(supervised(process)) as backend:
            with pytest.raises(BackendUnavailable, match="restarting"):
                await ask(backend, asking(timeouts=Timeouts(connect_s=0.1)))
        assert time.monotonic() - began < 2.0


PARENT = """
import asyncio, sys
from pathlib import Path
from backends.settings import EngineSettings
from backends.supervisor import EngineProcess

async def main():
    process = EngineProcess(EngineSettings(name="small"), Path(sys.argv[1]), command=sys.argv[2:])
    await process.start()
    await process.wait_ready(20)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_kill_9_of_the_gateway_leaves_no_engine(tmp_path: Path) -> None:
    """The kernel takes the child along, with no handler of ours having run."""
    socket_path = tmp_path / "e.sock"
    command = fake_command(socket_path, "--life", str(tmp_path / "life"))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(socket_path), *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        child = lives(tmp_path)[0]
        assert is_alive(child)
        parent.kill()
        parent.wait(5)
    await until(lambda: not is_alive(child), within_s=3.0)


def test_the_command_line_of_the_real_engine(tmp_path: Path) -> None:
    """Every setting of the table arrives as it was, and where spans go: one place."""
    settings = EngineSettings(
        name="small", model="/m.gguf", device="cpu", dtype="float32", kernels="torch",
        prefix_cache=False, kv_memory_gb=0.25, max_batch_size=3, max_batch_tokens=65,
        step_target_s=0.5, threads=2, tool_calls="mistral", weights="int8", when_asleep="wake",
        swap_memory_gb=0.5, swap_file_gb=1.5, swap_folder="/swap",
        models=[EngineModel(name="more", model="/e", dtype="float16", kv_memory_gb=0.1)],
        speculative=Speculative(
            method="draft_model", max_tokens=9, draft_model="/d.gguf", draft_dtype="float16"
        ),
    )  # fmt: skip
    for given in (settings, EngineSettings(name="plain")):
        command = engine_command(given, tmp_path / "e.sock")
        assert command[1:3] == ["-m", "backends.engine"]
        options = engine_main.make_context("serve", command[3:]).params
        assert settings_of(options) == given
        assert options["uds"] == tmp_path / "e.sock"
        assert options["exit_with_parent"] is True
    different = [
        name
        for name in settings.__struct_fields__
        if getattr(settings, name) == getattr(EngineSettings(name="plain"), name)
    ]
    assert different == ["gpu"], "the test leaves these out; gpu is the gateway's own"
    spans = tmp_path / "spans.jsonl"
    for telemetry, flags in [
        (EngineTelemetry(spans_file=spans), ["--spans-file", str(spans)]),
        (
            EngineTelemetry(spans_file=spans, otlp_endpoint="http://c:4318", service_name="x"),
            ["--otlp-endpoint", "http://c:4318"],
        ),
    ]:
        command = engine_command(settings, tmp_path / "e.sock", telemetry)
        given = command[command.index("--service-name") :]
        assert given[1:-3] == [telemetry.service_name, *flags]


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    """Said when it is configured; the kernel would say it in riddles."""
    with pytest.raises(ValueError, match="too long"):
        EngineProcess(EngineSettings(name="small"), tmp_path / ("x" * 120))
