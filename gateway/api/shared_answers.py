"""Recorded answers on the Redis that replicas share, so that a key which comes to another replica
finds the answer there, or waits for it.

A key is claimed before its request runs; the claim expires soon if its replica dies, and is renewed
while it lives. While Redis is away each replica knows its own keys only. Invariant: what is stored
lies under a digest of tenant, surface and key, and expires.
"""

import asyncio
import hashlib
import logging
from typing import Any

import hiredis
import msgspec
from msgspec import Struct

from gateway.limits.store import StoreGone
from gateway.limits.wire import Connection, connect

log = logging.getLogger(__name__)

CLAIM_MS = 30_000
RENEW_S = 10.0
LOOK_S = 0.2
BUDGET_S = 1.0
AGAIN_S = 1.0  # after Redis could not be reached


class Kept(Struct, frozen=True, array_like=True):
    """A finished answer: the messages that were sent."""

    request_id: str
    fingerprint: bytes
    start: tuple[int, tuple[tuple[bytes, bytes], ...]]  # status, headers
    parts: tuple[bytes, ...]


class Running(Struct, frozen=True, array_like=True):
    """Somebody else is at it."""

    request_id: str
    fingerprint: bytes


_kept = msgspec.msgpack.Decoder(Kept)
_running = msgspec.msgpack.Decoder(Running)
_encode = msgspec.msgpack.Encoder().encode


class SharedAnswers:
    """One connection, opened when it is first needed and again when it was lost."""

    def __init__(self, url: str, *, ttl_s: float) -> None:
        self._url = url
        self._ttl_ms = round(ttl_s * 1000)
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._not_before = 0.0

    async def aclose(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def claim(
        self, name: tuple[str, str, str], mine: Running, wait_s: float
    ) -> Kept | Running | None:
        """None: it is ours to run. Kept: here is the answer. Running: another body is at work under
        this key, or the same one did not end within `wait_s`."""
        key, claim = _key(name), b"r" + _encode(mine)
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            if await self._call("SET", key, claim, "NX", "PX", CLAIM_MS) is not None:
                return None
            found = await self._call("GET", key)
            if found is not None:
                data = bytes(found)
                if data[:1] == b"k":
                    return _kept.decode(data[1:])
                other = _running.decode(data[1:])
                is_late = asyncio.get_running_loop().time() >= until
                if other.fingerprint != mine.fingerprint or is_late:
                    return other
            await asyncio.sleep(LOOK_S)

    async def renew(self, name: tuple[str, str, str]) -> None:
        """Keep the claim until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._call("PEXPIRE", _key(name), CLAIM_MS)
            except StoreGone:
                log.warning("idempotency claim not renewed")

    async def keep(self, name: tuple[str, str, str], kept: Kept) -> None:
        await self._call("SET", _key(name), b"k" + _encode(kept), "PX", self._ttl_ms)

    async def release(self, name: tuple[str, str, str]) -> None:
        await self._call("DEL", _key(name))

    async def _call(self, *command: Any) -> Any:
        connection = await self._open()
        try:
            return await connection.call(*command)
        except hiredis.ReplyError as error:
            raise StoreGone(str(error)[:100]) from error

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with self._opening:
            if self._connection is not None and self._connection.is_open:
                return self._connection
            if loop.time() < self._not_before:
                raise StoreGone
            try:
                self._connection = await connect(self._url, lost=_nothing)
            except StoreGone:
                self._not_before = loop.time() + AGAIN_S
                raise
            self._connection.has_budget(BUDGET_S)
            return self._connection


def _nothing() -> None:
    return None


def _key(name: tuple[str, str, str]) -> bytes:
    tenant, *rest = name
    digest = hashlib.sha256("\0".join(rest).encode()).hexdigest()
    return f"ml:{{{tenant}}}:answer:{digest}".encode()
