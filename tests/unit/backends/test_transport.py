"""HTTP/1.1 on connections without a network: framing under any cut, and the pool's promises."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.transport import (
    MAX_HEAD_BYTES,
    MAX_UNREAD_BYTES,
    Connection,
    Incoming,
    Origin,
    Pool,
    Request,
    encode,
)

ASK = Request(target=b"/v1/x", headers=[(b"host", b"h")], body=b"{}")
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n3;ext=1\r\nyou\r\n0\r\ntrailer: t\r\n\r\n"
)
TO_THE_CLOSE = b"HTTP/1.0 200 OK\r\nX-Y: 1\r\n\r\nuntil the end"


class FakeTransport:
    """Keeps what is written; the test plays the server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.written = b""
        self.is_closed = False
        self.is_paused = False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def lose(self, error: Exception | None = None) -> None:
        """The server ends the connection."""
        if not self.is_closed:
            self.is_closed = True
            self.connection.connection_lost(error)

    def serve(self, data: bytes) -> None:
        """Bytes arrive."""
        if not self.is_closed:
            self.connection.data_received(data)


class Server:
    """Dials fakes and keeps them, in order."""

    def __init__(self) -> None:
        self.transports: list[FakeTransport] = []
        self.refuses = False
        self.hangs = False

    async def __call__(self, origin: Origin, new: Callable[[], Connection]) -> Connection:
        await asyncio.sleep(3600 if self.hangs else 0)
        if self.refuses:
            raise httpx.ConnectError("refused")
        connection = new()
        transport: Any = FakeTransport(connection)
        connection.connection_made(transport)
        self.transports.append(transport)
        return connection


def a_pool(**changes: Any) -> tuple[Pool, Server]:
    server = Server()
    return Pool(Origin(host="h", port=80), server, **{"max_connections": 2, **changes}), server


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def sending(pool: Pool, request: Request = ASK, until_s: float = 5.0) -> "asyncio.Task[Incoming]":
    return asyncio.ensure_future(pool.send(request, until=soon(until_s)))


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def body_of(answer: Incoming) -> bytes:
    parts = []
    while piece := await answer.read(soon()):
        parts.append(piece)
    return b"".join(parts)


async def exchange(pool: Pool, server: Server, data: bytes = OK) -> bytes:
    """One request, answered on whatever connection it took."""
    task = sending(pool)
    await turns()
    busy = [one for one in server.transports if not one.is_closed and one.connection.answer]
    busy[-1].serve(data)
    answer = await task
    body = await body_of(answer)
    answer.close()
    await turns()
    return body


# --- framing ----------------------------------------------------------------------------------


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if data[a:b]]


GOOD = {
    OK: b"hi",
    CHUNKED: b"helloyou",
    TO_THE_CLOSE: b"until the end",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK: b"hi",
    b"HTTP/1.1 204 No Content\r\n\r\n": b"",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n": b"",
}


async def play(pieces: list[bytes], *, ends: bool) -> tuple[bytes, Incoming]:
    """The body that one request gets from these reads; then the server ends the connection."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    for piece in pieces:
        server.transports[0].serve(piece)
        await asyncio.sleep(0)
    if ends:
        server.transports[0].lose()
    answer = await task
    try:
        return await body_of(answer), answer
    finally:
        answer.close()
        await pool.aclose()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(GOOD)), st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_gives_the_same_answer(data: bytes, at: list[int]) -> None:
    """What arrives does not depend on how the network cut it."""
    body, answer = asyncio.run(play(cut(data, at), ends=data is TO_THE_CLOSE))
    assert body == GOOD[data]
    assert answer.status in (200, 204)
    assert b"link" not in answer.headers and b"trailer" not in answer.headers


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([OK, CHUNKED]), st.integers(0, 400), st.lists(st.integers(0, 400)))
def test_a_truncated_answer_is_never_whole(data: bytes, length: int, at: list[int]) -> None:
    """Wherever the connection ends, short of the end of the framing, an error says so."""
    short = data[: length % len(data)]
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(play(cut(short, at), ends=True))


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.tuples(st.sampled_from(list(GOOD)), st.integers(0, 300), st.binary(max_size=8)).map(
            lambda made: made[0][: made[1]] + made[2] + made[0][made[1] + len(made[2]) :]
        ),
    ),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_garbage_is_an_answer_or_an_error_of_httpx(data: bytes, at: list[int]) -> None:
    """Nothing else comes out, whatever a server sends."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        asyncio.run(play(cut(data, at), ends=True))


