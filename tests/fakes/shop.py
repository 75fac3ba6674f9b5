"""A small shop: it serves by one price book, rolls up, and can be priced again by another."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry import books
from telemetry.books import Entry
from telemetry.ledger import Ledger
from telemetry.ledger.reconcile import reconcile
from telemetry.ledger.rerate import Rerating, rerate
from telemetry.ledger.rollups import roll_up_dirty
from telemetry.ledger.shipper import CLOSED, LINES, Shipper
from telemetry.pricing import Meter, PriceBook, rate
from telemetry.reports.chargeback import chargeback
from telemetry.reports.period import Period, parse_period
from telemetry.reports.query import hourly_sums
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import open_log, serve

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)  # as FakeClock starts
JANUARY = parse_period("2027-01-01", "2027-02-01")
FEBRUARY = parse_period("2027-02-01", "2027-03-01")


def entry(price: str, meter: Meter = Meter.INPUT, service_tier: str = "") -> Entry:
    return Entry(
        provider="scripted",
        model="m",
        match="equals",
        priority=0,
        meter=meter.value,
        min_input_tokens=0,
        unit=1_000_000,
        unit_price=Decimal(price),
        service_tier=service_tier,
    )


class Shop:
    """A gateway that serves by one book, and can be priced again by another."""

    def __init__(self, engine: AsyncEngine, folder: Path) -> None:
        self.engine = engine
        self.clock = FakeClock()
        self.folder = folder

    async def serve(self, book: PriceBook, count: int) -> None:
        wal = open_log(self.folder, self.clock)
        ledger = Ledger(wal=wal, rate=lambda attempt: rate(attempt, book), clock=self.clock)
        for number in range(count):
            self.clock.advance(600)
            serve(ledger, tokens_in=1_000 + number, tokens_out=0, tenant=f"t{number % 2}")
        wal.sync()
        await Shipper(self.engine, wal, clock=self.clock).ship_all()
        wal.close()
        await roll_up_dirty(self.engine)

    async def rerate(self, book: PriceBook, *, apply: bool = True) -> Rerating:
        done = await rerate(
            self.engine,
            book,
            start=JANUARY.start,
            end=JANUARY.end,
            now_ns=self.clock.now_ns(),
            apply=apply,
        )
        await roll_up_dirty(self.engine)
        return done

    async def cost(self, period: Period = JANUARY) -> tuple[Decimal, int]:
        sums = await hourly_sums(self.engine, period)
        (total,) = chargeback(sums, by=("tenant",), period=period).totals
        return total.cost, total.unpriced_lines

    async def lines(self) -> int:
        async with self.engine.connect() as db:
            return int(await db.scalar(select(func.count()).select_from(LINES)) or 0)

    async def broken(self) -> list[str]:
        laws = await reconcile(self.engine, self.folder, clock=self.clock)
        return [law.line for law in laws if not law.holds]

    async def close_january(self) -> None:
        row: dict[str, Any] = {"month": "2027-01", "closed_at": NOW, "manifest": "", "sha256": ""}
        async with self.engine.begin() as db:
            await db.execute(CLOSED.insert().values(**row))
        self.clock.advance(timedelta(days=20).total_seconds())


async def book_of(engine: AsyncEngine, price: str) -> PriceBook:
    await books.publish(engine, "contract", [entry(price)], source="", now=NOW)
    return await books.load(engine)
