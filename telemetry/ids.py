"""Ids that we mint. Request ids are UUIDv7 (RFC 9562, 5.7), so that they sort by time.

Ids are unique and hard to guess, and no secrets: keys are made in `gateway.keys`."""

import os
import threading
import time
from typing import NewType
from uuid import UUID, uuid5

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)

_EVENTS = UUID("6f1f3a5e-4c58-5d0e-9a55-0d6d1c7f2b10")


def new_request_id(now_ns: int | None = None) -> RequestId:
    return RequestId(_uuid7(now_ns))


def new_tenant_id(now_ns: int | None = None) -> TenantId:
    return TenantId(_uuid7(now_ns))


def new_key_id(now_ns: int | None = None) -> KeyId:
    return KeyId(_uuid7(now_ns))


def minted_ms(request_id: str) -> int:
    """When an id was made, Unix milliseconds."""
    return int(request_id[:8] + request_id[9:13], 16)


def _uuid7(now_ns: int | None) -> str:
    """48 bits of Unix milliseconds, 74 random bits: they sort by time."""
    ms = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    tail = int.from_bytes(_random(10), "big")
    value = ms << 80 | tail
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class _Pool(threading.local):
    """Random bytes of the system, fetched many at a time: the call costs more than the bytes."""

    _BYTES = 4096
    rest = b""
    at = 0

    def take(self, count: int) -> bytes:
        """Bytes that were never given before."""
        start = self.at
        end = self.at = start + count
        if end > len(self.rest):
            self.rest = os.urandom(self._BYTES)
            start, end = 0, count
            self.at = end
        return self.rest[start:end]

    def forget(self) -> None:
        self.rest = b""


_pool = _Pool()
_random = _pool.take
os.register_at_fork(after_in_child=_pool.forget)  # else parent and child would give the same


def usage_event_id(request_id: str, attempt_no: int) -> str:
    """The same attempt always gives the same id, so that replaying the log can insert it twice
    without counting it twice (FINOPS: a minted-again id is how others double-bill)."""
    return str(uuid5(_EVENTS, f"{request_id}/{attempt_no}/usage"))


def new_trace_id() -> str:
    """32 hex digits, never all zero (W3C Trace Context, 3.2.2.3)."""
    return _random(16).hex()


def new_span_id() -> str:
    """16 hex digits, never all zero (W3C Trace Context, 3.2.2.4)."""
    return _random(8).hex()