@pytest.mark.parametrize(
    "data",
    [
        b"220 smtp.example\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD_BYTES // 20),
    ],
    ids=["smtp", "101", "both lengths", "two lengths", "gzip", "head", "1xx without end"],
)
async def test_what_is_refused(data: bytes) -> None:
    """Framing that two readers could read differently, and heads without end."""
    with pytest.raises(httpx.RemoteProtocolError):
        await play([data], ends=False)


async def test_trailers_are_bounded() -> None:
    """A body that has ended, or nearly, is no place for megabytes."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    server.transports[0].serve(CHUNKED[: -len(b"trailer: t\r\n\r\n")])
    answer = await task
    for _ in range(20):
        server.transports[0].serve(b"t: " + b"y" * 8_000 + b"\r\n")
    assert await answer.read(soon()) == b"helloyou"
    with pytest.raises(httpx.RemoteProtocolError):
        await answer.read(soon())
    assert server.transports[0].is_closed
    assert pool.open_connections == 0


async def test_an_answer_to_head_has_no_body() -> None:
    """Whatever length it names; its connection is not used again."""
    pool, server = a_pool()
    task = sending(pool, Request(method=b"HEAD", target=b"/", headers=[]))
    await turns()
    server.transports[0].serve(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n")
    assert await body_of(await task) == b""
    assert server.transports[0].is_closed


async def test_a_slow_reader_stops_the_socket() -> None:
    """What was read and nobody has taken is bounded; taking it reads on."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    (transport,) = server.transports
    transport.serve(b"HTTP/1.1 200 OK\r\n\r\n")
    answer = await task
    while not transport.is_paused:
        transport.serve(b"x" * 65_536)
    taken = await answer.read(soon())
    assert MAX_UNREAD_BYTES < len(taken) <= MAX_UNREAD_BYTES + 65_536
    assert not transport.is_paused
    answer.close()
    await pool.aclose()


@pytest.mark.parametrize(
    "request_",
    [
        Request(target=b"/", headers=[(b"x", b"a\r\nevil: 1")]),
        Request(target=b"/", headers=[(b"x", b"a\nb")]),
        Request(target=b"/", headers=[(b"x\r\ny", b"a")]),
        Request(target=b"/ HTTP/1.1\r\nx: y", headers=[]),
        Request(target=b"/a b", headers=[]),
        Request(target=b"/", headers=[(b"x", b"a\0b")]),
    ],
)
def test_a_request_cannot_be_split(request_: Request) -> None:
    """No value ends its line, and the error does not quote it."""
    with pytest.raises(httpx.LocalProtocolError) as caught:
        encode(request_)
    assert "evil" not in str(caught.value)


# --- waiting ----------------------------------------------------------------------------------


async def test_a_limit_may_move_both_ways() -> None:
    """Each read has its own end, earlier or later than the last one's."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    server.transports[0].serve(b"HTTP/1.1 200 OK\r\n\r\nab")
    answer = await task
    assert await answer.read(soon(60)) == b"ab"
    for seconds in (0.02, 0.05, 0.01):
        began = soon(0)
        with pytest.raises(TimeoutError):
            await answer.read(soon(seconds))
        assert seconds - 0.002 <= soon(0) - began < seconds + 1
    server.transports[0].serve(b"c")
    assert await answer.read(soon(0.01)) == b"c"
    answer.close()
    await pool.aclose()


async def test_no_head_in_time_closes_the_connection() -> None:
    """The request may still be worked on there: nobody else gets that connection."""
    pool, server = a_pool()
    with pytest.raises(TimeoutError):
        await sending(pool, until_s=0.02)
    assert server.transports[0].is_closed
    await turns()
    assert pool.open_connections == 0


async def test_cancelling_closes_the_connection_at_once() -> None:
    """While the head is awaited."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    task.cancel()
    await turns(1)
    assert server.transports[0].is_closed
    await turns()
    assert pool.open_connections == 0


