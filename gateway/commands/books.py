"""What the ledger's commands share: the open database, brought up to date, and tenants' names."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.commands import BadInput
from gateway.commands.files import database_url, read_config
from gateway.config import Config
from gateway.errors import GatewayError
from gateway.keys import KeyRing
from gateway.secrets import peppers
from gateway.tenants import Tenants, tenant_names, tenant_places
from telemetry import books
from telemetry.clock import SystemClock
from telemetry.database import open_engine
from telemetry.ledger import LedgerError
from telemetry.ledger.worker import catch_up
from telemetry.pricing import rate
from telemetry.reports.chargeback import TenantPlace

T = TypeVar("T")


class OpenBooks(Struct, frozen=True, kw_only=True):
    """The ledger as a command sees it."""

    config: Config
    engine: AsyncEngine
    tenants: Tenants

    async def tenant_names(self) -> dict[str, str]:
        """id → name, deleted tenants too."""
        return await tenant_names(self.tenants)

    async def tenant_places(self) -> dict[str, TenantPlace]:
        """id → where it stands in the tree."""
        return await tenant_places(self.tenants)


def with_books(path: Path, work: Callable[[OpenBooks], Awaitable[T]]) -> T:
    """The result of `work` on current books: logs that nobody owns are shipped and swept, dirty
    hours summed. What a running server owns it keeps current itself, within a second or two."""

    async def opened() -> T:
        async with _open(path) as found:
            return await work(found)

    try:
        return asyncio.run(opened())
    except (LedgerError, GatewayError) as error:
        raise BadInput(str(error)) from error
    except (SQLAlchemyError, OSError) as error:
        raise BadInput(
            f"the database cannot be used ({type(error).__name__}): check [store] database"
        ) from error


@contextlib.asynccontextmanager
async def _open(path: Path) -> AsyncIterator[OpenBooks]:
    config, _ = read_config(path)
    url = await asyncio.to_thread(database_url, config)
    engine = open_engine(url)
    try:
        clock = SystemClock()
        book = await books.load(engine)
        await catch_up(
            engine, config.wal_dir, rate=lambda attempt: rate(attempt, book), clock=clock
        )
        tenants = Tenants(engine, KeyRing(*peppers(config, os.environ)), clock)
        yield OpenBooks(config=config, engine=engine, tenants=tenants)
    finally:
        await engine.dispose()
