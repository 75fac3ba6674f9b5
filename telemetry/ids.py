"""Ids that we mint. Request ids are UUIDv7 (RFC 9562, 5.7), so that they sort by time."""

import os
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


def _uuid7(now_ns: int | None) -> str:
    """48 bits of Unix milliseconds, 74 random bits: they sort by time."""
    ms = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    tail = int.from_bytes(os.urandom(10), "big")
    value = ms << 80 | tail
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(UUID(int=value))


def usage_event_id(request_id: str, attempt_no: int) -> str:
    """The same attempt always gives the same id, so that replaying the log can insert it twice
    without counting it twice (FINOPS: a minted-again id is how others double-bill)."""
    return str(uuid5(_EVENTS, f"{request_id}/{attempt_no}/usage"))


def new_trace_id() -> str:
    """32 hex digits, never all zero (W3C Trace Context, 3.2.2.3)."""
    return os.urandom(16).hex()


def new_span_id() -> str:
    """16 hex digits, never all zero (W3C Trace Context, 3.2.2.4)."""
    return os.urandom(8).hex()
