"""Upstreams for tests: the scripted server as a process of its own, and raw ones that misbehave.

A raw upstream plays steps on a socket: bytes are sent as they are (so any framing error can be
made), and `Pause`, `STALL`, `HALF_CLOSE`, `CUT` and `RESET` do what they say.
"""

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum
from typing import Any, Self

import msgspec
from msgspec import Struct

from backends.settings import Script


class ScriptedServer(Struct, frozen=True):
    """A running `python -m backends.scripted`."""

    base_url: str  # ends in /v1
    pid: int

    def books(self) -> dict[str, dict[str, int]]:
        """What each request id got: attempts, prompt_tokens, generated, sent, finished."""
        url = self.base_url.removesuffix("/v1") + "/books"
        with urllib.request.urlopen(url, timeout=5) as answer:
            books: dict[str, dict[str, int]] = json.load(answer)
        return books


@contextlib.contextmanager
def scripted_server(
    script: Script | None = None, *, api_key: str | None = None
) -> Iterator[ScriptedServer]:
    """The scripted server in its own process; it survives whatever happens to the gateway."""
    command = [sys.executable, "-m", "backends.scripted", "--port", "0"]
    command += ["--script-json", msgspec.json.encode(script or Script()).decode()]
    if api_key is not None:
        command += ["--api-key", api_key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base_url = process.stdout.readline().strip()
            assert base_url, "the scripted server did not start"
            yield ScriptedServer(base_url, process.pid)
        finally:
            process.terminate()
            process.wait(10)


class Pause(Struct, frozen=True):
    seconds: float


class Do(Enum):
    STALL = "stall"  # until the client goes
    HALF_CLOSE = "half_close"  # end our side; keep reading
    CUT = "cut"  # close in the middle
    RESET = "reset"  # RST instead of FIN


STALL, HALF_CLOSE, CUT, RESET = Do
Step = bytes | Pause | Do


class Received(Struct, frozen=True):
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Upstream:
    """A raw HTTP/1.1 server that plays `steps` for each request, however little they fit."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.received: list[Received] = []
        self.connections = 0
        self.gone_at: float | None = None  # time.monotonic() when a client left while we played
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def plays(self, received: Received) -> Sequence[Step]:
        """What this request gets."""
        return self.steps

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except ConnectionError:
            self.gone_at = time.monotonic()
        except asyncio.IncompleteReadError:
            pass  # an idle connection was closed
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        received = Received(method, path, headers, body)
        self.received.append(received)
        for step in self.plays(received):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif step is STALL:
                await reader.read(1)
                self.gone_at = time.monotonic()
                return False
            elif step is HALF_CLOSE:
                writer.write_eof()
                await reader.read(1)
                return False
            else:
                if step is RESET:
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        return True


@contextlib.contextmanager
def upstream_thread(steps: Sequence[Step]) -> Iterator[Upstream]:
    """An `Upstream` on a loop and thread of its own, for tests that block."""
    upstream = Upstream(steps)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(upstream.__aenter__(), loop).result(5)
        yield upstream
    finally:

        async def stop() -> None:
            await upstream.__aexit__()
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


# --- bytes ------------------------------------------------------------------------------------


def head(status: int = 200, content_type: str = "text/event-stream", **headers: str) -> bytes:
    """A response head with chunked encoding; header names with `_` for `-`."""
    lines = [f"HTTP/1.1 {status} Whatever", f"content-type: {content_type}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()


def piece(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def event(value: Any) -> bytes:
    """An SSE event with this value as JSON, or with these bytes."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"data: " + data + b"\n\n"


def delta(content: str | None, *, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    """A chat chunk."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": index,
                "delta": {} if content is None else {"content": content},
                "finish_reason": finish,
            }
        ],
    }


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
USAGE_CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [],
    "usage": USAGE,
}
GOOD_EVENTS = (
    event(delta("")),
    event(delta("Hel")),
    event(delta("lo")),
    event(delta(None, finish="stop")),
    event(USAGE_CHUNK),
    event(b"[DONE]"),
)
GOOD = (head(), *map(piece, GOOD_EVENTS), END)
_BEGUN = (head(), *map(piece, GOOD_EVENTS[:2]))


def whole(body: Any, status: int = 200, content_type: str = "application/json") -> tuple[Step, ...]:
    """A whole answer with this value as JSON, or with these bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (head(status, content_type), piece(data), END)


_PINGS: list[Step] = [piece(b": ping\n\n"), Pause(0.02)] * 50

VARIANTS: dict[str, tuple[Step, ...]] = {
    "good": GOOD,
    "good, one write": (head() + piece(b"".join(GOOD_EVENTS)) + END,),
    "good, by bytes": (
        head(),
        *(piece(bytes([byte])) for byte in b"".join(GOOD_EVENTS)),
        END,
    ),
    "good, CRLF": (head(), piece(b"".join(GOOD_EVENTS).replace(b"\n", b"\r\n")), END),
    "good, CR": (head(), piece(b"".join(GOOD_EVENTS).replace(b"\n", b"\r")), END),
    "good, comments": (head(), *(piece(b": ping\n\n" + data) for data in GOOD_EVENTS), END),
    "good, without DONE": (head(), *map(piece, GOOD_EVENTS[:-1]), END),
    "good, stays open": (head(), *map(piece, GOOD_EVENTS), STALL),
    "cut": (*_BEGUN, CUT),
    "cut in an event": (*_BEGUN, piece(event(delta("lo"))[:-20]), CUT),
    "ends in an event": (*_BEGUN, piece(event(delta("lo"))[:-20]), END),
    "ends without finish": (*_BEGUN, END),
    "DONE without finish": (*_BEGUN, piece(event(b"[DONE]")), END),
    "one of two choices": (
        *_BEGUN,
        piece(event(delta("x", index=1))),
        piece(event(delta(None, finish="stop"))),
        piece(event(b"[DONE]")),
        END,
    ),
    "empty stream": (head(), END),
    "reset": (*_BEGUN, RESET),
    "half close": (*_BEGUN, HALF_CLOSE),
    "garbage": (*_BEGUN, piece(b"data: {garbage\n\n"), END),
    "garbage chunk": (*_BEGUN, b"zz\r\nnot hex\r\n"),
    "error event": (
        *_BEGUN,
        piece(event({"error": {"message": "m", "type": "server_error"}})),
        END,
    ),
    "huge event": (*_BEGUN, *[piece(b"data: " + b"x" * 65_536)] * 40, END),
    "stall": (*_BEGUN, STALL),
    "stall before": (head(), piece(GOOD_EVENTS[0]), STALL),
    "only comments": (head(), *_PINGS, STALL),
    "silent": (STALL,),
    "closes at once": (CUT,),
    "resets at once": (RESET,),
    "not HTTP": (b"220 smtp.example ESMTP\r\n", CUT),
    "redirect": (head(302, "text/plain", location="http://127.0.0.1:1/"), END),
    "error under 200": whole({"error": {"message": "m", "type": "server_error", "code": "x"}}),
    "html": whole(b"<html>hello</html>", 200, "text/html"),
    "gzip": (head(200, content_encoding="gzip"), piece(b"\x1f\x8b"), END),
    "huge headers": (head(200, x_filler="y" * 200_000), END),
}


@contextlib.asynccontextmanager
async def misbehaving(variant: str) -> AsyncIterator[Upstream]:
    """The upstream of that name in VARIANTS, on this loop."""
    async with Upstream(VARIANTS[variant]) as upstream:
        yield upstream
