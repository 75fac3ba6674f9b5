"""Limits and budgets as data: set, list, remove; and what the ledger says was spent of a budget.

The only place beside `tenants` where the gateway knows SQL. Must not know counters or requests.
Invariants: a change is one transaction with its line in the audit log, and stamps its tenant, so
that every replica obeys it within a poll; what is spent is summed exactly, from roll-ups where
hours are rolled up and from the charges themselves where they are not.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from gateway.allowances import (
    NANO,
    Budget,
    BudgetScope,
    Counts,
    Limit,
    Mode,
    Scope,
    WindowKind,
    check_budget,
    check_limit,
)
from gateway.errors import BadRequest, NotFound
from gateway.tenant_tables import BudgetRow, LimitRow, TenantRow
from gateway.tenants import (
    Tenants,
    Write,
    budgets_of,
    check_alive,
    find_key,
    find_tenant,
    is_within,
    limits_of,
    subtree_ids,
    translating_database_errors,
)
from telemetry.ids import new_key_id
from telemetry.tables import ChargeLineRow, DirtyHourRow, RequestRow, RollupRow, UsageEventRow

MAX_PER_TENANT = 1000
HOUR = timedelta(hours=1)
Where = Mapping[str, Sequence[str]]  # column → its values
Allowance = TypeVar("Allowance", Limit, Budget)

LINES: Any = ChargeLineRow.__table__
EVENTS: Any = UsageEventRow.__table__
REQUESTS: Any = RequestRow.__table__
ROLLUPS: Any = RollupRow.__table__
DIRTY: Any = DirtyHourRow.__table__


class _Kind(Struct, frozen=True):
    """What limits and budgets do alike: a row each, replaced by one that is the same but for what
    it allows."""

    name: str
    row: type[LimitRow] | type[BudgetRow]
    of: Callable[[AsyncSession, str | None], Awaitable[Sequence[Any]]]
    same: tuple[str, ...]  # the fields that say which one it is


LIMIT = _Kind("limit", LimitRow, limits_of, ("scope", "subject", "counts", "per_s"))
BUDGET = _Kind("budget", BudgetRow, budgets_of, ("scope", "subject", "window", "hours"))


class Allowances:
    """Every change and list of limits and budgets. Raises leaves of the gateway's error tree."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def set_limit(
        self,
        tenant: str,
        counts: Counts,
        amount: Decimal,
        *,
        per_s: int | None,
        scope: Scope = "tenant",
        subject: str | None = None,
        strict: bool = False,
        actor: str,
    ) -> Limit:
        """Make the limit, or give the one of this scope, subject, kind and period a new amount."""
        check_limit(scope, subject, counts, amount, per_s)
        made = Limit(
            id="",
            tenant_id="",
            scope=scope,
            subject=subject,
            counts=counts,
            amount=amount,
            per_s=per_s,
            strict=strict,
        )
        return await self._set(LIMIT, tenant, made, actor)

    async def set_budget(
        self,
        tenant: str,
        amount_usd: Decimal,
        *,
        window: WindowKind = "month",
        hours: int | None = None,
        zone: str = "UTC",
        mode: Mode = "hard",
        downgrade_to: str | None = None,
        scope: BudgetScope = "tenant",
        subject: str | None = None,
        strict: bool = False,
        actor: str,
    ) -> Budget:
        """Make the budget, or change the one of this scope, subject and window."""
        check_budget(scope, subject, amount_usd, window, hours, zone, mode, downgrade_to)
        made = Budget(
            id="",
            tenant_id="",
            scope=scope,
            subject=subject,
            amount_usd=amount_usd,
            window=window,
            hours=hours,
            zone=zone,
            mode=mode,
            strict=strict,
            downgrade_to=downgrade_to,
        )
        return await self._set(BUDGET, tenant, made, actor)

    async def limits(self, tenant: str | None = None) -> list[Limit]:
        return await self._list(LIMIT, tenant)

    async def budgets(self, tenant: str | None = None) -> list[Budget]:
        return await self._list(BUDGET, tenant)

    async def remove_limit(self, limit_id: str, *, actor: str) -> Limit:
        removed: Limit = await self._remove(LIMIT, limit_id, actor)
        return removed

    async def remove_budget(self, budget_id: str, *, actor: str) -> Budget:
        removed: Budget = await self._remove(BUDGET, budget_id, actor)
        return removed

    async def _set(self, kind: _Kind, tenant: str, made: Allowance, actor: str) -> Allowance:
        async with self._tenants.writing(actor) as write:
            owner = await _owner(write, tenant)
            subject = await _subject(write, owner, made.scope, made.subject)
            made = replace(made, tenant_id=owner.id, subject=subject)
            known = await kind.of(write.db, owner.id)
            same = [
                one
                for one in known
                if all(getattr(one, field) == getattr(made, field) for field in kind.same)
            ]
            if not same and len(known) >= MAX_PER_TENANT:
                raise BadRequest(
                    f"A tenant has at most {MAX_PER_TENANT} of them; remove some first."
                )
            made = replace(made, id=same[0].id if same else new_key_id(write.now_ns))
            await write.db.merge(kind.row(**asdict(made)))
            owner.changed = write.number
            before = same[0] if same else None
            write.record(f"{kind.name}.set", f"{kind.name}/{made.id}", before, made)
            return made

    async def _list(self, kind: _Kind, tenant: str | None) -> list[Any]:
        async with self._tenants.reading() as db:
            tenant_id = None if tenant is None else (await find_tenant(db, tenant)).id
            return list(await kind.of(db, tenant_id))

    async def _remove(self, kind: _Kind, one_id: str, actor: str) -> Any:
        async with self._tenants.writing(actor) as write:
            row: Any = await write.db.get(kind.row, one_id)
            if row is None or not await is_within(write.db, row.tenant_id):
                raise NotFound(f"No such {kind.name}.")
            before = next(x for x in await kind.of(write.db, row.tenant_id) if x.id == one_id)
            owner = await write.db.get_one(TenantRow, row.tenant_id)
            owner.changed = write.number
            await write.db.delete(row)
            write.record(f"{kind.name}.remove", f"{kind.name}/{one_id}", before, None)
            return before


