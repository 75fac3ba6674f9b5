"""HTTP/1.1 to one origin: connections kept alive, a request out, an answer in as it arrives.

It knows bytes, sockets and the rules of HTTP, and nothing of models, of JSON or of where it may
connect: who opens connections is passed in (`egress`). Errors are httpx's, which callers know.
Invariants: a connection serves one request at a time; it is used again only after an answer that
ended by the rules with nothing left over on either side; closing an answer that has not ended
closes its connection at once; what was read and not taken is bounded. Why our own: ADR 0012.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import httptools
import httpx
from msgspec import Struct
from typing_extensions import override

KEEPALIVE_S: Final = 15.0  # an idle connection is kept so long
MAX_AGE_S: Final = 300.0  # an older one is not used again, so that a name that moved is followed
MAX_HEAD_BYTES: Final = 64 * 1024  # of a head, of trailers, of whatever is not body
MAX_UNREAD_BYTES: Final = 256 * 1024  # of a body that nobody takes: then the socket is left alone
REPLAY_S: Final = 1.0  # a kept connection that ends so soon after a request had ended before it
_IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})

Header = tuple[bytes, bytes]


class Request(Struct, frozen=True, kw_only=True):
    """One request. `headers` go out as they are; content-length is added."""

    method: bytes = b"POST"
    target: bytes  # path and query
    headers: Sequence[Header]
    body: bytes = b""
    connect_s: float | None = None  # to get a connection, old or new; None: as long as `until`


class Answer(Protocol):
    """An answer whose head is here. `close` it whatever happens; a second time does nothing."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Names in lower case; of a name given twice, the last."""
        ...

    async def read(self, until: float) -> bytes:
        """All that arrived since the last call, at least a byte; b"" at the end. TimeoutError at
        `until` (the loop's time), an httpx error when the answer breaks off."""
        ...

    def close(self) -> None: ...


class Client(Protocol):
    """Whatever sends requests to one upstream."""

    async def send(self, request: Request, *, until: float) -> Answer:
        """The answer once its head is here. TimeoutError at `until`; httpx.ConnectTimeout or
        PoolTimeout after `connect_s`; other errors of httpx."""
        ...

    async def aclose(self) -> None: ...


class Origin(Struct, frozen=True, kw_only=True):
    """Where connections go: a host and port, over TLS if there is a context, or a Unix socket."""

    host: str
    port: int
    ssl_context: ssl.SSLContext | None = None
    socket_path: str | None = None


class Connection(asyncio.Protocol):
    """One socket, and the answer that it is bringing, if any."""

    __slots__ = ("_on_lost", "answer", "idle_since", "made_at", "transport", "uses")

    def __init__(self, on_lost: Callable[["Connection"], None]) -> None:
        self.transport: Any = None  # asyncio's and uvloop's share no type
        self.answer: Incoming | None = None
        self.made_at = 0.0
        self.idle_since = 0.0
        self.uses = 0
        self._on_lost = on_lost

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        if self.answer is not None:
            self.answer.feed(data)
        else:  # nobody asked: it would be taken for the answer to the next request
            self.transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None:
            self.answer.ended(exc)
        self._on_lost(self)


Dial = Callable[[Origin, Callable[[], Connection]], Awaitable[Connection]]