async def test_opening_has_its_own_limit() -> None:
    """A host that swallows packets is a ConnectTimeout; the end of the attempt is not."""
    pool, server = a_pool()
    server.hangs = True
    with pytest.raises(httpx.ConnectTimeout):
        await pool.send(Request(target=b"/", headers=[], connect_s=0.02), until=soon())
    with pytest.raises(TimeoutError):
        await pool.send(Request(target=b"/", headers=[], connect_s=5), until=soon(0.02))
    assert pool.open_connections == 0


# --- the pool ---------------------------------------------------------------------------------


async def test_the_last_one_used_is_used_next() -> None:
    """So that those which are not needed grow old."""
    pool, server = a_pool()
    first, second = sending(pool), sending(pool)
    await turns()
    for transport in server.transports:
        transport.serve(OK)
    await asyncio.gather(first, second)
    await exchange(pool, server)
    await exchange(pool, server)
    assert [one.written.count(b"POST") for one in server.transports] == [1, 3]
    await pool.aclose()


async def test_requests_wait_in_order() -> None:
    """With every connection busy, and no longer than their time."""
    pool, server = a_pool(max_connections=1)
    busy = sending(pool)
    await turns()
    order: list[int] = []

    async def one(number: int) -> None:
        answer = await sending(pool)
        order.append(number)
        answer.close()

    tasks = [asyncio.ensure_future(one(number)) for number in range(3)]
    await turns()
    impatient = asyncio.ensure_future(
        pool.send(Request(target=b"/", headers=[], connect_s=0.01), until=soon())
    )
    with pytest.raises(httpx.ConnectTimeout):
        await impatient
    server.transports[0].serve(OK)
    (await busy).close()
    for _ in tasks:
        await turns()
        server.transports[-1].serve(OK)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert len(server.transports) == 1
    await pool.aclose()


@pytest.mark.parametrize(
    "ending",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        OK + b"HTTP/1.1 200 OK\r\n",
        OK + b"x",
    ],
    ids=["close", "second answer", "a byte"],
)
async def test_what_is_left_over_ends_the_connection(ending: bytes) -> None:
    """The answer counts; the connection is not used again."""
    pool, server = a_pool()
    await exchange(pool, server, ending)
    assert server.transports[0].is_closed
    assert pool.open_connections == 0


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    """Else they would be the answer to the next request."""
    pool, server = a_pool()
    await exchange(pool, server)
    server.transports[0].serve(OK)
    await turns()
    assert server.transports[0].is_closed
    assert pool.open_connections == 0


async def test_an_answer_before_the_request_is_out_ends_the_connection() -> None:
    """A server that refuses early leaves the rest of the body in the pipe."""
    pool, server = a_pool()
    task = sending(pool)
    await turns()
    server.transports[0].unsent = 100
    server.transports[0].serve(OK)
    assert await body_of(await task) == b"hi"
    assert server.transports[0].is_closed


async def test_idle_and_old_connections_are_closed() -> None:
    """The idle ones by themselves, the old ones after use."""
    pool, server = a_pool(keepalive_s=0.02)
    await exchange(pool, server)
    await asyncio.sleep(0.05)
    assert server.transports[0].is_closed
    assert pool.open_connections == 0
    pool, server = a_pool(max_age_s=0.0)
    await exchange(pool, server)
    await exchange(pool, server)
    assert len(server.transports) == 2
    await pool.aclose()


async def test_a_stale_connection_is_replaced_once() -> None:
    """The server closed it while the request went out: nothing came back, so it is sent anew."""
    pool, server = a_pool()
    await exchange(pool, server)
    task = sending(pool)
    await turns()
    server.transports[0].lose()
    await turns()
    assert len(server.transports) == 2
    server.transports[1].lose()
    with pytest.raises(httpx.RemoteProtocolError):
        await task
    assert len(server.transports) == 2


