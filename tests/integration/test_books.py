"""Price books in both databases: seeded once, immutable, loaded as the package means them."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from genai_prices.data import providers
from genai_prices.data_snapshot import get_snapshot
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from backends.settings import Gpu, TokenPrice
from telemetry import books
from telemetry.books import BackendPrices, Entry, PublishedBookImmutable
from telemetry.database import open_engine
from telemetry.pricing import Meter, PriceBook, rate
from telemetry.record import Attempt
from telemetry.tables import LedgerBase, PriceBookRow, PriceRow
from telemetry.timings import DeviceTime, Timings
from telemetry.usage import Usage

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An empty ledger."""
    engine = open_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


def ns(at: datetime) -> int:
    """Nanoseconds since the epoch."""
    return int(at.timestamp()) * 10**9


def attempt(at: datetime = NOW, **facts: Any) -> Attempt:
    """An attempt with the given facts."""
    defaults: dict[str, Any] = {
        "attempt_no": 1,
        "reason": "primary",
        "backend": "main",
        "provider": "openai",
        "model": "gpt-4o",
        "span_id": "0" * 16,
        "started_ns": ns(at),
    }
    return Attempt(**{**defaults, **facts})


def entry(unit_price: str, **facts: Any) -> Entry:
    """A price of acme's model m."""
    defaults: dict[str, Any] = {
        "provider": "acme",
        "model": "m",
        "match": "equals",
        "priority": 0,
        "meter": "Input Tokens",
        "min_input_tokens": 0,
        "unit": 1_000_000,
        "unit_price": Decimal(unit_price),
    }
    return Entry(**{**defaults, **facts})


async def count(db: AsyncEngine, table: type[PriceBookRow] | type[PriceRow]) -> int:
    """How many rows a table has."""
    async with db.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(table))).scalar_one())


async def test_seeding_is_idempotent(db: AsyncEngine) -> None:
    """The second seed writes nothing and says so; the first reports what it had to change."""
    first = await books.seed_from_genai_prices(db, NOW)
    rows = await count(db, PriceRow)
    assert first.is_new
    assert first.label == "genai-prices@1"
    assert rows == first.prices > 5000
    assert any("deepseek" in model for model in first.time_of_day)
    assert all("is stored as" in warning for warning in first.quantised)
    assert first.skipped["web_searches_kcount"] > 0
    second = await books.seed_from_genai_prices(db, NOW + timedelta(days=1))
    assert not second.is_new
    assert second.label == first.label
    assert (await count(db, PriceBookRow), await count(db, PriceRow)) == (1, rows)


async def test_a_seeded_database_does_not_import_the_package(database_url: str) -> None:
    """A start on a seeded database stays quick: the package with the lists is never imported."""
    engine = open_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(LedgerBase.metadata.create_all)
    await books.seed_from_genai_prices(engine, NOW)
    await engine.dispose()
    script = f"""
import asyncio, sys
from datetime import UTC, datetime
from telemetry import books
from telemetry.database import open_engine
async def main():
    db = open_engine({database_url!r})
    report = await books.seed_from_genai_prices(db, datetime.now(UTC))
    await books.load(db)
    await db.dispose()
    assert not report.is_new
    assert "genai_prices" not in sys.modules, "imported"
asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_loaded_book_agrees_with_the_package(db: AsyncEngine) -> None:
    """For every model and dates around every change, our price of input and output tokens is the
    package's own, except where it depends on the hour: then ours is the dearer."""
    await books.seed_from_genai_prices(db, NOW)
    book = await books.load(db)
    snapshot = get_snapshot()
    compared = 0
    for provider in providers:
        for model in provider.models:
            days = [NOW, datetime(2024, 1, 1, tzinfo=UTC)]
            by_hour = False
            if isinstance(model.prices, list):
                for condition in model.prices:
                    start = getattr(condition.constraint, "start_date", None)
                    by_hour = by_hour or hasattr(condition.constraint, "start_time")
                    if start is not None:
                        day = datetime(start.year, start.month, start.day, tzinfo=UTC)
                        days += [day, day - timedelta(seconds=1)]
            found = snapshot.find_provider(None, provider.id, None).find_model(
                model.id, all_providers=snapshot.providers
            )
            if found is None:  # a few ids in the package do not match their own rule
                continue
            for day in days:
                sheet = book.listed(provider.id, model.id, ns(day))
                theirs = found.get_prices(day)
                for key, meter in (
                    ("input_mtok", Meter.INPUT),
                    ("output_mtok", Meter.OUTPUT),
                    ("cache_read_mtok", Meter.CACHE_READ),
                ):
                    value = vars(theirs).get(key)
                    if value is None:
                        continue
                    assert sheet is not None, (provider.id, model.id)
                    for tokens in (0, 150_000, 10**9):
                        price = value
                        if not isinstance(value, Decimal):
                            price = value.base
                            for tier in value.tiers:
                                price = tier.price if tokens > tier.start else price
                        ours = sheet.price(meter, tokens)
                        assert ours is not None
                        where = (provider.id, model.id, key, day, tokens)
                        if by_hour:
                            assert ours.unit_price >= price, where
                        else:
                            assert abs(ours.unit_price - price) <= Decimal("5e-10"), where
                        compared += 1
    assert compared > 10_000


async def test_resellers_have_the_lists_they_resell(db: AsyncEngine) -> None:
    """Azure's models are priced by OpenAI's list where Azure's own has none."""
    await books.seed_from_genai_prices(db, NOW)
    book = await books.load(db)
    (line,) = rate(attempt(provider="azure.ai.openai", usage=Usage(in_uncached_text=1)), book)
    assert line.amount is not None
    assert line.book == "genai-prices@1"


