"""Fixtures for every test: real databases, each test with one of its own."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import services

# How long an example takes is the machine's affair, not the test's: no test is timed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """One PostgreSQL for the whole run."""
    with services.postgres() as url:
        yield url


@pytest.fixture
async def postgres_url(postgres_server: str) -> str:
    """A fresh, empty database on the running PostgreSQL."""
    import asyncpg

    name = f"t{uuid.uuid4().hex}"
    connection = await asyncpg.connect(postgres_server.replace("+asyncpg", ""))
    try:
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    return postgres_server.rsplit("/", 1)[0] + f"/{name}"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'data' / 'meterline.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    """The same test on both databases."""
    if request.param == "sqlite":
        return sqlite_url
    return str(request.getfixturevalue("postgres_url"))
