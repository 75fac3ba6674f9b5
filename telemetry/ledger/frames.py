"""Framing of the write-ahead log: pure functions over bytes, no file, no clock.

A frame is 12 bytes of header (sync mark, kind, payload length, CRC-32 of both and of the payload)
and the payload. Invariants: `scan` yields exactly the frames that `encode` made, in order, whatever
bytes follow or are damaged between them; it never yields a frame that was not written.
"""

import zlib
from enum import IntEnum
from struct import Struct as Layout

from msgspec import Struct

MARK = b"ML"
HEADER = Layout("<2sBxII")
_SIGNED = 8  # the CRC covers the first eight header bytes and the payload
MAX_PAYLOAD = 8 << 20


class Kind(IntEnum):
    """What a frame holds. Numbers are on disk: never reuse one."""

    SEGMENT = 1  # first frame of each segment
    INTENT = 2
    ATTEMPTS = 3
    SETTLEMENT = 4


RECORDS = frozenset({Kind.INTENT, Kind.ATTEMPTS, Kind.SETTLEMENT})


class Frame(Struct, frozen=True, gc=False):
    """One frame that was read back. `end` is the offset just behind it."""

    kind: int
    payload: bytes
    end: int


class Scan(Struct, frozen=True):
    """What stood in some bytes. `end`: behind the last good frame; `damaged`: bytes skipped
    between good frames; `tail`: bytes behind the last good frame that are not zero padding."""

    frames: list[Frame]
    end: int
    damaged: int
    tail: int


def encode(kind: Kind, payload: bytes) -> bytes:
    """One frame. Raises ValueError beyond MAX_PAYLOAD."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a log record of {len(payload)} bytes is over {MAX_PAYLOAD}")
    signed = HEADER.pack(MARK, kind, len(payload), 0)[:_SIGNED]
    crc = zlib.crc32(payload, zlib.crc32(signed))
    return signed + crc.to_bytes(4, "little") + payload


def scan(data: bytes, *, limit: int | None = None) -> Scan:
    """Read frames from the start of `data`, at most `limit` of them.

    A frame that fails its check is skipped and the next good one is searched for: one flipped bit
    costs one record, not the rest of the log."""
    frames: list[Frame] = []
    offset = end = damaged = 0
    while limit is None or len(frames) < limit:
        frame = _frame_at(data, offset)
        if frame is None:
            offset = _next_frame(data, offset)
            if offset < 0:
                break
            damaged += offset - end
            continue
        frames.append(frame)
        offset = end = frame.end
    full = limit is not None and len(frames) == limit
    tail = 0 if full else len(data[end:].rstrip(b"\0"))
    return Scan(frames, end, damaged, tail)


def _frame_at(data: bytes, offset: int) -> Frame | None:
    start = offset + HEADER.size
    if start > len(data):
        return None
    mark, kind, length, crc = HEADER.unpack_from(data, offset)
    if mark != MARK or length > MAX_PAYLOAD or start + length > len(data):
        return None
    payload = data[start : start + length]
    if zlib.crc32(payload, zlib.crc32(data[offset : offset + _SIGNED])) != crc:
        return None
    return Frame(kind, payload, start + length)


def _next_frame(data: bytes, offset: int) -> int:
    """Offset of the next good frame behind a bad one at `offset`, or -1."""
    offset = data.find(MARK, offset + 1)
    while offset >= 0 and _frame_at(data, offset) is None:
        offset = data.find(MARK, offset + 1)
    return offset
