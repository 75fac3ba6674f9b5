"""An engine that somebody else keeps, as a worker sees it: loading, ready, gone, back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from backends.attended import AttendedEngine
from backends.supervisor import Patience

QUICK = Patience(poll_s=0.01, check_s=0.01)


@contextlib.asynccontextmanager
async def answering(path: Path, status: int) -> AsyncIterator[None]:
    """A server on the socket that says so of its health."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            )
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()
        path.unlink()


async def until_phase(engine: AttendedEngine, phase: str) -> None:
    async with asyncio.timeout(20):
        while engine.state.phase != phase:
            await asyncio.sleep(0.005)


async def test_an_engine_of_our_parent(tmp_path: Path) -> None:
    """It is waited for while it loads, and known to be away when it is; nobody here starts it."""
    path = tmp_path / "e.sock"
    engine = AttendedEngine("own", path, patience=QUICK)
    await engine.start()
    try:
        assert await engine.wait_checked(0)
        assert not await engine.wait_ready(0.05)
        async with answering(path, 503):
            assert not await engine.wait_ready(0.05)
            assert engine.state.phase == "starting"
        async with answering(path, 200):
            assert await engine.wait_ready(20)
            assert engine.is_ready
        await until_phase(engine, "restarting")
        assert not engine.is_ready
        async with answering(path, 200):
            assert await engine.wait_ready(20)
    finally:
        await engine.aclose()
