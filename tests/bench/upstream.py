"""The cheapest OpenAI server there can be: fixed bytes over asyncio protocols, so that a benchmark
measures what stands before it. `python -m tests.bench.upstream PORT`"""

import asyncio
import sys
import time
from typing import Any

BODY = (
    b'{"id":"chatcmpl-bench","object":"chat.completion","created":1796000000,"model":"bench",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps '
    b'over the lazy dog, and the dog does not mind."},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":30,"completion_tokens":16,"total_tokens":46}}'
)
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
) + BODY
CHUNKS = 64
PACED_CHUNKS = 100
PACE_S = 0.02
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _delta(fields: bytes, finish: bytes = b"null") -> bytes:
    return (
        b'{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1796000000,'
        b'"model":"bench","choices":[{"index":0,"delta":{%s},"logprobs":null,'
        b'"finish_reason":%s}]}' % (fields, finish)
    )


EVENTS = [
    _chunk(_delta(b'"role":"assistant","content":""')),
    *(_chunk(_delta(b'"content":" word"')) for _ in range(CHUNKS)),
    _chunk(_delta(b"", b'"stop"')),
    _chunk(
        b'{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1796000000,'
        b'"model":"bench","choices":[],"usage":{"prompt_tokens":30,"completion_tokens":64,'
        b'"total_tokens":94}}'
    ),
    _chunk(b"[DONE]"),
]


class Upstream(asyncio.Protocol):
    """One keep-alive connection. Requests are told apart by their content-length."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            if b'"stream":true' in body or b'"stream": true' in body:
                play = self._paced if b'"paced"' in body else self._stream
                task = asyncio.ensure_future(play(self._transport))
                task.add_done_callback(lambda done: done.exception())
            else:
                self._transport.write(WHOLE)

    async def _paced(self, transport: Any) -> None:
        """PACED_CHUNKS on a beat of PACE_S, each with the time at which it left."""
        loop = asyncio.get_running_loop()
        transport.write(_HEAD + EVENTS[0])
        began = loop.time()
        for number in range(PACED_CHUNKS):
            await asyncio.sleep(max(0.0, began + (number + 1) * PACE_S - loop.time()))
            if transport.is_closing():
                return
            transport.write(_chunk(_delta(b'"content":"t=%d;"' % time.monotonic_ns())))
        transport.write(b"".join(EVENTS[-3:]) + b"0\r\n\r\n")

    async def _stream(self, transport: Any) -> None:
        transport.write(_HEAD)
        for event in EVENTS:
            if transport.is_closing():
                return
            transport.write(event)
            await asyncio.sleep(0.005)
        transport.write(b"0\r\n\r\n")


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
