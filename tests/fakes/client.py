"""A client of upstreams that answers by itself, for tests without a socket."""

from collections.abc import Mapping

from backends.transport import Request


class CannedAnswer:
    """One status and one body."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        self.status = status
        self.headers: Mapping[bytes, bytes] = {b"content-type": b"application/json"}
        self._body = body

    async def read(self, until: float) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        self._body = b""


class RecordingClient:
    """Keeps what it is asked to send, and answers each request with the same status."""

    def __init__(self, status: int = 500) -> None:
        self.seen: list[Request] = []
        self._status = status

    async def send(self, request: Request, *, until: float) -> CannedAnswer:
        self.seen.append(request)
        return CannedAnswer(self._status)

    async def aclose(self) -> None:
        pass