async def test_an_updated_list_is_a_new_version_with_a_summary(db: AsyncEngine) -> None:
    """Changed prices become version 2 beside version 1, with counts of what changed; equal prices
    do not."""
    old = [entry("1"), entry("2", meter="Output Tokens"), entry("3", model="gone")]
    new = [entry("1.5"), entry("2", meter="Output Tokens"), entry("4", model="fresh")]
    first = await books.publish(db, "list", old, source="a", now=NOW)
    again = await books.publish(db, "list", old, source="b", now=NOW)
    second = await books.publish(db, "list", new, source="c", now=NOW)
    assert (first.is_new, again.is_new, second.is_new) == (True, False, True)
    assert (second.label, second.added, second.removed, second.changed) == ("list@2", 1, 1, 1)
    assert second.examples == ("acme m Input Tokens: 1 → 1.5",)
    book = await books.load(db)
    (line,) = rate(attempt(provider="acme", model="m", usage=Usage(in_uncached_text=1)), book)
    assert (line.book, line.unit_price, line.price_id) == ("list@2", Decimal("1.5"), "list@2/00000")
    assert await count(db, PriceRow) == 6


async def test_two_publishers_at_once_make_one_version(db: AsyncEngine) -> None:
    """Replicas that start together publish the same list once."""
    reports = await asyncio.gather(
        *(books.publish(db, "list", [entry("1")], source="a", now=NOW) for _ in range(4))
    )
    assert sorted(report.is_new for report in reports) == [False, False, False, True]
    assert {report.label for report in reports} == {"list@1"}
    assert (await count(db, PriceBookRow), await count(db, PriceRow)) == (1, 1)


async def test_published_prices_cannot_be_changed_through_the_orm(db: AsyncEngine) -> None:
    """Changing, deleting or bulk-updating a published row is refused, and nothing is changed."""
    await books.publish(db, "list", [entry("1")], source="a", now=NOW)
    async with AsyncSession(db) as session:
        row = (await session.execute(select(PriceRow))).scalar_one()
        row.unit_price = Decimal(0)
        with pytest.raises(PublishedBookImmutable):
            await session.flush()
    async with AsyncSession(db) as session:
        head = (await session.execute(select(PriceBookRow))).scalar_one()
        await session.delete(head)
        with pytest.raises(PublishedBookImmutable):
            await session.flush()
    async with AsyncSession(db) as session:
        with pytest.raises(PublishedBookImmutable):
            await session.execute(update(PriceRow).values(unit_price=Decimal(0)))
        with pytest.raises(PublishedBookImmutable):
            await session.execute(delete(PriceBookRow))
    async with db.connect() as connection:
        assert (await connection.execute(select(PriceRow.unit_price))).scalar_one() == Decimal(1)


async def test_config_prices_hold_from_when_they_were_published(db: AsyncEngine) -> None:
    """Agreed prices and GPU rates are dated: an attempt pays what held when it started."""
    assert await books.publish_config_prices(db, [BackendPrices("main", "openai")], NOW) is None
    token = TokenPrice(input=Decimal(2), output=Decimal(8), cached_input=Decimal("0.5"))
    gpu = Gpu(rate_per_hour=Decimal("0.10"))
    config = [
        BackendPrices("main", "openai", price=token),
        BackendPrices("local", "meterline.engine", gpu=gpu),
    ]
    first = await books.publish_config_prices(db, config, NOW)
    same = await books.publish_config_prices(db, config[::-1], NOW + timedelta(hours=1))
    cheaper = [
        BackendPrices("main", "openai", price=TokenPrice(input=Decimal(1), output=Decimal(8)))
    ]
    second = await books.publish_config_prices(db, cheaper, NOW + timedelta(hours=2))
    empty = await books.publish_config_prices(db, [], NOW + timedelta(hours=3))
    assert first and same and second and empty
    assert [r.label for r in (first, same, second, empty)] == [
        "config@1",
        "config@1",
        "config@2",
        "config@3",
    ]
    assert (first.is_new, same.is_new) == (True, False)
    assert first.quantised == ()
    book = await books.load(db)
    usage = Usage(in_uncached_text=1_000_000, in_cached_read=1_000_000)

    def cost(at: datetime, book: PriceBook = book) -> list[Decimal | None]:
        return [charge.amount for charge in rate(attempt(at, usage=usage), book)]

    assert cost(NOW - timedelta(seconds=1)) == [None, None]
    assert cost(NOW) == [Decimal(2), Decimal("0.5")]
    assert cost(NOW + timedelta(hours=2)) == [Decimal(1), Decimal(1)]
    assert cost(NOW + timedelta(hours=3)) == [None, None]
    timings = Timings(device_us=DeviceTime(decode=1_000_000))
    (line,) = rate(attempt(backend="local", provider="meterline.engine", timings=timings), book)
    assert (line.meter, line.amount) == ("GPU Decode", Decimal("0.000027778"))


async def test_a_config_price_with_too_many_decimals_is_reported(db: AsyncEngine) -> None:
    """More than nine decimals are rounded half up, and the operator is told."""
    price = TokenPrice(input=Decimal("0.00000000051"), output=Decimal(1))
    report = await books.publish_config_prices(db, [BackendPrices("b", "x", price=price)], NOW)
    assert report is not None
    assert report.quantised == ("backend b, Input Tokens: 5.1E-10 is stored as 0.000000001",)


async def test_an_empty_database_prices_nothing(db: AsyncEngine) -> None:
    """Without books everything is unpriced."""
    (line,) = rate(attempt(usage=Usage(out_text=1)), await books.load(db))
    assert line.amount is None
