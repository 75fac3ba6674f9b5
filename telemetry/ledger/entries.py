"""What the write-ahead log holds, as bytes: intents, started attempts and settlements.

The record is kept as the JSON that the database will hold, so that its hash is of the very bytes
that were logged and a replay by a later version is still the same fact.
"""

from typing import Any

import msgspec
from msgspec import Struct

from telemetry.record import Attempt, RequestRecord

MAX_TEXT = 256  # of what a client or an upstream can choose; the columns are as wide
_LARGEST = 2**63 - 1


class SegmentHeader(Struct, frozen=True, array_like=True):
    """First frame of a segment. `records_before`: records of this node in all earlier segments."""

    version: int
    node: str
    segment: int
    records_before: int
    created_ns: int


class Intent(Struct, frozen=True, array_like=True, gc=False):
    """Admitted: from here on exactly one settlement. `boot` names the life of the process, and
    with it the file of progress slots."""

    boot: str
    request_id: str
    deadline_ns: int
    record: bytes  # RequestRecord as JSON


class Attempts(Struct, frozen=True, array_like=True, gc=False):
    """The attempts of an open request so far, so that a crash knows what was being paid for."""

    request_id: str
    attempts: bytes  # list[Attempt] as JSON


class Settlement(Struct, frozen=True, array_like=True, gc=False):
    """How a request ended. `admitted`: an intent was logged before."""

    request_id: str
    admitted: bool
    record: bytes  # RequestRecord as JSON


FORMAT_VERSION = 1

_json = msgspec.json.Encoder()
_record = msgspec.json.Decoder(RequestRecord)
_attempts = msgspec.json.Decoder(list[Attempt])
pack = msgspec.msgpack.Encoder().encode
unpack_header = msgspec.msgpack.Decoder(SegmentHeader).decode
unpack_intent = msgspec.msgpack.Decoder(Intent).decode
unpack_attempts = msgspec.msgpack.Decoder(Attempts).decode
unpack_settlement = msgspec.msgpack.Decoder(Settlement).decode


def to_json(value: RequestRecord | list[Attempt]) -> bytes:
    """JSON of a record. Text that is no UTF-8 and integers beyond 64 bits, which an upstream can
    send, are replaced: a settlement must never fail for what somebody else wrote."""
    try:
        return _json.encode(value)
    except (UnicodeEncodeError, OverflowError, ValueError):
        return _json.encode(_mended(msgspec.to_builtins(value)))


def record_from_json(data: bytes | str) -> RequestRecord:
    return _record.decode(data)


def attempts_from_json(data: bytes) -> list[Attempt]:
    return _attempts.decode(data)


def clip(text: str | None) -> str | None:
    """Bound text that others chose."""
    return text if text is None or len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return max(-_LARGEST, min(_LARGEST, value))
    if isinstance(value, list | tuple):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {key: _mended(item) for key, item in value.items()}
    return value
