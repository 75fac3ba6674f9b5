"""Backends and servers that an operator has taken out of service: they get nothing new, and what
runs there ends by itself. Kept in the database, so that every replica obeys and a restart changes
nothing. Knows SQL; must not know circuits or requests. Each act is a line in the audit log."""

from datetime import datetime

from msgspec import Struct
from sqlalchemy import select

from gateway.tenant_tables import DrainRow
from gateway.tenants import Tenants


class Drain(Struct, frozen=True, kw_only=True):
    """One that is out of service. `endpoint` "": the whole backend."""

    backend: str
    endpoint: str
    since: datetime


class Drains:
    """Every change and list of drains. Raises leaves of the gateway's error tree."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def drain(self, backend: str, endpoint: str = "", *, actor: str) -> Drain:
        """From now on it gets nothing new. Twice is once."""
        async with self._tenants.writing(actor) as write:
            row = await write.db.get(DrainRow, (backend, endpoint))
            if row is None:
                row = DrainRow(backend=backend, endpoint=endpoint, since=write.at)
                write.db.add(row)
                write.record("backend.drain", _object(row), None, _drain(row))
            return _drain(row)

    async def resume(self, backend: str, endpoint: str = "", *, actor: str) -> Drain | None:
        """It gets requests again. None: it was not out of service."""
        async with self._tenants.writing(actor) as write:
            row = await write.db.get(DrainRow, (backend, endpoint))
            if row is None:
                return None
            drain = _drain(row)
            await write.db.delete(row)
            write.record("backend.resume", _object(row), drain, None)
            return drain

    async def all(self) -> list[Drain]:
        query = select(DrainRow).order_by(DrainRow.backend, DrainRow.endpoint)
        async with self._tenants.reading() as db:
            return [_drain(row) for row in await db.scalars(query)]


def _object(row: DrainRow) -> str:
    name = f"backend/{row.backend}"
    return (f"{name}/{row.endpoint}" if row.endpoint else name)[:128]


def _drain(row: DrainRow) -> Drain:
    return Drain(backend=row.backend, endpoint=row.endpoint, since=row.since)
