"""One worker at a time for what must not be done twice at once. Held for one pass, never leased:
if the holder dies, the lock is free at once, because the database session or the file descriptor
dies with it."""

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

_ADVISORY_KEY = 0x6D65_7465_726C_6564  # "meterled"


@contextlib.asynccontextmanager
async def leadership(engine: AsyncEngine, wal_dir: Path) -> AsyncIterator[bool]:
    """Whether this worker leads for the duration of the block. PostgreSQL: an advisory lock, over
    all machines; SQLite: a file lock, over all processes of the one machine that can use it."""
    if engine.dialect.name == "postgresql":
        async with engine.connect() as db, db.begin():
            locked = await db.scalar(
                text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY}
            )
            yield bool(locked)
        return
    fd = _lock_file(wal_dir)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _lock_file(wal_dir: Path) -> int | None:
    wal_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(wal_dir / "leader.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
