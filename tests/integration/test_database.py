"""The tables exist and keep money exact on both databases."""

from datetime import UTC, datetime
from decimal import Decimal

from sqlalchemy import select

from telemetry.database import open_engine
from telemetry.tables import ChargeLineRow, LedgerBase, PriceBookRow, PriceRow


async def test_a_price_survives_the_round_trip_exactly(database_url: str) -> None:
    """Nine decimals go in and the same nine come out, with an aware UTC time."""
    engine = open_engine(database_url)
    at = datetime(2026, 11, 30, 12, tzinfo=UTC)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
        await db.execute(
            PriceBookRow.__table__.insert().values(
                book_id="b", name="n", version=1, published_at=at, source="s", sha256="0"
            )
        )
        await db.execute(
            PriceRow.__table__.insert().values(
                price_id="p",
                book_id="b",
                provider="x",
                model="m",
                match="equals",
                priority=0,
                meter="Input Tokens",
                min_input_tokens=0,
                unit=1_000_000,
                unit_price=Decimal("0.123456789"),
                currency="USD",
                effective_from=at,
            )
        )
        row = (await db.execute(select(PriceRow.__table__))).one()
    await engine.dispose()
    assert row.unit_price == Decimal("0.123456789")
    assert row.effective_from == at
    assert ChargeLineRow.__tablename__ == "charge_line"
