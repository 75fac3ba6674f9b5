"""Migrations make exactly the tables that the code declares, on both databases."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, select

import migrations
from telemetry.database import open_engine
from telemetry.ledger.rollups import METERS, roll_up_dirty
from telemetry.ledger.shipper import EVENTS, LINES
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


OLD_ROWS = (
    "INSERT INTO gateway_request (request_id, node, surface, stream, opened_at, ended_at, outcome,"
    " trace_id, record, payload_hash) VALUES ('r', 'n', 'chat', {false}, '2026-11-30 12:34:56',"
    " '2026-11-30 12:34:57', 'ok', 't', '', '')",
    "INSERT INTO usage_event (event_id, request_id, attempt_no, reason, backend, provider, model,"
    " occurred_at, ended_at, outcome, is_final, in_uncached_text, in_cached_read,"
    " in_cache_write_5m, in_cache_write_1h, in_audio, in_image, in_video, in_document, out_text,"
    " out_reasoning, out_audio, out_image, usage_source, usage_quality) VALUES ('e', 'r', 1,"
    " 'primary', 'b', 'p', 'm', '2026-11-30 12:34:56.789000', '2026-11-30 12:34:57', 'ok', {true},"
    " 7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 'reported', 'exact')",
    "INSERT INTO charge_line (line_id, event_id, request_id, hour, backend, provider, model, meter,"
    " quantity, unit, unit_price, amount, currency) VALUES ('l', 'e', 'r', '2026-11-30 12:00:00',"
    " 'b', 'p', 'm', 'Input Tokens', 7, 1000000, '2', '0.000014', 'USD')",
)


async def test_older_books_are_booked_where_they_happened_and_summed_again(
    database_url: str, versions: list[Path]
) -> None:
    """Rows of before `booked_hour` keep their hour, and get their sums by meter."""
    engine = open_engine(database_url)
    is_sqlite = engine.dialect.name == "sqlite"
    words = {"true": "1", "false": "0"} if is_sqlite else {"true": "true", "false": "false"}

    def to_0002(connection: Connection) -> None:
        config = migrations._config(versions)
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")

    async with engine.begin() as db:
        if is_sqlite:
            await db.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            await db.exec_driver_sql("SET TIME ZONE 'UTC'")
        await db.run_sync(to_0002)
        for statement in OLD_ROWS:
            await db.exec_driver_sql(statement.format(**words))
    await migrations.upgrade_engine(engine, versions=versions)
    await roll_up_dirty(engine)
    async with engine.connect() as db:
        event = (await db.execute(select(EVENTS))).one()
        line = (await db.execute(select(LINES))).one()
        (summed,) = (await db.execute(select(METERS))).all()
    noon = datetime(2026, 11, 30, 12, tzinfo=UTC)
    assert event.booked_hour == line.booked_hour == summed.hour == summed.charge_hour == noon
    assert (summed.quantity, summed.amount) == (7, Decimal("0.000014"))
    await engine.dispose()
