"""The packaged command as a child process, as a user runs it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from msgspec import Struct

from tests.services import free_port

COMMAND = [sys.executable, "-m", "gateway"]
KEY = re.compile(r"sk-ml-(?!admin)[\w-]+")


class Served(Struct, frozen=True, kw_only=True):
    """A running gateway."""

    folder: Path  # its working folder: meterline-data is inside
    base_url: str
    process: "subprocess.Popen[bytes]"
    printed: Path

    @property
    def key(self) -> str:
        """The API key of the first start."""
        match = KEY.search(self.output)
        assert match is not None, self.output
        return match[0]

    @property
    def output(self) -> str:
        return self.printed.read_text()

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Another `meterline` command in the same folder."""
        return run(self.folder, *arguments)


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """One `meterline` command, with what it printed."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=_environment({}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@contextlib.contextmanager
def serve(
    folder: Path, *, config: str | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Start in `folder`, wait until it is ready, stop it with SIGTERM."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*COMMAND, "serve", "--port", str(port)]
    if config is not None:
        (folder / "meterline.toml").write_text(config)
    printed = folder / f"output-{port}"
    with printed.open("wb") as sink:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=_environment(env or {}),
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    served = Served(
        folder=folder, base_url=f"http://127.0.0.1:{port}/v1", process=process, printed=printed
    )
    try:
        _wait_ready(served, port)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _wait_ready(served: Served, port: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if served.process.poll() is not None:
            raise AssertionError(f"it exited: {served.output}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"it was never ready: {served.output}")


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": "1", **extra}
