"""Drafts, published books and pricing again, on both databases."""

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry import books
from telemetry.books import BookRefused, BookUnknown
from telemetry.database import open_engine
from telemetry.ledger import Ledger
from telemetry.ledger.rollups import METERS, roll_up_dirty
from telemetry.ledger.shipper import LINES, Shipper
from telemetry.pricing import Meter, PriceBook, rate
from telemetry.tables import LedgerBase
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import open_log, serve
from tests.fakes.shop import FEBRUARY, NOW, Shop, book_of, entry


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with the ledger's tables."""
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


async def test_a_draft_prices_nothing_until_it_is_published(engine: AsyncEngine) -> None:
    """Importing shows what would change; publishing changes it; both happen once."""
    first = await books.draft(engine, "contract", [entry("3")], source="csv", now=NOW)
    again = await books.draft(engine, "contract", [entry("3")], source="csv", now=NOW)
    assert (first.label, first.is_new) == ("contract@1", True)
    assert (again.label, again.is_new) == ("contract@1", False)
    at_ns = FakeClock().now_ns()
    assert (await books.load(engine)).listed("scripted", "m", at_ns) is None
    assert await books.published_count(engine) == 0
    with pytest.raises(BookUnknown, match="contract@1"):
        await books.find(engine, "contract")
    await books.publish_draft(engine, "contract@1", NOW)
    assert (await books.find(engine, "contract")).status == "published"
    assert (await books.load(engine)).listed("scripted", "m", at_ns) is not None
    with pytest.raises(BookRefused, match="published already"):
        await books.publish_draft(engine, "contract@1", NOW)


async def test_an_outdated_draft_is_refused(engine: AsyncEngine) -> None:
    """It was compared with a book that is not the newest any more."""
    await books.draft(engine, "contract", [entry("3")], source="csv", now=NOW)
    await books.publish(engine, "contract", [entry("4")], source="csv", now=NOW)
    with pytest.raises(BookRefused, match="contract@2 was published after"):
        await books.publish_draft(engine, "contract@1", NOW)


async def test_own_books_are_asked_before_the_public_lists(engine: AsyncEngine) -> None:
    """A contract wins over LiteLLM's map, and that over genai-prices."""
    for name, price in (("genai-prices", "3"), ("litellm", "2"), ("zebra", "1")):
        await books.publish(engine, name, [entry(price)], source="", now=NOW)
    book = await books.load(engine)
    assert [catalogue.name for catalogue in book.catalogues] == ["zebra", "litellm", "genai-prices"]
    asked = await books.load_with(engine, "genai-prices@1")
    assert next(iter(asked.catalogues)).name == "genai-prices"


def test_changes_name_each_price_that_differs() -> None:
    """Came, went, changed; a tier is a price of its own."""
    old = [entry("3"), entry("9", Meter.OUTPUT)]
    new = [entry("4"), entry("2", service_tier="batch")]
    assert [(c.meter, c.service_tier, c.before, c.after) for c in books.changes(old, new)] == [
        ("Input Tokens", "", Decimal(3), Decimal(4)),
        ("Input Tokens", "batch", None, Decimal(2)),
        ("Output Tokens", "", Decimal(9), None),
    ]


async def test_rerating_reverses_and_replaces_once(engine: AsyncEngine, tmp_path: Path) -> None:
    """A dry run says what would change; applying changes the totals by just that; again, nothing.
    Unpriced lines become priced ones, old lines stay, and every law holds."""
    shop = Shop(engine, tmp_path)
    await shop.serve(PriceBook(), 10)  # nobody knows a price
    assert await shop.cost() == (Decimal(0), 10)
    book = await book_of(engine, "2.5")
    dry = await shop.rerate(book, apply=False)
    assert await shop.lines() == 10
    done = await shop.rerate(book)
    assert dry.changes == done.changes
    assert (done.events, sum(change.lines for change in done.changes)) == (10, 10)
    expected = sum(range(1_000, 1_010)) * Decimal("2.5") / 1_000_000
    assert sum(change.difference for change in done.changes) == expected
    assert await shop.cost() == (expected, 0)
    assert await shop.lines() == 30
    again = await shop.rerate(book)
    assert (again.changes, await shop.lines()) == ((), 30)
    await shop.rerate(await book_of(engine, "3"))
    assert await shop.cost() == (expected / Decimal("2.5") * 3, 0)
    await shop.rerate(book)  # and back to a price that it had before
    assert await shop.cost() == (expected, 0)
    assert await shop.broken() == []
    async with engine.connect() as db:
        quantity = sum((await db.execute(select(METERS.c.quantity))).scalars())
    assert quantity == sum(range(1_000, 1_010))


async def test_a_closed_month_is_corrected_in_the_open_one(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Its own figures stay; the difference is booked in the month of the correction."""
    shop = Shop(engine, tmp_path)
    await shop.serve(await book_of(engine, "2"), 5)
    before = await shop.cost()
    await shop.close_january()
    done = await shop.rerate(await book_of(engine, "3"))
    assert done.corrections == 10
    assert await shop.cost() == before
    assert (await shop.cost(FEBRUARY))[0] == before[0] / 2
    assert await shop.broken() == []


async def test_a_late_event_of_a_closed_month_is_booked_on_arrival(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """It is charged for the hour in which it happened and booked in the hour in which it came."""
    shop = Shop(engine, tmp_path)
    book = await book_of(engine, "2")
    wal = open_log(tmp_path, shop.clock)
    serve(Ledger(wal=wal, rate=lambda a: rate(a, book), clock=shop.clock), tokens_in=10)
    await shop.close_january()
    wal.sync()
    await Shipper(engine, wal, clock=shop.clock).ship_all()
    wal.close()
    await roll_up_dirty(engine)
    assert (await shop.cost())[0] == 0
    assert (await shop.cost(FEBRUARY))[0] == Decimal("0.00002")
    async with engine.connect() as db:
        row = (await db.execute(select(METERS).where(METERS.c.meter == "Input Tokens"))).one()
    assert (row.charge_hour.month, row.hour.month) == (1, 2)
    assert await shop.broken() == []


async def test_tampering_with_a_correction_is_named(engine: AsyncEngine, tmp_path: Path) -> None:
    """A reversal that is not the mirror of its line breaks a law, by its id."""
    shop = Shop(engine, tmp_path)
    await shop.serve(await book_of(engine, "2"), 1)
    await shop.rerate(await book_of(engine, "3"))
    reversal = LINES.c.reverses_id.is_not(None)
    async with engine.begin() as db:
        line_id = await db.scalar(select(LINES.c.line_id).where(reversal))
        await db.execute(LINES.update().where(reversal).values(quantity=-1))
    assert any("corrections" in line and str(line_id) in line for line in await shop.broken())