@pytest.mark.parametrize("case", ["new", "begun"])
async def test_nothing_else_is_sent_twice(case: str) -> None:
    """Not on a new connection, whose end is an answer of a kind; not after a byte came back."""
    pool, server = a_pool()
    if case == "begun":
        await exchange(pool, server)
    task = sending(pool)
    await turns()
    if case == "begun":
        server.transports[0].serve(b"H")
    server.transports[0].lose(ConnectionResetError())
    with pytest.raises(httpx.TransportError):
        await task
    assert len(server.transports) == 1


async def test_who_waits_learns_of_a_failed_opening() -> None:
    """A place that could not be filled goes to the next one."""
    pool, server = a_pool(max_connections=1)
    server.refuses = True
    tasks = [sending(pool) for _ in range(3)]
    for task in tasks:
        with pytest.raises(httpx.ConnectError):
            await task
    assert pool.open_connections == 0


async def test_closing_ends_everything() -> None:
    """Those who read, those who wait, and those who come later."""
    pool, server = a_pool(max_connections=1)
    reading, waiting = sending(pool), sending(pool)
    await turns()
    await pool.aclose()
    for task in (reading, waiting, sending(pool)):
        with pytest.raises(httpx.TransportError):
            await task
    assert server.transports[0].is_closed


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "answer", "answer", "close answer", "cancel", "lose", "reset", "stray"]
        ),
        st.integers(0, 20),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_no_connection_is_shared_and_none_leaks(steps: list[tuple[str, int, int]]) -> None:
    """Whatever clients and server do, in whatever order: one request at a time on a connection,
    never more connections than allowed, everybody served or told, nothing left at the end."""

    async def run() -> None:
        pool, server = a_pool(max_connections=3)
        tasks: list[asyncio.Task[bytes]] = []

        async def one(number: int) -> bytes:
            request = Request(target=b"/%d" % number, headers=[])
            answer = await pool.send(request, until=soon(60))
            try:
                return await body_of(answer)
            finally:
                answer.close()

        for action, which, wait in steps:
            alive = [one for one in server.transports if not one.is_closed]
            busy = [one for one in alive if one.connection.answer is not None]
            if action == "ask":
                tasks.append(asyncio.ensure_future(one(len(tasks))))
            elif action == "cancel" and tasks:
                tasks[which % len(tasks)].cancel()
            elif action in ("answer", "close answer") and busy:
                chosen = busy[which % len(busy)]
                target = chosen.written.split(b"POST /")[-1].split(b" ")[0]
                keep = b"" if action == "answer" else b"connection: close\r\n"
                chosen.serve(
                    b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s"
                    % (keep, len(target), target)
                )
            elif action == "lose" and alive:
                alive[which % len(alive)].lose()
            elif action == "reset" and alive:
                alive[which % len(alive)].lose(ConnectionResetError())
            elif action == "stray" and alive:
                alive[which % len(alive)].serve(b"?")
            for transport in alive:  # as many requests as answers, or one more
                answer = transport.connection.answer
                assert answer is None or transport.written.count(b"POST /") > 0
            await turns(wait)
            assert len([one for one in server.transports if not one.is_closed]) <= 3
            assert 0 <= pool.idle_connections <= pool.open_connections <= 3
        for _ in range(3 * len(tasks) + 3):
            for transport in [one for one in server.transports if not one.is_closed]:
                if transport.connection.answer is not None:
                    target = transport.written.split(b"POST /")[-1].split(b" ")[0]
                    transport.serve(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(target), target)
                    )
            await turns()
        for number, task in enumerate(tasks):
            assert task.done()
            if not task.cancelled() and task.exception() is None:
                assert task.result() == b"%d" % number  # its own answer, nobody else's
        alive = [one for one in server.transports if not one.is_closed]
        assert pool.open_connections == pool.idle_connections == len(alive)
        await pool.aclose()
        await turns()
        assert pool.open_connections == 0

    asyncio.run(run())
