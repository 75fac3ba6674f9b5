"""HTTP/2 to one origin: many requests on one connection, behind `transport.Client`.

The framing, its state and its flow control are the library h2's; this module owns sockets, waiting
and which connection a request goes on. A server that chooses HTTP/1.1 in the TLS handshake is
served by the pool of `transport`. Errors are httpx's, as there. Invariants: what was read and not
taken is bounded for each stream by its window, which is opened again only as the reader takes;
closing an answer that has not ended resets its stream and nothing else; a request is sent again, on
another connection, only if the server said that it did not process it (GOAWAY, REFUSED_STREAM).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import httpx
from typing_extensions import override

from backends.transport import MAX_AGE_S, MAX_HEAD_BYTES, Answer, Client, Origin, Request, encode

STREAM_WINDOW: Final = 256 * 1024  # of a body that nobody takes
CONNECTION_WINDOW: Final = 2**31 - 1  # streams bound themselves: a slow one must not stop others
IDLE_S: Final = 60.0  # a connection without a stream is kept so long
MAX_STREAMS: Final = 100  # on a connection, until the server says how many
_GOAWAY: Final = 7
_FRAME_HEAD: Final = 9
_NOT_SENT: Final = frozenset({b"host", b"connection", b"keep-alive", b"transfer-encoding"})


class NotProcessed(httpx.RemoteProtocolError):
    """The server says that it has not begun with the request: it may be sent again."""


class Http1Chosen(Exception):
    """The server chose HTTP/1.1 in the TLS handshake."""


class Stream:
    """The answer to one request. Use as `transport.Answer`."""

    __slots__ = (
        *("_body", "_connection", "_error", "_loop", "_unacked", "_waiter"),
        *("headers", "id", "is_complete", "status"),
    )

    def __init__(self, connection: "Http2Connection", stream_id: int) -> None:
        self.id = stream_id
        self.status = 0  # 0: the head is not here yet
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = False
        self._connection: Http2Connection | None = connection
        self._loop = asyncio.get_running_loop()
        self._body: list[bytes] = []
        self._unacked = 0  # of the window: given back as the reader takes
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head(self, until: float) -> None:
        while not self.status:
            if self._error is not None:
                raise self._error
            await self.wait(until)

    async def read(self, until: float) -> bytes:
        """See `Answer.read`."""
        while not self._body:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            await self.wait(until)
        body, self._body = self._body, []
        if self._connection is not None:
            self._connection.taken(self, self._unacked)
        self._unacked = 0
        return body[0] if len(body) == 1 else b"".join(body)

    async def wait(self, until: float) -> None:
        """Until something happened to the stream. TimeoutError at `until`."""
        waiter = self._waiter = self._loop.create_future()
        async with asyncio.timeout_at(until):
            await waiter

    def close(self) -> None:
        """Let go. A stream that has not ended is reset, and the connection goes on."""
        connection, self._connection = self._connection, None
        self._body = []
        if connection is not None:
            connection.leave(self, self._unacked)

    # -- the connection's side --

    def began(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        self.wake()

    def got(self, data: bytes, flow_bytes: int) -> None:
        self._unacked += flow_bytes
        if data:
            self._body.append(data)
            self.wake()

    def ended(self, error: httpx.TransportError | None) -> None:
        if error is None and self.status:
            self.is_complete = True
        elif not self.is_complete and self._error is None:
            self._error = error or httpx.RemoteProtocolError("the stream ended without a head")
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Http2Connection(asyncio.Protocol):
    """One socket, and the streams on it."""

    def __init__(self, on_change: Callable[["Http2Connection"], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self.is_usable = False  # it takes new streams
        self.made_at = 0.0
        self.idle_since = 0.0
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._raw = b""
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=False)
        )
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES,
            },
        )

    @property
    def room(self) -> int:
        """Streams that may be begun now."""
        if not self.is_usable:
            return 0
        limit = min(self._h2.remote_settings.max_concurrent_streams, MAX_STREAMS)
        return max(0, limit - len(self.streams))

    # -- asyncio's side --

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            return  # `Http2Pool` looks, and goes on with HTTP/1.1
        self.made_at = self.idle_since = self._loop.time()
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        self.is_usable = True
        self._flush()

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(self._without_goaway(data)):
                self._handle(event)
        except h2.exceptions.ProtocolError:
            self._flush()
            self.abort(httpx.RemoteProtocolError("the server breaks the rules of HTTP/2"))
            return
        self._flush()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end(httpx.ReadError("the connection broke"))

    @override
    def pause_writing(self) -> None:
        """The peer's windows bound what is buffered; there is nothing to hold back."""

    def abort(self, error: httpx.TransportError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: httpx.TransportError) -> None:
        self.is_usable = False
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.ended(error)
        self._on_change(self)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    # -- what the server says --

    def _without_goaway(self, data: bytes) -> bytes:
        """Whole frames, and GOAWAY handled here: for h2 it ends the connection, for streams that
        the server has begun it does not (RFC 9113, 6.8)."""
        self._raw += data
        whole: list[bytes] = []
        while len(self._raw) >= _FRAME_HEAD:
            size = _FRAME_HEAD + int.from_bytes(self._raw[:3], "big")
            if size - _FRAME_HEAD > self._h2.max_inbound_frame_size:
                raise h2.exceptions.FrameTooLargeError("a frame larger than was agreed")
            if len(self._raw) < size:
                break
            frame, self._raw = self._raw[:size], self._raw[size:]
            if frame[3] == _GOAWAY and size >= _FRAME_HEAD + 8:
                self._going_away(int.from_bytes(frame[9:13], "big") & 0x7FFF_FFFF)
            else:
                whole.append(frame)
        return b"".join(whole)

    def _going_away(self, last_stream_id: int) -> None:
        self.is_usable = False
        for stream_id in [one for one in self.streams if one > last_stream_id]:
            self.streams.pop(stream_id).ended(NotProcessed("the server goes away"))
        self._on_change(self)
        self._close_if_done()

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                headers = dict(event.headers)
                status = headers.pop(b":status", b"0")
                stream = self.streams.get(event.stream_id)
                if stream is not None:
                    stream.began(int(status), headers)
            case h2.events.DataReceived():
                stream = self.streams.get(event.stream_id)
                if stream is not None:
                    stream.got(event.data, event.flow_controlled_length)
                elif event.flow_controlled_length:  # of one that was let go
                    self._give_back(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self._ended(event.stream_id, None)
            case h2.events.StreamReset():
                refused = event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
                self._ended(
                    event.stream_id,
                    NotProcessed("the server refused the stream")
                    if refused
                    else httpx.ReadError("the server reset the stream"),
                )
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for stream in list(self.streams.values()):
                    stream.wake()  # those that send look again
                self._on_change(self)
            case _:
                pass  # pings and acknowledgements are h2's; trailers and hints are nobody's

    def _ended(self, stream_id: int, error: httpx.TransportError | None) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.ended(error)
            self._on_change(self)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.streams:
            return
        self.idle_since = self._loop.time()
        if not self.is_usable:
            self._transport.close()

    # -- the reader's side --

    async def begin(
        self, request: Request, authority: bytes, scheme: bytes, until: float
    ) -> Stream:
        """Send a request, as fast as the server's windows let it. The answer may begin before."""
        headers = [
            (b":method", request.method),
            (b":authority", authority),
            (b":scheme", scheme),
            (b":path", request.target),
            *((name, value) for name, value in request.headers if name not in _NOT_SENT),
        ]
        body = request.body
        if body or request.method == b"POST":
            headers.append((b"content-length", b"%d" % len(body)))
        stream_id = self._h2.get_next_available_stream_id()
        stream = self.streams[stream_id] = Stream(self, stream_id)
        try:
            self._h2.send_headers(stream_id, headers, end_stream=not body)
            self._flush()
            await self._send(stream, memoryview(body), until)
        except h2.exceptions.H2Error:
            stream.close()
            raise httpx.LocalProtocolError("the request breaks the rules of HTTP/2") from None
        except BaseException:
            stream.close()
            raise
        return stream

    async def _send(self, stream: Stream, body: memoryview, until: float) -> None:
        while body and stream.id in self.streams and not stream.status:
            window = min(
                self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size
            )
            if window <= 0:
                await stream.wait(until)
                continue
            part, body = body[:window], body[window:]
            self._h2.send_data(stream.id, bytes(part), end_stream=not body)
            self._flush()

    def taken(self, stream: Stream, flow_bytes: int) -> None:
        if flow_bytes and self._transport is not None and not self._transport.is_closing():
            self._give_back(flow_bytes, stream.id)
            self._flush()

    def _give_back(self, flow_bytes: int, stream_id: int) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # then the stream is over
            self._h2.acknowledge_received_data(flow_bytes, stream_id)

    def leave(self, stream: Stream, flow_bytes: int) -> None:
        """The reader goes. What it did not read is given back to the connection."""
        if self._transport.is_closing():
            return
        if flow_bytes:
            self._give_back(flow_bytes, stream.id)
        if self.streams.pop(stream.id, None) is not None:
            with contextlib.suppress(h2.exceptions.ProtocolError):  # it has ended meanwhile
                self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)
            self._on_change(self)
        self._flush()
        self._close_if_done()


