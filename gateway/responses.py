"""Responses that clients may go on from (`previous_response_id`), read again and delete.

The database holds them, so every replica knows them. Must not know HTTP or the APIs' shapes beyond
`id` and `output`. Invariants: every statement names the tenant, so nobody finds another's, and an
id that a backend gave is worth nothing to a tenant who does not own it; what is older than its
time, or more than a tenant's room, is gone.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from sqlalchemy import Index, LargeBinary, String, delete, func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Mapped, mapped_column

from backends.base import Previous
from gateway.config import ResponseSettings
from gateway.errors import BadRequest, NotFound, StoreUnavailable
from gateway.tenant_tables import Big, TenantBase
from gateway.tenants import translating_database_errors
from telemetry.clock import Clock
from telemetry.ids import TenantId
from telemetry.tables import UtcTime

log = logging.getLogger(__name__)

MAX_ID_CHARS: Final = 128
QUERY_S: Final = 2.0  # that a request may wait for the database

_read_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_read_items: Final = msgspec.json.Decoder(list[Raw]).decode


class StoredResponseRow(TenantBase):
    """One response, and the whole conversation that it ends."""

    __tablename__ = "stored_response"

    tenant_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    response_id: Mapped[str] = mapped_column(String(MAX_ID_CHARS), primary_key=True)
    backend: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime] = mapped_column(UtcTime)
    size: Mapped[int] = mapped_column(Big)
    response: Mapped[bytes] = mapped_column(LargeBinary)
    items: Mapped[bytes] = mapped_column(LargeBinary)

    __table_args__ = (
        Index("ix_stored_response_expires", "expires_at"),
        Index("ix_stored_response_age", "tenant_id", "created_at"),
    )


class _Answered(Struct):
    id: str
    output: list[Raw]


_read_answer: Final = msgspec.json.Decoder(_Answered).decode


class ResponseStore:
    """All responses of all tenants; each question is one tenant's."""

    def __init__(
        self, engine: AsyncEngine, clock: Clock, settings: Callable[[], ResponseSettings]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.failures = 0  # that were not kept because the database did not take them

    async def recall(self, tenant_id: TenantId, response_id: str) -> Previous:
        """What a request goes on from. Raises BadRequest if this tenant has no such response."""
        columns = (StoredResponseRow.backend, StoredResponseRow.items)
        found = await self._one(tenant_id, response_id, *columns)
        if found is None:
            raise BadRequest(
                f"Previous response with id '{response_id[:100]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return Previous(found.backend, bytes(found.items))

    async def read(self, tenant_id: TenantId, response_id: str) -> bytes:
        """The response as it was answered. Raises NotFound."""
        found = await self._one(tenant_id, response_id, StoredResponseRow.response)
        if found is None:
            raise _not_found(response_id)
        return bytes(found.response)

    async def forget(self, tenant_id: TenantId, response_id: str) -> None:
        """Delete it. Raises NotFound."""
        with translating_database_errors():
            async with asyncio.timeout(QUERY_S), self._engine.begin() as db:
                gone = await db.execute(
                    delete(StoredResponseRow).where(*_of(tenant_id, response_id))
                )
        if not gone.rowcount:
            raise _not_found(response_id)

    async def keep(
        self,
        tenant_id: TenantId,
        *,
        body: bytes,
        previous: Previous | None,
        backend: str | None,
        response: bytes,
    ) -> None:
        """Remember an answer. The client has been served and billed by now, so what the database
        does not take is logged and counted, and only cannot be gone on from."""
        try:
            answered = _read_answer(response)
            items = _conversation(previous, _read_fields(body)["input"], answered.output)
        except msgspec.MsgspecError as error:  # a backend's answer without an id, or without items
            self._failed(error)
            return
        size = len(response) + len(items)
        room = self._settings().tenant_mb * 1_000_000
        if size > room or len(answered.id) > MAX_ID_CHARS:
            return
        now = self._now()
        row = {
            "tenant_id": tenant_id,
            "response_id": answered.id,
            "backend": backend,
            "created_at": now,
            "expires_at": now + timedelta(days=self._settings().keep_days),
            "size": size,
            "response": response,
            "items": items,
        }
        try:
            with translating_database_errors():
                async with asyncio.timeout(QUERY_S):
                    await self._insert(tenant_id, row, room)
        except (StoreUnavailable, IntegrityError) as error:  # an id that a backend gave twice
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        log.warning("response_not_stored", extra={"reason": type(error).__name__})

    async def _insert(self, tenant_id: TenantId, row: dict[str, Any], room: int) -> None:
        table = StoredResponseRow
        async with self._engine.begin() as db:
            await db.execute(delete(table).where(table.expires_at <= self._now()))
            await db.execute(insert(table).values(row))
            whole = select(func.coalesce(func.sum(table.size), 0)).where(
                table.tenant_id == tenant_id
            )
            surplus = (await db.execute(whole)).scalar_one() - room
            if surplus <= 0:
                return
            oldest = (
                select(table.response_id, table.size)
                .where(table.tenant_id == tenant_id, table.response_id != row["response_id"])
                .order_by(table.created_at)
            )
            gone: list[str] = []
            for response_id, size in await db.execute(oldest):
                if surplus <= 0:
                    break
                gone.append(response_id)
                surplus -= size
            await db.execute(
                delete(table).where(table.tenant_id == tenant_id, table.response_id.in_(gone))
            )

    async def _one(self, tenant_id: TenantId, response_id: str, *columns: Any) -> Any:
        if len(response_id) > MAX_ID_CHARS or "\0" in response_id:
            return None
        query = select(*columns).where(
            *_of(tenant_id, response_id), StoredResponseRow.expires_at > self._now()
        )
        with translating_database_errors():
            async with asyncio.timeout(QUERY_S), self._engine.connect() as db:
                return (await db.execute(query)).one_or_none()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)


def _of(tenant_id: TenantId, response_id: str) -> tuple[Any, Any]:
    table = StoredResponseRow
    return table.tenant_id == tenant_id, table.response_id == response_id


def _conversation(previous: Previous | None, asked: Raw, answered: list[Raw]) -> bytes:
    """All items until now. Text is a message of the user."""
    items = [] if previous is None else _read_items(previous.items)
    if bytes(asked).startswith(b'"'):
        items.append(Raw(b'{"type":"message","role":"user","content":%s}' % bytes(asked)))
    else:
        items += _read_items(asked)
    return msgspec.json.encode([*items, *answered])


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:100]}' not found.")
