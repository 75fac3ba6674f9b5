"""Reports from both databases: the SQL finds the right hours and stories, and the sums agree."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.database import open_engine
from telemetry.ids import RequestId, new_request_id
from telemetry.pricing import Book, Price, PriceBook, rate
from telemetry.record import Attempt, DeviceTime, Outcome, RequestRecord, Timings
from telemetry.reports.agreement import differences
from telemetry.reports.chargeback import chargeback
from telemetry.reports.explain import Story
from telemetry.reports.period import parse_period
from telemetry.reports.query import explain_record, hourly_sums, pending_hours
from telemetry.tables import DirtyHourRow, LedgerBase, OpenIntentRow, RequestRow, RollupRow
from telemetry.usage import Usage, UsageSource

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
NOON_NS = 1_796_040_000 * 10**9
HOUR_NS = 3_600 * 10**9
DAY = parse_period("2026-11-30", "2026-12-01")
COUNTERS = (
    "requests",
    "attempts",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "device_us",
    "unpriced_lines",
)


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An empty ledger."""
    engine = open_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(LedgerBase.metadata.create_all)
    yield engine
    await engine.dispose()


def books() -> PriceBook:
    """Tokens of acme by list, hardware of the backend `local` by the config."""

    def price(provider: str, meter: str, unit_price: str) -> Price:
        return Price(
            price_id=f"{provider} {meter}",
            provider=provider,
            model="",
            match="any",
            priority=0,
            meter=meter,
            min_input_tokens=0,
            unit=1_000_000,
            unit_price=Decimal(unit_price),
        )

    listed = [price("acme", "Input Tokens", "0.123456789"), price("acme", "Output Tokens", "7")]
    owned = [price("@local", "GPU Time", "0.000027778")]
    return PriceBook(
        [Book(name="list", version=1, published_ns=0, prices={"acme": listed})],
        [Book(name="config", version=1, published_ns=0, prices={"@local": owned})],
    )


def settled(number: int) -> RequestRecord:
    """One of a mixed day: priced by tokens, by device time, or not at all; some with a retry."""
    started_ns = NOON_NS + number % 3 * HOUR_NS
    backend, provider = [("main", "acme"), ("local", "meterline.engine"), ("new", "nobody")][
        number % 3
    ]
    device = DeviceTime(prefill=1_000 + number, decode=50_001 * number)
    attempts = [
        Attempt(
            attempt_no=place + 1,
            reason="primary" if place == 0 else "retry",
            backend=backend,
            provider=provider,
            model="m",
            span_id="1" * 16,
            started_ns=started_ns + place,
            first_token_ns=started_ns + 50_000_000,
            ended_ns=started_ns + 90_000_000,
            outcome=Outcome.OK,
            usage=Usage(in_uncached_text=11 * number + 1, in_cached_read=number, out_text=7),
            usage_source=UsageSource.REPORTED,
            timings=Timings(device_us=device) if backend == "local" else None,
        )
        for place in range(1 + number % 2)
    ]
    price_book = books()
    for attempt in attempts:
        attempt.charges = rate(attempt, price_book)
    return RequestRecord(
        request_id=new_request_id(started_ns),
        node="gw",
        surface="chat",
        opened_ns=started_ns,
        deadline_ns=started_ns + HOUR_NS,
        trace_id="a" * 32,
        span_id="b" * 16,
        tenant_id=f"tn_{number % 4}",  # type: ignore[arg-type]  # a NewType, spelled out
        asked_model="assistant",
        attempts=attempts,
        ended_ns=started_ns + 91_000_000,
        outcome=Outcome.OK,
        status=200,
    )


