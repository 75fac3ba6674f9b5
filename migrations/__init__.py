"""Bring a database to the tables that this version needs.

Used by `meterline migrate` and by `serve` at start; no alembic.ini is needed. Several processes may
start at once: the first one migrates, the others wait and find nothing to do. A failed migration
leaves the database as it was.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.database import open_engine

HERE = Path(__file__).parent
_ADVISORY_KEY = 0x6D65_7465_726C_6D67  # "meterlmg"


async def upgrade_engine(engine: AsyncEngine, *, versions: Sequence[Path] = ()) -> None:
    """Migrate to the newest version, in one transaction. `versions`: further folders of scripts."""
    async with engine.begin() as db:
        if engine.dialect.name == "postgresql":
            await db.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        else:
            await db.exec_driver_sql("BEGIN IMMEDIATE")  # else DDL commits statement by statement
        await db.run_sync(_upgrade, versions)


async def upgrade_url(url: str, *, versions: Sequence[Path] = ()) -> None:
    """As `upgrade_engine`, for a URL as in `[store] database`."""
    engine = open_engine(url)
    try:
        await upgrade_engine(engine, versions=versions)
    finally:
        await engine.dispose()


def upgrade(url: str) -> None:
    """Migrate from a program without an event loop."""
    asyncio.run(upgrade_url(url))


def current_head(*, versions: Sequence[Path] = ()) -> str | None:
    """The version that this code needs."""
    return ScriptDirectory.from_config(_config(versions)).get_current_head()


async def database_version(engine: AsyncEngine) -> str | None:
    """The version of a database; None if it was never migrated."""
    async with engine.connect() as db:
        return await db.run_sync(_version)


async def is_current(engine: AsyncEngine, *, versions: Sequence[Path] = ()) -> bool:
    """Whether the database has exactly the tables that this code needs."""
    return await database_version(engine) == current_head(versions=versions)


def _config(versions: Sequence[Path]) -> Config:
    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    places = "\n".join(str(path) for path in [HERE / "versions", *versions])
    config.set_main_option("version_locations", places.replace("%", "%%"))
    return config


def _upgrade(connection: Connection, versions: Sequence[Path]) -> None:
    config = _config(versions)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _version(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
