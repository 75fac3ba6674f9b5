"""A request's body off the socket: within its size, within its time, decompressed within both.

What a caller may make us hold before we know who it is, is EARLY_BYTES: a larger body is read only
once `admit` has accepted the key. A body that is refused is read on for a moment, so that the
answer that says why is not lost with a connection that closes on unread bytes. Invariant: nothing
here holds more than the limit twice (compressed and not), whatever the bytes say of themselves.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import brotli
import zstandard
from litestar.types import Receive

from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    GatewayError,
    RequestTimeout,
    UnsupportedMedia,
)

EARLY_BYTES = 1_000_000
BYTES_PER_S = 16_384  # slower than this, once the time is up, is not a slow network but a loris
DISCARD_BYTES = 64_000_000
DISCARD_S = 5.0
INLINE_BYTES = 65_536  # of compressed bytes: more are decompressed beside the loop
PIECE = 256 * 1024
ZSTD_WINDOW = 8 << 20  # what RFC 9659 asks of receivers
ZSTD_FEED = 256  # compressed bytes at a time: four of them may stand for 128 KB

Headers = Mapping[bytes, bytes]
Admit = Callable[[], Awaitable[object]]


async def read(
    headers: Headers, receive: Receive, limit: int, wait_s: float, admit: Admit
) -> bytes:
    """The body as the client meant it. `limit`: bytes, before and after decompression; `wait_s`:
    for the first of them, and beyond that for each BYTES_PER_S that come; `admit` raises what
    refuses the caller."""
    try:
        encoding = check(headers)
        body = await _raw(headers, receive, limit, wait_s, admit)
    except (ClientGone, RequestTimeout):
        raise  # nothing is to come
    except GatewayError:
        await _discard(headers, receive)
        raise
    if encoding == b"identity":
        return body
    if len(body) <= INLINE_BYTES:
        return decompress(body, encoding, limit)
    return await asyncio.to_thread(decompress, body, encoding, limit)


async def _raw(
    headers: Headers, receive: Receive, limit: int, wait_s: float, admit: Admit
) -> bytes:
    if _declared(headers) > limit:
        raise _too_large(limit)
    if _declared(headers) > EARLY_BYTES:
        await admit()
    try:
        async with asyncio.timeout(wait_s) as patience:
            return await _read(receive, limit, patience, admit)
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not arrive in time: {wait_s:g} seconds, and one more for each "
            f"{BYTES_PER_S // 1024} KB."
        ) from None


def check(headers: Headers) -> bytes:
    """The content-encoding; raises what the headers alone are refused for."""
    media = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMedia("Send the body as JSON, with content-type: application/json.")
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity" and encoding not in _DECODERS:
        raise UnsupportedMedia(
            "This content-encoding is not supported: send gzip, deflate, br, zstd or none."
        )
    return encoding


def _declared(headers: Headers) -> int:
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit():
        raise BadRequest("content-length is not a number.")
    return int(declared)


async def _read(receive: Receive, limit: int, patience: asyncio.Timeout, admit: Admit) -> bytes:
    parts: list[bytes] = []
    size = 0
    is_admitted = False
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The client left before its request was complete.")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        due = patience.when()
        assert due is not None
        patience.reschedule(due + len(part) / BYTES_PER_S)
        if size > EARLY_BYTES and not is_admitted:
            await admit()
            is_admitted = True


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit // 1_000_000} MB.")


async def _discard(headers: Headers, receive: Receive) -> None:
    """Read a refused body to its end, within bounds."""
    if b"expect" in headers:
        return  # it waits to be asked for the body
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message: Any = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


# -- decompression, a piece at a time, so that a bomb is seen before it is whole


def decompress(data: bytes, encoding: bytes, limit: int) -> bytes:
    """Raises BodyTooLarge as soon as it is, BadRequest for what is not in that encoding."""
    parts: list[bytes] = []
    size = 0
    try:
        for part in _DECODERS[encoding](data):
            size += len(part)
            if size > limit:
                raise BodyTooLarge(
                    f"The body is larger than {limit // 1_000_000} MB when decompressed."
                )
            parts.append(part)
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError):
        raise BadRequest(
            f"The body is not valid {encoding.decode()}, as its content-encoding says.",
            code="invalid_encoding",
        ) from None
    return b"".join(parts)


def _gzip(data: bytes) -> Iterator[bytes]:
    """One member after another (RFC 1952, 2.2)."""
    while data:
        inflater = zlib.decompressobj(wbits=31)
        yield from _inflated(inflater, data)
        data = inflater.unused_data


def _deflate(data: bytes) -> Iterator[bytes]:
    """With zlib's header as RFC 9110 says, or without, as many send it."""
    has_header = (
        len(data) >= 2 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    )
    inflater = zlib.decompressobj(wbits=15 if has_header else -15)
    yield from _inflated(inflater, data)
    if inflater.unused_data:
        raise EOFError


def _inflated(inflater: Any, data: bytes) -> Iterator[bytes]:
    while not inflater.eof:
        part = inflater.decompress(data, PIECE)
        data = inflater.unconsumed_tail
        if not part and not inflater.eof and not data:
            raise EOFError  # cut off
        yield part


def _br(data: bytes) -> Iterator[bytes]:
    inflater = brotli.Decompressor()
    part = inflater.process(data, output_buffer_limit=PIECE)
    yield part
    while not inflater.is_finished():
        if inflater.can_accept_more_data():
            raise EOFError
        part = inflater.process(b"", output_buffer_limit=PIECE)
        yield part


def _zstd(data: bytes) -> Iterator[bytes]:
    """Frames one after another; the window is bounded, as it is memory too."""
    while data:
        # A frame that is cut off ends without a word: its decompressor knows.
        whole = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
        fed = 0
        while not whole.eof:
            if fed >= len(data):
                raise EOFError
            part = whole.decompress(data[fed : fed + ZSTD_FEED])
            fed += ZSTD_FEED
            yield part
        data = whole.unused_data + data[fed:]


_DECODERS: dict[bytes, Callable[[bytes], Iterator[bytes]]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    b"br": _br,
    b"zstd": _zstd,
}