class Open(Protocol):
    """Opens a socket to the origin for a protocol (`egress.Dialer`)."""

    def __call__(self, origin: Origin, new: Callable[[], Any], /) -> Awaitable[Any]: ...


class Http2Pool:
    """Requests to one origin, at most `max_requests` at a time. Use as `transport.Client`."""

    def __init__(
        self,
        origin: Origin,
        authority: str,
        dial: Open,
        *,
        fallback: Callable[[], Client],
        max_requests: int = 256,
        idle_s: float = IDLE_S,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._origin = origin
        self._authority = authority.encode("ascii")
        self._scheme = b"https" if origin.ssl_context is not None else b"http"
        self._dial = dial
        self._make_fallback = fallback
        self._fallback: Client | None = None
        self._max_requests = max_requests
        self._idle_s = idle_s
        self._max_age_s = max_age_s
        self._connections: list[Http2Connection] = []
        self._opening: asyncio.Task[Http2Connection] | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def send(self, request: Request, *, until: float) -> Answer:
        """See `Client.send`."""
        if self._fallback is not None:
            return await self._fallback.send(request, until=until)
        encode(request)  # raises for a header that would end early
        may_repeat = True
        while True:
            try:
                connection = await self._with_room(request.connect_s, until)
            except Http1Chosen:
                if self._fallback is None:
                    self._fallback = self._make_fallback()
                return await self._fallback.send(request, until=until)
            stream: Stream | None = None
            try:
                stream = await connection.begin(request, self._authority, self._scheme, until)
                await stream.head(until)
            except NotProcessed:
                if stream is not None:
                    stream.close()
                if not may_repeat:
                    raise
                may_repeat = False
            except BaseException:
                if stream is not None:
                    stream.close()
                raise
            else:
                return stream

    async def aclose(self) -> None:
        self._is_closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort(httpx.ReadError("the client is closed"))
        self._wake()
        if self._fallback is not None:
            await self._fallback.aclose()
        await asyncio.sleep(0)

    # -- choosing a connection --

    async def _with_room(self, connect_s: float | None, until: float) -> Http2Connection:
        loop = asyncio.get_running_loop()
        limit = until if connect_s is None else min(loop.time() + connect_s, until)
        try:
            async with asyncio.timeout_at(limit):
                while True:
                    if self._is_closed:
                        raise httpx.ConnectError("the client is closed")
                    connection = self._best(loop.time())
                    if connection is not None:
                        return connection
                    if self._busy() < self._max_requests:
                        await self._open()
                    else:
                        await self._change()
        except TimeoutError:
            if limit < until:
                raise httpx.ConnectTimeout("no connection in time") from None
            raise

    def _busy(self) -> int:
        return sum(len(connection.streams) for connection in self._connections)

    def _best(self, now: float) -> Http2Connection | None:
        """The fullest with room, so that others can grow idle and go. None: open one, or wait."""
        if self._busy() >= self._max_requests:
            return None
        young = [
            one for one in self._connections if one.room and now - one.made_at < self._max_age_s
        ]
        return max(young, key=lambda one: len(one.streams), default=None)

    async def _open(self) -> None:
        """One more connection; of those who want one, all wait for the same."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    def _opened(self, task: "asyncio.Task[Http2Connection]") -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # whoever waits has it

    async def _connect(self) -> Http2Connection:
        made: Http2Connection = await self._dial(
            self._origin, lambda: Http2Connection(self._changed)
        )
        if not made.is_usable:
            made.abort(httpx.ConnectError("another protocol was chosen"))
            raise Http1Chosen
        self._connections.append(made)
        if self._reaper is None:
            self._reap()
        return made

    def _changed(self, connection: Http2Connection) -> None:
        if not connection.is_usable and not connection.streams and connection in self._connections:
            self._connections.remove(connection)
        self._wake()

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _reap(self) -> None:
        """Close what is idle for too long, and what is too old once it is idle."""
        self._reaper = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            is_old = now - connection.made_at >= self._max_age_s
            if not connection.streams and (is_old or now - connection.idle_since >= self._idle_s):
                connection.abort(httpx.ReadError("idle"))
        if self._connections and not self._is_closed:
            self._reaper = loop.call_later(min(self._idle_s, self._max_age_s) / 2, self._reap)
