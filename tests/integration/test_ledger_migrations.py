"""Migrations make exactly the tables that the code declares, on both databases."""

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect

import migrations
from telemetry.database import open_engine
from telemetry.tables import LedgerBase

STAND_IN = '''"""Stands for the tenants' tables where they are not there yet."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Nothing: the ledger refers to no tenant table."""


def downgrade() -> None:
    """Nothing."""
'''


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """A first migration, if the repository has none."""
    if list((migrations.HERE / "versions").glob("0001_*.py")):
        return []
    (tmp_path / "0001_stand_in.py").write_text(STAND_IN)
    return [tmp_path]


def _differences(connection: Connection) -> list[object]:
    names = set(LedgerBase.metadata.tables)
    context = MigrationContext.configure(
        connection,
        opts={
            "compare_type": True,
            "include_name": lambda name, kind, _: kind != "table" or name in names,
        },
    )
    return list(compare_metadata(context, LedgerBase.metadata))


async def test_migrations_and_metadata_agree(database_url: str, versions: list[Path]) -> None:
    """After an upgrade nothing is missing, nothing is too much, and the version is the newest."""
    engine = open_engine(database_url)
    assert not await migrations.is_current(engine, versions=versions)
    await migrations.upgrade_engine(engine, versions=versions)
    async with engine.connect() as db:
        assert await db.run_sync(_differences) == []
    assert await migrations.is_current(engine, versions=versions)
    await engine.dispose()


async def test_several_processes_may_migrate_at_once(
    database_url: str, versions: list[Path]
) -> None:
    """The first one migrates, the others wait and find nothing to do."""
    await asyncio.gather(
        *(migrations.upgrade_url(database_url, versions=versions) for _ in range(3))
    )
    engine = open_engine(database_url)
    assert await migrations.is_current(engine, versions=versions)
    await engine.dispose()


async def test_a_failed_migration_leaves_nothing_behind(
    database_url: str, versions: list[Path], tmp_path: Path
) -> None:
    """All scripts run in one transaction."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "9999_broken.py").write_text(
        f'revision = "9999"\ndown_revision = "{migrations.current_head(versions=versions)}"\n\n\n'
        "def upgrade() -> None:\n"
        '    raise RuntimeError("half-way")\n'
    )
    engine = open_engine(database_url)
    with pytest.raises(RuntimeError, match="half-way"):
        await migrations.upgrade_engine(engine, versions=[*versions, broken])
    async with engine.connect() as db:
        assert await db.run_sync(lambda c: inspect(c).get_table_names()) == []
    await engine.dispose()
