"""Open the database that `[store] database` names: SQLite by default, PostgreSQL in production."""

from pathlib import Path
from typing import Any

from sqlalchemy import event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


class DatabaseUrlInvalid(ValueError):
    """The URL cannot be used; the message says what to write instead."""


def async_url(url: str) -> str:
    """The URL with the driver that we use: `sqlite:///f.db`, `postgresql://…` and the explicit
    `+aiosqlite`, `+asyncpg` forms are accepted."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise DatabaseUrlInvalid(
            "not a database URL: use sqlite:///path/to/file.db or postgresql+asyncpg://…"
        ) from None
    driver = DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        raise DatabaseUrlInvalid(
            f"{parsed.get_backend_name()} is not supported: use sqlite or postgresql"
        )
    return parsed.set(drivername=driver).render_as_string(hide_password=False)


def open_engine(url: str) -> AsyncEngine:
    """An engine for either database. Creates the folder of a SQLite file.

    SQLite runs in WAL mode, so that readers (reports, `explain`) never block the shipper; a writer
    waits up to 10 s for another one. PostgreSQL connections are few: only workers, the admin API
    and cold key look-ups use them, never the token path. Errors never show a row's values."""
    full = async_url(url)
    if full.startswith("sqlite"):
        path = make_url(full).database
        if path and path != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        engine = create_async_engine(full, connect_args={"timeout": 10}, hide_parameters=True)
        event.listen(engine.sync_engine, "connect", _sqlite_pragmas)
        return engine
    return create_async_engine(
        full,
        pool_size=5,
        max_overflow=5,
        pool_pre_ping=True,
        pool_timeout=5,
        hide_parameters=True,
        connect_args={"timeout": 5, "command_timeout": 30},
    )


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
