"""Clients that do not read, and clients that leave, through a whole gateway."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from telemetry.record import Outcome
from tests.fakes.gateway import Harness, Server, backend, route, running
from tests.fakes.upstream import STALL, Upstream, delta, event, head, piece

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()
MOST_BYTES = 12_000_000  # what sockets and buffers on the way may hold of a stream nobody reads


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module."""
    prices = backend("b", "http://127.0.0.1:1/v1")
    async with running(tmp_path_factory.mktemp("gateway"), tables=prices) as harness:
        yield harness


class Endless:
    """A stream without an end, and how much of it was taken."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_gone = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        watching = asyncio.ensure_future(receive())
        part = event(delta("x" * 10_000)) * 8
        while not watching.done():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.sent += len(part)
            await asyncio.sleep(0)
        self.is_gone = True


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def connected(gateway: Harness) -> socket.socket:
    """A client with a small buffer, whose request is out."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    client.connect(("127.0.0.1", gateway.server.port))
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
        % (gateway.key.encode(), len(BODY), BODY)
    )
    return client


async def test_a_client_that_does_not_read_stops_the_upstream(gateway: Harness) -> None:
    """What it does not take is not taken from upstream either, so memory is bounded; others are
    served meanwhile; and when it leaves, so does its upstream request, settled and billed."""
    app = Endless()
    async with Server(app, grace_s=1) as upstream:
        gateway.configure(backend("b", f"{upstream.base_url}/v1") + route("m", "b"))
        before = len(gateway.settled)
        client = connected(gateway)
        await until(lambda: app.sent > 0)
        sent = -1
        async with asyncio.timeout(30):
            while sent != app.sent:  # until it stands still
                sent = app.sent
                await asyncio.sleep(0.5)
        assert sent < MOST_BYTES
        assert (await gateway.client.get("/v1/models", headers=gateway.auth)).status_code == 200
        client.close()
        await until(lambda: app.is_gone)
        record = (await gateway.next_settled(before + 1, timeout_s=20))[-1]
    assert record.outcome is Outcome.CLIENT_DISCONNECT
    assert 0 < record.content_bytes <= sent
    assert record.attempts[0].usage is not None


async def test_a_client_that_leaves_is_noticed_at_once(gateway: Harness) -> None:
    """While nothing comes from upstream and while nothing was sent: before and after content."""
    for steps in ((STALL,), (head(), piece(event(delta("Hel"))), STALL)):
        async with Upstream(steps) as upstream:
            gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
            client = connected(gateway)
            await until(lambda upstream=upstream: len(upstream.received) == 1)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            left = time.monotonic()
            client.close()
            await until(lambda upstream=upstream: upstream.gone_at is not None)  # type: ignore[misc]
            assert upstream.gone_at is not None
            assert upstream.gone_at - left < 1.0
