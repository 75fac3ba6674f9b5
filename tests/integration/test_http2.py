"""HTTP/2 to upstreams: against a real server (hypercorn), and one that says what it wants."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import hypercorn.asyncio
import hypercorn.config
import pytest

from backends import egress
from backends.http2 import STREAM_WINDOW, Http2Pool
from backends.openai_compat import OpenAICompatible
from backends.settings import BackendSettings
from backends.transport import Request
from telemetry.usage import from_openai
from tests.fakes.requests import ask, asking, final_of, text_of
from tests.fakes.upstream import GOOD_EVENTS
from tests.services import free_port

REQUEST = Request(target=b"/v1/x", headers=[(b"host", b"up")], body=b"{}")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of `localhost`, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", folder / "k.pem", "-out", folder / "c.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder / "c.pem", folder / "k.pem"


class App:
    """An upstream on hypercorn."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.bodies: list[bytes] = []
        self.running = self.most = 0
        self.gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.versions.append(scope["http_version"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._answer(scope, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"up-1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/v1/endless":
            with contextlib.suppress(Exception):
                watching = asyncio.create_task(receive())
                while not watching.done():
                    await send(
                        {"type": "http.response.body", "body": b"x" * 10_000, "more_body": True}
                    )
                    await asyncio.sleep(0)
                self.gone += 1
            return
        for one in GOOD_EVENTS:
            await send({"type": "http.response.body", "body": one, "more_body": True})
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def served(
    certificate: tuple[Path, Path], *, alpn: list[str] | None = None
) -> AsyncIterator[tuple[str, App, ssl.SSLContext]]:
    """Its base URL, the app, and a context that trusts it."""
    app, port, stop = App(), free_port(), asyncio.Event()
    config = hypercorn.config.Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.certfile, config.keyfile = (str(path) for path in certificate)
    config.loglevel = "ERROR"
    config.graceful_timeout = 0.2
    if alpn is not None:
        config.alpn_protocols = alpn
    serving = asyncio.create_task(
        hypercorn.asyncio.serve(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]
    )
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.01)
    try:
        context = ssl.create_default_context(cafile=str(certificate[0]))
        yield f"https://localhost:{port}/v1", app, context
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await serving


def backend_to(base_url: str, context: ssl.SSLContext, **more: Any) -> OpenAICompatible:
    """A backend that wants HTTP/2."""
    settings = BackendSettings(
        name="up", kind="openai", base_url=base_url, allow_private=True, http2=True
    )
    client = egress.http2_pool(base_url, allow_private=True, ssl_context=context, **more)
    return OpenAICompatible(settings, "key", client, normalise=from_openai)


def pool_of(backend: OpenAICompatible) -> Http2Pool:
    """Its connections."""
    client = backend._client
    assert isinstance(client, Http2Pool)
    return client


async def test_streams_share_a_connection(certificate: tuple[Path, Path]) -> None:
    """Twenty streams at a time, one connection, each answer whole and its own."""
    async with served(certificate) as (base_url, app, context):
        backend = backend_to(base_url, context)
        answers = await asyncio.gather(*(ask(backend, asking(stream=True)) for _ in range(20)))
        assert [text_of(events) for events in answers] == ["Hello"] * 20
        assert all(final_of(events).provider_request_id == "up-1" for events in answers)
        assert set(app.versions) == {"2"}
        assert app.most > 5
        assert pool_of(backend).open_connections == 1
        await backend.aclose()


async def test_a_server_that_speaks_http1_is_spoken_to(certificate: tuple[Path, Path]) -> None:
    """It is the server that chooses, in the handshake."""
    async with served(certificate, alpn=["http/1.1"]) as (base_url, app, context):
        backend = backend_to(base_url, context)
        for _ in range(2):
            assert text_of(await ask(backend, asking(stream=True))) == "Hello"
        assert set(app.versions) == {"1.1"}
        await backend.aclose()


async def test_a_large_body_goes_through_small_windows(certificate: tuple[Path, Path]) -> None:
    """Sent as the server's windows open; whole at the other end."""
    async with served(certificate) as (base_url, app, context):
        client = egress.http2_pool(base_url, allow_private=True, ssl_context=context)
        body = json.dumps({"x": "y" * 3_000_000}).encode()
        until = asyncio.get_running_loop().time() + 30
        answer = await client.send(Request(target=b"/v1/x", headers=[], body=body), until=until)
        received = b""
        while piece := await answer.read(until):
            received += piece
        answer.close()
        assert app.bodies == [body]
        assert received == b"".join(GOOD_EVENTS)
        await client.aclose()


async def test_a_slow_reader_is_bounded_and_alone(certificate: tuple[Path, Path]) -> None:
    """What nobody takes stops at the stream's window, and the other streams go on; letting go
    resets the stream, and the connection stays."""
    async with served(certificate) as (base_url, app, context):
        client = egress.http2_pool(base_url, allow_private=True, ssl_context=context)
        until = asyncio.get_running_loop().time() + 30
        endless = await client.send(Request(target=b"/v1/endless", headers=[]), until=until)
        await asyncio.sleep(0.3)
        other = await client.send(REQUEST, until=until)
        while await other.read(until):
            pass
        held = sum(len(part) for part in endless._body)  # type: ignore[attr-defined]
        assert 0 < held <= STREAM_WINDOW
        endless.close()
        async with asyncio.timeout(10):
            while not app.gone:
                await asyncio.sleep(0.01)
        assert client.open_connections == 1
        await client.aclose()


# --- a server that says what it wants ---------------------------------------------------------

Says = Callable[[h2.connection.H2Connection, int, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def saying(*turns: Says) -> AsyncIterator[tuple[Http2Pool, list[int]]]:
    """A pool to a server over clear text that does `turns`, one for each request in their order,
    the last for all others; and the streams it saw."""
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        server.initiate_connection()
        writer.write(server.data_to_send())
        try:
            while data := await reader.read(65_536):
                for event in server.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        seen.append(event.stream_id)
                        turn = turns[min(len(seen), len(turns)) - 1]
                        await turn(server, event.stream_id, writer)
                writer.write(server.data_to_send())
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = egress.http2_pool(f"http://127.0.0.1:{port}/v1", allow_private=True)
    async with listening:
        yield client, seen
        await client.aclose()


async def answers(server: h2.connection.H2Connection, stream: int, _: Any) -> None:
    """200, and a word."""
    server.send_headers(stream, [(":status", "200"), ("x-a", "b")])
    server.send_data(stream, b"word", end_stream=True)


async def begins(server: h2.connection.H2Connection, stream: int, _: Any) -> None:
    """200, and no end."""
    server.send_headers(stream, [(":status", "200")])
    server.send_data(stream, b"wo")


async def resets(server: h2.connection.H2Connection, stream: int, _: Any) -> None:
    """In the middle."""
    await begins(server, stream, _)
    server.reset_stream(stream, 2)


async def refuses(server: h2.connection.H2Connection, stream: int, _: Any) -> None:
    """REFUSED_STREAM: not begun."""
    server.reset_stream(stream, 7)


async def cuts(server: h2.connection.H2Connection, stream: int, writer: Any) -> None:
    """The socket."""
    await begins(server, stream, writer)
    writer.write(server.data_to_send())
    writer.close()


async def nonsense(_: h2.connection.H2Connection, stream: int, writer: Any) -> None:
    """No frame at all."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"\xff" * 100)


def goaway(last_stream_id: int, code: int = 0) -> bytes:
    """The frame."""
    payload = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return len(payload).to_bytes(3, "big") + b"\x07\x00" + b"\x00" * 4 + payload


async def leaves_unbegun(server: h2.connection.H2Connection, stream: int, writer: Any) -> None:
    """GOAWAY, without having begun this one."""
    writer.write(server.data_to_send() + goaway(0))


async def leaves_and_ends(server: h2.connection.H2Connection, stream: int, writer: Any) -> None:
    """GOAWAY, and this one still gets its answer."""
    server.send_headers(stream, [(":status", "200")])
    writer.write(server.data_to_send() + goaway(stream))
    await asyncio.sleep(0.05)
    server.send_data(stream, b"word", end_stream=True)


def soon(seconds: float = 10) -> float:
    """A deadline."""
    return asyncio.get_running_loop().time() + seconds


async def read_all(client: Http2Pool) -> bytes:
    """One request, and all of its answer."""
    answer = await client.send(REQUEST, until=soon())
    try:
        data = b""
        while piece := await answer.read(soon()):
            data += piece
        return data
    finally:
        answer.close()


async def test_what_was_not_begun_is_sent_again() -> None:
    """Once, on another connection after GOAWAY; a second refusal is an error."""
    async with saying(refuses, answers) as (client, seen):
        assert await read_all(client) == b"word"
        assert len(seen) == 2
    async with saying(leaves_unbegun, answers) as (client, seen):
        assert await read_all(client) == b"word"
        assert seen == [1, 1]
    async with saying(refuses) as (client, seen):
        with pytest.raises(httpx.RemoteProtocolError):
            await read_all(client)
        assert len(seen) == 2


async def test_what_was_begun_is_finished_after_goaway() -> None:
    """And the next request opens another connection."""
    async with saying(leaves_and_ends, answers) as (client, seen):
        assert await read_all(client) == b"word"
        assert await read_all(client) == b"word"
        assert seen == [1, 1]


@pytest.mark.parametrize("says", [resets, cuts], ids=["reset", "cut"])
async def test_a_broken_stream_is_never_whole(says: Says) -> None:
    """What came is given, then an error; it is not sent again."""
    async with saying(says) as (client, seen):
        answer = await client.send(REQUEST, until=soon())
        with pytest.raises(httpx.TransportError):
            while await answer.read(soon()):
                pass
        answer.close()
        assert len(seen) == 1


async def test_nonsense_is_an_error() -> None:
    """A server that does not speak HTTP/2."""
    async with saying(nonsense) as (client, _):
        with pytest.raises(httpx.TransportError):
            await client.send(REQUEST, until=soon())


async def test_a_stall_ends_at_its_time() -> None:
    """TimeoutError, and only that stream is let go."""
    async with saying(begins, answers) as (client, _):
        answer = await client.send(REQUEST, until=soon())
        assert await answer.read(soon()) == b"wo"
        with pytest.raises(TimeoutError):
            await answer.read(soon(0.1))
        answer.close()
        assert await read_all(client) == b"word"
        assert client.open_connections == 1


async def test_a_header_that_would_end_early_is_refused() -> None:
    """Before a byte goes out."""
    async with saying(answers) as (client, seen):
        with pytest.raises(httpx.LocalProtocolError):
            await client.send(
                Request(target=b"/v1/x", headers=[(b"a", b"b\r\nc: d")]), until=soon()
            )
        assert not seen