class Incoming:
    """The answer that a connection is bringing. The parser calls `on_…`, the reader `read`."""

    __slots__ = (
        *("_body", "_body_bytes", "_connection", "_error", "_is_bodyless", "_is_paused", "_loop"),
        *("_may_keep", "_parser", "_pool", "_quiet_bytes", "_timer", "_timer_at", "_until"),
        *("_waiter", "headers", "is_begun", "is_complete", "is_to_the_close", "status"),
    )

    def __init__(
        self,
        pool: "Pool",
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        *,
        is_bodyless: bool,
    ) -> None:
        self.status = 0  # 0: the head is not complete yet
        self.headers: dict[bytes, bytes] = {}
        self.is_begun = False  # a byte has arrived
        self.is_complete = False
        self.is_to_the_close = False  # the body has no length: it ends with the connection
        self._is_bodyless = is_bodyless  # an answer to HEAD
        self._pool = pool
        self._connection: Connection | None = connection
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._quiet_bytes = 0  # arrived since the last byte of the body
        self._error: httpx.TransportError | None = None
        self._may_keep = False
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0  # for `_waiter`
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # -- the reader's side --

    async def head(self, until: float) -> None:
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._more(until)

    async def read(self, until: float) -> bytes:
        """See `Answer.read`."""
        while not self._body:
            if self.is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._more(until)
        body = self._body
        self._body = []
        self._body_bytes = 0
        if self._is_paused and self._connection is not None:
            self._is_paused = False
            self._connection.transport.resume_reading()
        return body[0] if len(body) == 1 else b"".join(body)

    def _more(self, until: float) -> asyncio.Future[None]:
        """Done when something happened. The timer is left where it is while it fires early
        enough: a stream moves its limit with each piece, and timers are not cheap."""
        self._until = until
        if self._timer is None or until < self._timer_at:
            self._set_timer(until)
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def close(self) -> None:
        """Let go. An answer that has not ended takes its connection with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._body = []
        connection = self._detach()
        if connection is not None:
            self._pool.discard(connection)

    def _detach(self) -> Connection | None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.answer = None
        return connection

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # nobody waits; the next who does sets it anew
        if self._until > self._loop.time():
            self._set_timer(self._until)
        else:
            self._waiter = None
            waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # -- the socket's side --

    def feed(self, data: bytes) -> None:
        self.is_begun = True
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._may_keep = False
            if not self.is_complete and self._error is None:
                self._error = httpx.RemoteProtocolError("the answer breaks the rules of HTTP")
        if self._quiet_bytes > MAX_HEAD_BYTES and self._error is None:
            self._error = httpx.RemoteProtocolError("the head of the answer is too large")
        connection = self._connection
        if connection is None:
            return
        if self._error is not None:
            self._detach()
            self._pool.discard(connection)
        elif self.is_complete:
            self._detach()
            self._pool.give_back(connection, may_keep=self._may_keep)
        elif self._body_bytes > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            connection.transport.pause_reading()
        waiter = self._waiter  # `_wake`, written out: this is where every chunk passes
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def ended(self, error: Exception | None) -> None:
        """The connection is gone: the end of a body without length, a break of any other."""
        self._connection = None
        if self.is_to_the_close and error is None:
            self.is_complete = True
        elif self._error is None:
            self._error = (
                httpx.RemoteProtocolError("the connection ended before the answer did")
                if error is None
                else httpx.ReadError("the connection broke")
            )
        self._wake()

    # -- the parser's side: what these raise would be lost, so they raise nothing --

    def on_message_begin(self) -> None:
        if self.is_complete:  # an answer that nobody asked for
            self._may_keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        parser = self._parser
        status: int = parser.get_status_code()
        if self.status:
            return
        if status < 200:
            self.headers = {}
            if status == 101:
                self._error = httpx.RemoteProtocolError("the server changes the protocol")
            return
        self._may_keep = parser.should_keep_alive()
        encoding = self.headers.get(b"transfer-encoding")
        if encoding is None:
            has_no_body = self._is_bodyless or status in (204, 304)
            self.is_to_the_close = b"content-length" not in self.headers and not has_no_body
        elif encoding.lower() != b"chunked":
            self._error = httpx.RemoteProtocolError("the answer has an unknown transfer encoding")
            return
        if self._is_bodyless:
            self._may_keep = False  # the parser cannot be told, and waits for a body
            self.is_complete = True
        self.status = status

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._quiet_bytes = 0
            self._body_bytes += len(data)
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self.status:
            self.is_complete = True


class Pool:
    """Connections to one origin. The one used last is used next, so that what is not needed grows
    old and goes. With all of them busy, requests wait in the order they came."""

    def __init__(
        self,
        origin: Origin,
        dial: Dial,
        *,
        max_connections: int = 256,
        keepalive_s: float = KEEPALIVE_S,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._origin = origin
        self._dial = dial
        self._max_connections = max_connections
        self._keepalive_s = keepalive_s
        self._max_age_s = max_age_s
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # the longest idle first
        self._taken = 0  # places: open connections, and those being opened
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        """Connections that are open or being opened."""
        return self._taken

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def send(self, request: Request, *, until: float) -> Incoming:
        """See `Client.send`. A kept connection may have been closed by the server just as the
        request went out. Then, and only if not a byte came back, it is sent once more."""
        data = encode(request)
        loop = asyncio.get_running_loop()
        may_replay = True
        while True:
            connection = await self._connection(loop, request.connect_s, until)
            may_replay = may_replay and connection.uses > 0
            connection.uses += 1
            answer = Incoming(self, connection, loop, is_bodyless=request.method == b"HEAD")
            connection.answer = answer
            sent_at = loop.time()
            try:
                connection.transport.write(data)
                await answer.head(until)
            except httpx.TransportError:
                answer.close()
                soon = loop.time() - sent_at < REPLAY_S or request.method in _IDEMPOTENT
                if not may_replay or answer.is_begun or not soon:
                    raise
                may_replay = False
                self._drop_idle()  # they are as old: the next one is opened anew
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    async def aclose(self) -> None:
        """Close all connections, also those in use."""
        self._is_closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        for connection in list(self._open):
            connection.transport.abort()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(httpx.ConnectError("the client is closed"))
        await asyncio.sleep(0)  # the transports say goodbye in the loop's next turn

    # -- an answer's side --

    def give_back(self, connection: Connection, *, may_keep: bool) -> None:
        """An answer has ended by the rules."""
        transport = connection.transport
        if (
            not may_keep
            or self._is_closed
            or transport.is_closing()
            or transport.get_write_buffer_size()  # answered before the request was out
        ):
            self.discard(connection)
            return
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(connection)
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = loop.call_later(self._keepalive_s, self._reap)

    def discard(self, connection: Connection) -> None:
        """Close a connection and give its place to the next who waits. Twice is once."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        connection.transport.abort()
        self._free_place()

    # -- getting one --

    async def _connection(
        self, loop: asyncio.AbstractEventLoop, connect_s: float | None, until: float
    ) -> Connection:
        if not self._waiters:
            connection = self._take_idle(loop)
            if connection is not None:
                return connection
        limit = until if connect_s is None else min(loop.time() + connect_s, until)
        try:
            async with asyncio.timeout_at(limit):
                return await self._wait_or_open(loop)
        except TimeoutError:
            if limit < until:
                raise httpx.ConnectTimeout("no connection in time") from None
            raise

    async def _wait_or_open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        if self._is_closed:
            raise httpx.ConnectError("the client is closed")
        if self._waiters or self._taken >= self._max_connections:
            waiter: asyncio.Future[Connection | None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                given = await waiter
            except BaseException:
                self._pass_on(waiter)
                raise
            if given is not None and not given.transport.is_closing():
                return given
            if given is not None:  # it ended between being given and being taken
                return await self._wait_or_open(loop)
        else:
            self._taken += 1
        return await self._open_one(loop)

    def _pass_on(self, waiter: "asyncio.Future[Connection | None]") -> None:
        """Who waited has gone: what it was given meanwhile is the next one's."""
        if not waiter.done() or waiter.cancelled():
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        elif waiter.exception() is None:
            given = waiter.result()
            if given is None:
                self._free_place()
            else:
                self.give_back(given, may_keep=True)

    async def _open_one(self, loop: asyncio.AbstractEventLoop) -> Connection:
        """Into the place that is taken already."""
        try:
            connection = await self._dial(self._origin, self._new)
        except BaseException:
            self._free_place()
            raise
        connection.made_at = loop.time()
        self._open.add(connection)
        if connection.transport.is_closing() or self._is_closed:
            self.discard(connection)
            raise httpx.ConnectError("the connection ended as soon as it was open")
        return connection

    def _new(self) -> Connection:
        return Connection(self.discard)

    def _take_idle(self, loop: asyncio.AbstractEventLoop) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            now = loop.time()
            if (
                not connection.transport.is_closing()
                and now - connection.idle_since < self._keepalive_s
                and now - connection.made_at < self._max_age_s
            ):
                return connection
            self.discard(connection)
        return None

    def _next_waiter(self) -> "asyncio.Future[Connection | None] | None":
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

    def _free_place(self) -> None:
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(None)
        else:
            self._taken -= 1

    def _drop_idle(self) -> None:
        for connection in list(self._idle):
            self.discard(connection)

    def _reap(self) -> None:
        """Close what has been idle for too long."""
        self._reaper = None
        loop = asyncio.get_running_loop()
        while self._idle:
            left_s = self._idle[0].idle_since + self._keepalive_s - loop.time()
            if left_s > 0:
                self._reaper = loop.call_later(left_s, self._reap)
                return
            self.discard(self._idle[0])


def encode(request: Request) -> bytes:
    """The request's bytes. A header that would end early is refused, and not quoted."""
    lines = b"".join([b"%s: %s\r\n" % header for header in request.headers])
    if request.body or request.method == b"POST":
        lines += b"content-length: %d\r\n" % len(request.body)
    head = b"%s %s HTTP/1.1\r\n%s\r\n" % (request.method, request.target, lines)
    is_sized = request.body or request.method == b"POST"
    count = len(request.headers) + (3 if is_sized else 2)
    if head.count(b"\n") != count or head.count(b"\r") != count or b"\0" in head:
        raise httpx.LocalProtocolError("a header holds a line break or the like")
    if b" " in request.target:
        raise httpx.LocalProtocolError("the target holds a space")
    return head + request.body