async def _owner(write: Write, tenant: str) -> TenantRow:
    owner = await find_tenant(write.db, tenant)
    check_alive(owner)
    return owner


async def _subject(write: Write, owner: TenantRow, scope: str, subject: str | None) -> str | None:
    """A key may be named as everywhere; it is kept by its id."""
    if scope != "key" or subject is None:
        return subject
    key = await find_key(write.db, subject)
    if key.tenant_id != owner.id:
        raise NotFound("No such key of this tenant.")
    return key.id


class Spend(Struct, frozen=True):
    """Nano-dollars of one budget: in all before `cut`, and from there on by slot of `grain_us`."""

    before: int
    slots: dict[int, int]


class LedgerSpend:
    """What the ledger knows was spent, by when requests ended. Raises StoreUnavailable."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def of(
        self,
        owner: str,
        filters: Mapping[str, str],
        *,
        start_us: int,
        cut: int,
        grain_us: int,
        all_slots: bool = False,
    ) -> Spend:
        """Of a tenant and all below it. `filters`: column → value. `start_us`: the window's;
        attempts count by when they began. `all_slots`: also what is before the cut by slot, for
        windows that slide."""
        start = _time(start_us)
        with translating_database_errors():
            async with self._engine.connect() as db:
                async with AsyncSession(bind=db) as session:
                    tenants = await subtree_ids(session, owner)
                where: dict[str, Sequence[str]] = {"tenant_id": tenants or [owner]}
                where |= {column: [value] for column, value in filters.items()}
                rolled = Decimal(0)
                since = start
                if not all_slots:
                    since = await _rolled_until(db, start, _time(cut * grain_us))
                    rolled = await _rolled(db, where, start, since)
                    rolled += await _edge(db, where, start)
                slots = await _by_slot(db, where, max(since, start), grain_us)
        early = sum((v for slot, v in slots.items() if slot < cut and not all_slots), Decimal(0))
        return Spend(
            _nano(rolled + early),
            {slot: _nano(v) for slot, v in slots.items() if all_slots or slot >= cut},
        )


async def _rolled_until(db: AsyncConnection, start: datetime, cut: datetime) -> datetime:
    """The end of the hours that can be read from roll-ups: none of them is dirty, and whatever
    began in them ended before the cut (nothing lives for more than a few hours)."""
    end = (cut - 6 * HOUR).replace(minute=0, second=0, microsecond=0)
    if end <= start:
        return start
    dirty = await db.scalar(
        select(DIRTY.c.hour).where(DIRTY.c.hour < end).order_by(DIRTY.c.hour).limit(1)
    )
    return max(start, min(end, dirty)) if dirty is not None else end


def _whole_hour(start: datetime) -> datetime:
    floor = start.replace(minute=0, second=0, microsecond=0)
    return floor if floor == start else floor + HOUR


async def _rolled(db: AsyncConnection, where: Where, start: datetime, until: datetime) -> Decimal:
    query = select(ROLLUPS.c.amount).where(
        ROLLUPS.c.hour >= _whole_hour(start), ROLLUPS.c.hour < until, ROLLUPS.c.currency == "USD"
    )
    for column, values in where.items():
        query = query.where(ROLLUPS.c[column].in_(values))
    total = Decimal(0)
    async with AsyncSession(bind=db) as session:
        async for amount in await session.stream_scalars(query):
            total += amount
    return total


async def _edge(db: AsyncConnection, where: Where, start: datetime) -> Decimal:
    """Zones that are not whole hours from UTC: the part of an hour at the window's start."""
    end = _whole_hour(start)
    if end == start:
        return Decimal(0)
    return sum((amount for amount, _ in await _lines(db, where, start, end)), Decimal(0))


async def _by_slot(
    db: AsyncConnection, where: Where, since: datetime, grain_us: int
) -> dict[int, Decimal]:
    slots: dict[int, Decimal] = defaultdict(Decimal)
    for amount, ended in await _lines(db, where, since, None):
        slots[_us(ended) // grain_us] += amount
    return slots


async def _lines(
    db: AsyncConnection, where: Where, since: datetime, until: datetime | None
) -> list[tuple[Decimal, datetime]]:
    query = (
        select(LINES.c.amount, REQUESTS.c.ended_at)
        .join(EVENTS, EVENTS.c.event_id == LINES.c.event_id)
        .join(REQUESTS, REQUESTS.c.request_id == LINES.c.request_id)
        .where(
            LINES.c.hour >= since.replace(minute=0, second=0, microsecond=0),
            EVENTS.c.occurred_at >= since,
            LINES.c.amount.is_not(None),
            LINES.c.currency == "USD",
        )
    )
    if until is not None:
        query = query.where(EVENTS.c.occurred_at < until)
    for column, values in where.items():
        query = query.where(LINES.c[column].in_(values))
    return [(amount, ended) for amount, ended in await db.execute(query)]


def _nano(amount: Decimal) -> int:
    """Whole nano-dollars, rounded up: a budget never forgets a fraction."""
    return int((amount * NANO).to_integral_value(ROUND_CEILING))


def _time(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC)


def _us(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000 + at.microsecond
