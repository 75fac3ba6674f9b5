"""HTTP/1.1 off the socket, as uvicorn speaks it, with bounds on what comes before a request exists.

A head that is too large or too slow, and bytes that are no HTTP, are answered in the shape of every
other error and end the connection. Invariant: a connection holds at most HEAD_BYTES of a head, and
none waits for one for longer than HEAD_S.
"""

import asyncio
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.api import problems
from gateway.errors import BadRequest, GatewayError, HeadersTooLarge, RequestTimeout
from telemetry.ids import new_request_id

HEAD_BYTES = 65_536
HEAD_S = 30.0


class Protocol(HttpToolsProtocol):
    """One connection."""

    head_s = HEAD_S

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0
        self._in_head = True  # or before it
        self._head_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._timer = self.loop.call_later(self.head_s, self._look)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES and self._in_head and not self.transport.is_closing():
            self._refuse(HeadersTooLarge(f"The headers are larger than {HEAD_BYTES // 1024} KB."))

    @override
    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_since = self.loop.time()
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_bytes > HEAD_BYTES and self._size() > HEAD_BYTES:
            # Left to `data_received`, which is called by no parser.
            self._in_head = True
            raise ValueError("the headers are too large")
        self._head_bytes = 0
        super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._head_bytes > HEAD_BYTES and self._size() > HEAD_BYTES:
            self._refuse(HeadersTooLarge(f"The headers are larger than {HEAD_BYTES // 1024} KB."))
        else:
            self._refuse(BadRequest("This is not HTTP/1.1 as we understand it."))

    def _size(self) -> int:
        headers = self.headers or []
        return len(self.url or b"") + sum(len(name) + len(value) + 4 for name, value in headers)

    def _look(self) -> None:
        """A head must have come by now, or this is no client. One that is idle between requests is
        the keep-alive timer's."""
        late = self.loop.time() - self._head_since >= self.head_s
        is_idle = self.timeout_keep_alive_task is not None
        if self._in_head and late and not is_idle and not self.transport.is_closing():
            self._refuse(RequestTimeout(f"No request came within {self.head_s:g} seconds."))
            return
        self._timer = self.loop.call_later(self.head_s, self._look)

    def _refuse(self, error: GatewayError) -> None:
        """Answer, if no other answer is under way, and close."""
        if self.cycle is None or self.cycle.response_complete:
            content = problems.body(error)
            head = [
                *self.server_state.default_headers,
                *problems.headers(error, new_request_id()),
                (b"content-length", str(len(content)).encode()),
                (b"connection", b"close"),
            ]
            self.transport.write(
                STATUS_LINE[error.status]
                + b"".join(name + b": " + value + b"\r\n" for name, value in head)
                + b"\r\n"
                + content
            )
        self.transport.close()