async def store(db: AsyncEngine, records: list[RequestRecord]) -> None:
    """Requests as the shipper stores them, and one roll-up row an attempt, plainly."""
    rows: list[dict[str, Any]] = []
    for place, record in enumerate(records):
        for attempt in record.attempts:
            usage = attempt.usage or Usage()
            device = attempt.timings.device_us if attempt.timings else None
            amounts = [charge.amount for charge in attempt.charges]
            rows.append(
                {
                    "hour": NOON + timedelta(hours=(attempt.started_ns - NOON_NS) // HOUR_NS),
                    "tenant_id": record.tenant_id,
                    "key_id": f"k{place}-{attempt.attempt_no}",
                    "asked_model": "assistant",
                    "backend": attempt.backend,
                    "provider": attempt.provider,
                    "model": attempt.model,
                    "usage_source": attempt.usage_source.value,
                    "requests": int(attempt is record.served),
                    "attempts": 1,
                    "input_tokens": usage.input_tokens,
                    "cached_tokens": usage.in_cached_read,
                    "output_tokens": usage.output_tokens,
                    "device_us": device.total if device else 0,
                    "amount": sum((a for a in amounts if a is not None), Decimal(0)),
                    "unpriced_lines": amounts.count(None),
                    "currency": "USD",
                }
            )
    async with db.begin() as connection:
        for record in records:
            await connection.execute(
                insert(RequestRow).values(
                    request_id=record.request_id,
                    node="gw",
                    surface="chat",
                    stream=False,
                    opened_at=NOON,
                    ended_at=NOON,
                    outcome="ok",
                    trace_id=record.trace_id,
                    record=msgspec.json.encode(record).decode(),
                    payload_hash="0",
                )
            )
        await connection.execute(insert(RollupRow), rows)


async def test_chargeback_totals_equal_the_explained_requests(db: AsyncEngine) -> None:
    """Fifty requests of four tenants on three backends: the report's totals are the sum over
    `explain` of each request, to the last digit, in any grouping."""
    records = [settled(number) for number in range(50)]
    await store(db, records)
    sums = await hourly_sums(db, DAY)
    stories: list[Story] = []
    for record in records:
        story = await explain_record(db, record.request_id)
        assert story is not None
        stories.append(story)
    for by in (("tenant", "model"), ("backend",), ("hour", "key"), ("day", "provider")):
        report = chargeback(sums, by=by, period=DAY)
        assert differences(report, stories) == ()
    (total,) = chargeback(sums, by=("tenant",), period=DAY).totals
    assert (total.requests, total.attempts) == (50, 75)
    assert total.unpriced_lines > 0
    assert total.cost > 0


async def test_only_the_period_is_read(db: AsyncEngine) -> None:
    """Half-open: the hour at the start is in, the hour at the end is not."""
    await store(db, [settled(0), settled(1), settled(2)])
    period = parse_period("2026-11-30T12:00", "2026-11-30T13:00")
    assert {row.hour for row in await hourly_sums(db, period)} == {NOON}
    assert {row.hour for row in await hourly_sums(db, DAY)} == {
        NOON + timedelta(hours=hour) for hour in range(3)
    }
    assert await hourly_sums(db, parse_period("2027-01-01", "2027-01-02")) == []


async def test_hours_that_are_not_summed_yet_are_counted(db: AsyncEngine) -> None:
    """A report can say that its figures will still grow."""
    async with db.begin() as connection:
        for hour in (DAY.start, DAY.end):
            await connection.execute(insert(DirtyHourRow).values(hour=hour, marked_at=NOON))
    assert await pending_hours(db, DAY) == 1


async def test_a_story_survives_the_database(db: AsyncEngine) -> None:
    """Amounts, buckets and names arrive as they were recorded."""
    record = settled(1)
    await store(db, [record])
    story = await explain_record(db, record.request_id, {"tn_1": "acme"})
    assert story is not None
    assert story.tenant_name == "acme"
    assert story.attempts[0].charges == record.attempts[0].charges
    assert story.attempts[0].charges[0].amount == Decimal("0.000000027805778")


async def test_an_open_request_can_be_explained(db: AsyncEngine) -> None:
    """An intent that was shipped before its settlement is a story without an end."""
    record = settled(0)
    record.outcome, record.ended_ns, record.attempts = None, None, []
    row = {
        "request_id": record.request_id,
        "node": "gw",
        "boot": "b",
        "deadline_at": NOON,
        "record": msgspec.json.encode(record).decode(),
    }
    known = {name: row[name] for name in row if name in OpenIntentRow.__table__.columns}
    async with db.begin() as connection:
        await connection.execute(insert(OpenIntentRow).values(**known))
    story = await explain_record(db, record.request_id)
    assert story is not None
    assert not story.is_settled
    assert story.summary == "still open"


async def test_an_unknown_request_has_no_story(db: AsyncEngine) -> None:
    """None, for the command to say so."""
    assert await explain_record(db, RequestId("no-such-request")) is None
