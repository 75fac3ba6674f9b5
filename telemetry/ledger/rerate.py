"""Price again what was settled, by other books: reversals and replacements, never a change.

A line whose price is another now is taken back by a line with its signs turned, and stands again at
the new price. Running it twice adds nothing, because the second time nothing differs. In an open
month the new lines are booked where the old one was; in a closed month they are booked in the hour
in which they are made, so the closed month stays as it is. What was settled keeps standing in the
request's own record.
"""

from collections import defaultdict
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from telemetry.ledger import entries, rows
from telemetry.ledger.rows import Row
from telemetry.ledger.shipper import (
    EVENTS,
    LINES,
    REQUESTS,
    closed_months,
    mark_dirty,
    month_of,
)
from telemetry.money import EXACT
from telemetry.pricing import PriceBook, rate

RERATE = "rerate"
_IDS = UUID("5f3f4f6e-6f0c-5d6b-9d0c-3a7f4b1c2e90")
_PAGE = 500
_PRICE = ("quantity", "unit", "unit_price", "amount", "currency")


class Repriced(Struct, frozen=True, kw_only=True):
    """What re-rating does to one meter of one tenant and model."""

    tenant_id: str
    model: str
    meter: str
    currency: str
    lines: int
    before: Decimal
    after: Decimal
    unpriced_before: int
    unpriced_after: int

    @property
    def difference(self) -> Decimal:
        return EXACT.subtract(self.after, self.before)


class Rerating(Struct, frozen=True, kw_only=True):
    """`changes` is empty if every line has its price already."""

    events: int  # looked at
    is_applied: bool
    changes: tuple[Repriced, ...]
    corrections: int  # new lines that belong to closed months


async def rerate(
    engine: AsyncEngine,
    book: PriceBook,
    *,
    start: datetime,
    end: datetime,
    now_ns: int,
    apply: bool,
) -> Rerating:
    """Rate every attempt that started in [start, end) by `book`. Pages are transactions of their
    own, so an interrupted run is finished by running it again."""
    sums: dict[tuple[str, str, str, str], _Sum] = defaultdict(_Sum)
    events = corrections = 0
    last = ""
    while True:
        async with engine.begin() as db:
            if engine.dialect.name == "sqlite" and apply:
                await db.exec_driver_sql("BEGIN IMMEDIATE")
            closed = await closed_months(db) if apply else frozenset()
            page = await _page(db, start, end, last)
            if not page:
                break
            last = page[-1].event_id
            events += len(page)
            lines = await _lines(db, [event.event_id for event in page])
            fresh: list[Row] = []
            for event in page:
                fresh += _corrected(event, lines.get(event.event_id, []), book, sums)
            if apply and fresh:
                corrections += _book(fresh, closed, now_ns)
                await db.execute(LINES.insert(), fresh)
                await mark_dirty(db, {line["booked_hour"] for line in fresh}, now_ns)
    changes = tuple(
        Repriced(
            tenant_id=key[0],
            model=key[1],
            meter=key[2],
            currency=key[3],
            lines=found.lines,
            before=found.before,
            after=found.after,
            unpriced_before=found.unpriced_before,
            unpriced_after=found.unpriced_after,
        )
        for key, found in sorted(sums.items())
    )
    return Rerating(events=events, is_applied=apply, changes=changes, corrections=corrections)


class _Sum(Struct):
    lines: int = 0
    before: Decimal = Decimal(0)
    after: Decimal = Decimal(0)
    unpriced_before: int = 0
    unpriced_after: int = 0


async def _page(db: AsyncConnection, start: datetime, end: datetime, last: str) -> list[Any]:
    found = await db.execute(
        select(EVENTS, REQUESTS.c.record)
        .join(REQUESTS, REQUESTS.c.request_id == EVENTS.c.request_id)
        .where(EVENTS.c.occurred_at >= start, EVENTS.c.occurred_at < end, EVENTS.c.event_id > last)
        .order_by(EVENTS.c.event_id)
        .limit(_PAGE)
    )
    return list(found)


async def _lines(db: AsyncConnection, ids: list[str]) -> dict[str, list[Row]]:
    found = await db.execute(select(LINES).where(LINES.c.event_id.in_(ids)))
    by_event: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        by_event[row.event_id].append(dict(row._mapping))
    return by_event


def _corrected(
    event: Any, lines: list[Row], book: PriceBook, sums: dict[tuple[str, str, str, str], _Sum]
) -> list[Row]:
    """The lines that make the event's charges equal what the book says."""
    reversed_ids = {line["reverses_id"] for line in lines}
    standing = {
        line["meter"]: line
        for line in lines
        if line["reverses_id"] is None and line["line_id"] not in reversed_ids
    }
    due = {line["meter"]: line for line in _due(event, book)}
    fresh: list[Row] = []
    for meter in sorted({*standing, *due}):
        old, new = standing.get(meter), due.get(meter)
        if old is not None and new is not None and all(old[n] == new[n] for n in _PRICE):
            continue
        generation = sum(line["meter"] == meter for line in lines)
        if old is not None:
            fresh.append(_reversal(old))
            _note(sums, old, is_new=False)
        if new is not None:
            new["line_id"] = str(uuid5(_IDS, f"{event.event_id}/{meter}/{generation}"))
            new["cause"] = RERATE
            new["booked_hour"] = event.booked_hour if old is None else old["booked_hour"]
            fresh.append(new)
            _note(sums, new, is_new=True)
    return fresh


def _due(event: Any, book: PriceBook) -> list[Row]:
    record = entries.record_from_json(event.record)
    attempt = next(a for a in record.attempts if a.attempt_no == event.attempt_no)
    attempt.charges = rate(attempt, book)
    return rows.line_rows({name: getattr(event, name) for name in EVENTS.c.keys()}, attempt)  # noqa: SIM118  # not a dict


def _reversal(line: Row) -> Row:
    amount = line["amount"]
    return {
        **line,
        "line_id": str(uuid5(_IDS, f"reverse/{line['line_id']}")),
        "quantity": -line["quantity"],
        "amount": None if amount is None else -amount,
        "cause": RERATE,
        "reverses_id": line["line_id"],
    }


def _note(sums: dict[tuple[str, str, str, str], _Sum], line: Row, *, is_new: bool) -> None:
    found = sums[(line["tenant_id"] or "", line["model"], line["meter"], line["currency"])]
    amount, is_unpriced = line["amount"] or Decimal(0), line["amount"] is None
    if is_new:
        found.lines += 1
        found.after = EXACT.add(found.after, amount)
        found.unpriced_after += is_unpriced
    else:
        found.before = EXACT.add(found.before, amount)
        found.unpriced_before += is_unpriced


def _book(lines: list[Row], closed: frozenset[str], now_ns: int) -> int:
    """Move lines of closed months to now. Returns how many."""
    late = [line for line in lines if month_of(line["booked_hour"]) in closed]
    for line in late:
        line["booked_hour"] = rows.hour_of(rows.at(now_ns))
    return len(late)


__all__ = ["RERATE", "Repriced", "Rerating", "rerate"]
