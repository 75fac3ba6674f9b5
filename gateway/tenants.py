"""Tenants, their API keys and the audit log: what may be done to them, and the queries.

Tenants are a tree (organisation, team, project, to any depth up to `MAX_DEPTH`): what a tenant may
take, its ancestors must allow too, and who suspends one suspends all below it.

Serves SQLite and PostgreSQL alike. Must not know HTTP, caches or how a credential arrives.
Invariants: every write is one transaction that starts by taking the next number of
`identity_state` (so writes are serial, and numbers appear in commit order), stamps the rows it
touched with that number, and appends to `audit_log`. Whoever remembers a number can ask what
changed since. No row is ever deleted: usage refers to them for years.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar
from uuid import UUID

import asyncpg
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict, replace
from sqlalchemy import (
    CTE,
    Select,
    func,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from gateway.allowances import Budget, Limit
from gateway.errors import BadRequest, Conflict, Forbidden, NotFound, StoreUnavailable
from gateway.keys import MODEL_PATTERN, PREFIX, SCOPES, KeyRing
from gateway.roles import Principal
from gateway.tenant_tables import (
    MAX_COST_CENTRE_CHARS,
    MAX_KEY_NAME_CHARS,
    AdminKeyRow,
    AuditRow,
    BudgetRow,
    IdentityStateRow,
    KeyRow,
    LimitRow,
    TenantBase,
    TenantRow,
)
from gateway.trust import networks
from telemetry.clock import Clock
from telemetry.database import open_engine
from telemetry.ids import KeyId, TenantId, new_key_id, new_tenant_id
from telemetry.money import plain
from telemetry.redaction import Secret
from telemetry.reports.chargeback import TenantPlace

TenantState = Literal["active", "suspended", "deleted"]
KeyState = Literal["active", "rotated", "expired", "revoked"]

NAME: Final = re.compile(r"\w(?:[\w .@+-]{0,62}[\w.@+-])?")
LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,61}[a-z0-9])?")
KIND: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
CURRENCY: Final = re.compile(r"[A-Z]{3}")
MAX_DEPTH: Final = 16
MAX_LABELS: Final = 32
MAX_LABEL_CHARS: Final = 256
MAX_MODEL_PATTERNS: Final = 100
MAX_GRACE: Final = timedelta(days=90)
MAX_LIFE: Final = timedelta(days=36_525)
MAX_PAGE: Final = 100
MAX_CHANGES: Final = 1_000
WITHIN: Final = "within"  # in a session's info: whose part of the tree it may see


# ------------------------------------------------------------------------------- what callers see


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: Annotated[TenantId, Meta(description="Never changes and is never used again.")]
    path: Annotated[str, Meta(description="The names from the top: `acme/search/ranking`.")]
    name: Annotated[str, Meta(description="Unique among the living tenants of its parent.")]
    parent_id: Annotated[TenantId | None, Meta(description="null: at the top.")]
    kind: Annotated[
        str | None, Meta(description="What it is to you: organisation, team, project, …")
    ]
    state: Annotated[
        TenantState, Meta(description="The keys of a tenant that is not active are refused.")
    ]
    effective_state: Annotated[TenantState, Meta(description="suspended too where an ancestor is.")]
    cost_centre: Annotated[
        str | None, Meta(description="Where it is booked; null: as its nearest ancestor.")
    ]
    currency: Annotated[
        str | None, Meta(description="In which it is billed; null: as its nearest ancestor.")
    ]
    labels: Annotated[dict[str, str], Meta(description="Free facts.")]
    created_at: datetime


class TenantChange(Struct, frozen=True, kw_only=True):
    """What to change of a tenant; UNSET leaves as it is, None takes it away. `parent`: id, path or
    name of the new parent, None to move it to the top."""

    name: str | UnsetType = UNSET
    parent: str | UnsetType | None = UNSET
    kind: str | UnsetType | None = UNSET
    cost_centre: str | UnsetType | None = UNSET
    currency: str | UnsetType | None = UNSET
    labels: dict[str, str] | UnsetType = UNSET


class Ancestor(Struct, frozen=True, kw_only=True):
    """A tenant above another one: what it allows binds those below."""

    tenant_id: TenantId
    tenant: str
    state: TenantState = "active"
    limits: tuple[Limit, ...] = ()
    budgets: tuple[Budget, ...] = ()


class Place(Struct, frozen=True, kw_only=True):
    """Where a tenant stands in the tree, for reports."""

    names: tuple[str, ...]  # from the top, itself last
    ids: tuple[str, ...]  # likewise
    cost_centre: str | None  # its own, or its nearest ancestor's
    currency: str | None  # likewise

    @property
    def path(self) -> str:
        return "/".join(self.names)


class Key(Struct, frozen=True, kw_only=True):
    """An API key as it may be shown: all but the secret and its HMAC."""

    id: Annotated[KeyId, Meta(description="What the ledger and the audit log call it.")]
    public_id: Annotated[str, Meta(description="The readable part: `sk-ml-PUBLICID-…`.")]
    tenant_id: TenantId
    tenant: Annotated[str, Meta(description="The tenant's path.")]
    name: Annotated[str, Meta(description="What it is for.")]
    state: Annotated[
        KeyState,
        Meta(description="Of the key alone. rotated: replaced, and works until grace_until."),
    ]
    model_allow: Annotated[
        list[str] | None,
        Meta(
            description="Models it may ask for: names, and starts of names followed by `*`. "
            "null: all. Empty: none."
        ),
    ]
    target_allow: Annotated[
        list[str] | None,
        Meta(
            description="Where its requests may go: `BACKEND/MODEL`, and starts of it followed by "
            "`*`. null: anywhere. Empty: nowhere."
        ),
    ]
    scopes: Annotated[
        list[str] | None,
        Meta(description=f"What it may do, of {', '.join(SCOPES)}. null: all. Empty: nothing."),
    ]
    ip_allow: Annotated[
        list[str] | None,
        Meta(description="Networks (CIDR) it may be used from. null: any. Empty: none."),
    ]
    created_at: datetime
    expires_at: Annotated[datetime | None, Meta(description="null: never.")]
    revoked_at: datetime | None
    rotated_to: Annotated[KeyId | None, Meta(description="The id of the key that replaces it.")]
    grace_until: datetime | None


class IssuedKey(Struct, frozen=True, kw_only=True):
    """A new key and, this once, its secret."""

    key: Key
    secret: Secret


class KeyChange(Struct, frozen=True, kw_only=True):
    """What to change of a key; UNSET leaves as it is, None lifts the restriction."""

    name: str | UnsetType = UNSET
    model_allow: list[str] | UnsetType | None = UNSET
    target_allow: list[str] | UnsetType | None = UNSET
    scopes: list[str] | UnsetType | None = UNSET
    ip_allow: list[str] | UnsetType | None = UNSET
    expires_at: datetime | UnsetType | None = UNSET


class Bounds(Struct, frozen=True, kw_only=True):
    """What a key is narrowed to. Of each list: None allows all, an empty one nothing."""

    model_allow: list[str] | None = None
    target_allow: list[str] | None = None
    scopes: list[str] | None = None
    ip_allow: list[str] | None = None


class Identity(Struct, frozen=True, kw_only=True):
    """What the hot path needs to know of a key. `repr` would show the HMAC, so there is none."""

    key_id: KeyId
    public_id: str
    secret_hmac: bytes
    tenant_id: TenantId
    tenant_name: str
    tenant_state: TenantState
    model_allow: list[str] | None
    expires_at: datetime | None
    revoked_at: datetime | None
    grace_until: datetime | None
    limits: tuple[Limit, ...] = ()  # of the tenant, all of them
    budgets: tuple[Budget, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()  # nearest first, the top last
    target_allow: list[str] | None = None
    scopes: list[str] | None = None
    ip_allow: list[str] | None = None

    __repr__ = object.__repr__


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some rows, oldest first, and whether more follow the last one."""

    items: list[Item]
    has_more: bool


# ---------------------------------------------------------------------------------------- queries


class View(Struct, frozen=True, kw_only=True):
    """On whose behalf a query runs."""

    actor: str | None = None  # None: whom the caller of the method names
    within: str | None = None  # a tenant: it and all below it are all there is
    request_id: str | None = None


@dataclass(slots=True)
class Write:
    """One open write transaction. Whoever changes what a key may do stamps its row, or its
    tenant's, with `number`: then every replica hears of it."""

    db: AsyncSession
    number: int
    at: datetime
    now_ns: int
    actor: str
    request_id: str | None = None

    def record(self, action: str, of: str, before: Struct | None, after: Struct | None) -> None:
        self.db.add(
            AuditRow(
                at=self.at,
                actor=self.actor[:128],
                action=action,
                object=of,
                before=None if before is None else msgspec.to_builtins(before),
                after=None if after is None else msgspec.to_builtins(after),
                request_id=self.request_id,
            )
        )


class Tenants:
    """Every query on tenants and keys. A tenant is referred to by id, by its path from the top, or
    by its name where only one has it; a key by id, public id, or any text that starts like the key.
    Raises leaves of the gateway's error tree only."""

    def __init__(
        self, engine: AsyncEngine, ring: KeyRing, clock: Clock, view: View | None = None
    ) -> None:
        self._engine = engine
        self._ring = ring
        self._clock = clock
        self._view = view or View()

    @property
    def within(self) -> str | None:
        """The tenant that is all there is for whoever asks; None: all are."""
        return self._view.within

    def seen_by(self, principal: Principal, request_id: str | None = None) -> Self:
        """As this principal may see it: its part of the tree, and its name in the audit log."""
        view = View(actor=principal.name, within=principal.tenant_id, request_id=request_id)
        return type(self)(self._engine, self._ring, self._clock, view)

    @classmethod
    def open(cls, database: str, ring: KeyRing, clock: Clock) -> Self:
        """On an engine of its own; `close` it. Raises telemetry.database.DatabaseUrlInvalid."""
        return cls(open_engine(database), ring, clock)

    async def close(self) -> None:
        await self._engine.dispose()

    async def verify_pepper(self) -> None:
        """Raise Conflict when the keys in this database were made under another pepper."""
        async with self.reading() as db:
            state = await db.get(IdentityStateRow, 1)
        if state is not None and state.pepper_check is not None:
            self._same_pepper(state.pepper_check)

    # -- tenants

    async def create_tenant(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        *,
        parent: str | None = None,
        kind: str | None = None,
        cost_centre: str | None = None,
        currency: str | None = None,
        actor: str,
    ) -> Tenant:
        """`parent`: id, path or name; None: at the top."""
        _check_name(name)
        _check_labels(labels or {})
        _check_facts(kind, cost_centre, currency)
        with _taken(name):
            async with self.writing(actor) as write:
                if parent is None:
                    _check_top(write.db)
                above = None if parent is None else await _find_parent(write.db, parent)
                row = TenantRow(
                    id=new_tenant_id(write.now_ns),
                    parent_id=None if above is None else above.id,
                    name=name,
                    kind=kind,
                    state="active",
                    cost_centre=cost_centre,
                    currency=currency,
                    labels=dict(labels or {}),
                    created_at=write.at,
                    changed=write.number,
                )
                write.db.add(row)
                await write.db.flush()
                await _check_depth(write.db, row)
                tenant = await _shown(write.db, row)
                write.record("tenant.create", f"tenant/{row.id}", None, tenant)
        return tenant

    async def tenants(
        self, *, after: str | None = None, limit: int = 20, below: str | None = None
    ) -> Page[Tenant]:
        """All tenants, deleted ones too, by age; or one and all below it."""
        query = select(TenantRow).order_by(TenantRow.id).limit(_page_size(limit) + 1)
        if after is not None:
            query = query.where(TenantRow.id > _cursor(after))
        async with self.reading() as db:
            query = query.where(_seen(db, TenantRow.id))
            if below is not None:
                top = await find_tenant(db, below)
                query = query.where(TenantRow.id.in_(select(_subtree([top.id]).c.id)))
            rows = (await db.scalars(query)).all()[: limit + 1]
            shown = await _all_shown(db, rows[:limit])
        return Page(shown, len(rows) > limit)

    async def tenant(self, ref: str) -> Tenant:
        async with self.reading() as db:
            return await _shown(db, await find_tenant(db, ref))

    async def subtree(self, ref: str) -> list[TenantId]:
        """The ids of a tenant and of all below it, deleted ones too."""
        async with self.reading() as db:
            return await subtree_ids(db, (await find_tenant(db, ref)).id)

    async def places(self) -> dict[str, Place]:
        """id → where it stands, of every tenant, deleted ones too."""
        async with self.reading() as db:
            rows = {row.id: row for row in await db.scalars(select(TenantRow))}
            seen = set(await db.scalars(select(TenantRow.id).where(_seen(db, TenantRow.id))))
        return {
            tenant_id: _place(_chain(tenant_id, rows)) for tenant_id in rows if tenant_id in seen
        }

    async def change_tenant(self, ref: str, change: TenantChange, *, actor: str) -> Tenant:
        """Rename, move, or change its facts. Whoever is moved takes all below along."""
        if change.name is not UNSET:
            _check_name(change.name)
        if change.labels is not UNSET:
            _check_labels(change.labels)
        _check_facts(change.kind, change.cost_centre, change.currency)
        with _taken(ref if change.name is UNSET else change.name):
            async with self.writing(actor) as write:
                row = await find_tenant(write.db, ref)
                check_alive(row)
                before = await _shown(write.db, row)
                for column in ("name", "kind", "cost_centre", "currency", "labels"):
                    value = getattr(change, column)
                    if value is not UNSET:
                        setattr(row, column, value)
                if change.parent is not UNSET:
                    await _move_below(write.db, row, change.parent)
                await write.db.flush()
                after = await _shown(write.db, row)
                if after == before:
                    return after
                row.changed = write.number
                moved = after.parent_id != before.parent_id
                action = "tenant.move" if moved else "tenant.change"
                write.record(action, f"tenant/{row.id}", before, after)
                return after

    async def suspend_tenant(self, ref: str, *, actor: str) -> Tenant:
        """From now on its keys are refused, and those of all tenants below it. Suspending twice is
        one act."""
        return await self._set_state(ref, "suspended", "tenant.suspend", actor)

    async def resume_tenant(self, ref: str, *, actor: str) -> Tenant:
        """Tenants below it that were suspended themselves stay so."""
        return await self._set_state(ref, "active", "tenant.resume", actor)

    async def delete_tenant(self, ref: str, *, actor: str) -> Tenant:
        """For good: its keys are revoked and its name is free again; its usage stays. Refused while
        living tenants are below it."""
        async with self.writing(actor) as write:
            row = await find_tenant(write.db, ref)
            if row.state == "deleted":
                return await _shown(write.db, row)
            below = await write.db.scalar(
                select(func.count())
                .select_from(TenantRow)
                .where(TenantRow.parent_id == row.id, TenantRow.state != "deleted")
            )
            if below:
                raise Conflict(
                    f"{below} tenants are right below this one: move or delete them first, or "
                    "suspend this one to refuse the keys of all."
                )
            keys = await write.db.scalars(
                select(KeyRow).where(KeyRow.tenant_id == row.id, KeyRow.revoked_at.is_(None))
            )
            for key in keys:
                await self._revoke(write, key)
            return await self._move(write, row, "deleted", "tenant.delete")

    async def _set_state(self, ref: str, state: TenantState, action: str, actor: str) -> Tenant:
        async with self.writing(actor) as write:
            row = await find_tenant(write.db, ref)
            if row.state == state:
                return await _shown(write.db, row)
            check_alive(row)
            return await self._move(write, row, state, action)

    async def _move(self, write: Write, row: TenantRow, state: TenantState, action: str) -> Tenant:
        before = await _shown(write.db, row)
        row.state = state
        row.changed = write.number
        after = await _shown(write.db, row)
        write.record(action, f"tenant/{row.id}", before, after)
        return after

    # -- keys

    async def create_key(
        self,
        tenant: str,
        *,
        name: str = "",
        model_allow: Sequence[str] | None = None,
        target_allow: Sequence[str] | None = None,
        scopes: Sequence[str] | None = None,
        ip_allow: Sequence[str] | None = None,
        expires_at: datetime | None = None,
        actor: str,
    ) -> IssuedKey:
        """Of each list: None allows all, an empty one nothing."""
        bounds = Bounds(
            model_allow=_listed(model_allow),
            target_allow=_listed(target_allow),
            scopes=_listed(scopes),
            ip_allow=_listed(ip_allow),
        )
        self._check_key(name, bounds, expires_at)
        async with self.writing(actor) as write:
            owner = await find_tenant(write.db, tenant)
            check_alive(owner)
            row, secret = await self._mint(
                write, tenant_id=owner.id, name=name, bounds=bounds, expires_at=expires_at
            )
            made = await _key_shown(write.db, row, write.at)
            write.record("key.create", f"key/{row.id}", None, made)
            return IssuedKey(key=made, secret=secret)

    async def keys(
        self, tenant: str | None = None, *, after: str | None = None, limit: int = 20
    ) -> Page[Key]:
        """One tenant's keys, or all; revoked ones too, by age."""
        query = select(KeyRow).order_by(KeyRow.id).limit(_page_size(limit) + 1)
        if after is not None:
            query = query.where(KeyRow.id > _cursor(after))
        async with self.reading() as db:
            query = query.where(_seen(db, KeyRow.tenant_id))
            if tenant is not None:
                query = query.where(KeyRow.tenant_id == (await find_tenant(db, tenant)).id)
            rows = (await db.scalars(query)).all()
            shown = await _keys_shown(db, rows[:limit], self._now())
        return Page(shown, len(rows) > limit)

    async def key(self, ref: str) -> Key:
        async with self.reading() as db:
            return await _key_shown(db, await find_key(db, ref), self._now())

    async def rotate_key(self, ref: str, grace: timedelta, *, actor: str) -> IssuedKey:
        """A new key like the old one, which works on until `grace` has passed. A key that expires
        gets its whole lifetime again."""
        if not timedelta(0) <= grace <= MAX_GRACE:
            raise BadRequest(
                f"The grace period must be between 0 and {MAX_GRACE.days} days.", param="grace_s"
            )
        async with self.writing(actor) as write:
            old = await find_key(write.db, ref)
            await self._check_usable(write, old)
            before = await _key_shown(write.db, old, write.at)
            new, secret = await self._mint(
                write,
                tenant_id=old.tenant_id,
                name=old.name,
                bounds=msgspec.convert(old, Bounds, from_attributes=True),
                expires_at=old.expires_at and write.at + (old.expires_at - old.created_at),
            )
            old.rotated_to = new.id
            old.grace_until = write.at + grace
            old.changed = write.number
            made, after = await _keys_shown(write.db, [new, old], write.at)
            write.record("key.create", f"key/{new.id}", None, made)
            write.record("key.rotate", f"key/{old.id}", before, after)
            return IssuedKey(key=made, secret=secret)

    async def revoke_key(self, ref: str, *, actor: str) -> Key:
        """At once and for good; a second time changes nothing."""
        async with self.writing(actor) as write:
            row = await find_key(write.db, ref)
            if row.revoked_at is None:
                await self._revoke(write, row)
            return await _key_shown(write.db, row, write.at)

    async def change_key(self, ref: str, change: KeyChange, *, actor: str) -> Key:
        self._check_key(
            "" if change.name is UNSET else change.name,
            Bounds(
                model_allow=change.model_allow or None,
                target_allow=change.target_allow or None,
                scopes=change.scopes or None,
                ip_allow=change.ip_allow or None,
            ),
            None if change.expires_at is UNSET else change.expires_at,
        )
        async with self.writing(actor) as write:
            row = await find_key(write.db, ref)
            if row.revoked_at is not None:
                raise Conflict("This key is revoked; create a new one.")
            before = await _key_shown(write.db, row, write.at)
            for column in change.__struct_fields__:
                value = getattr(change, column)
                if value is not UNSET:
                    setattr(row, column, value)
            row.changed = write.number
            after = await _key_shown(write.db, row, write.at)
            write.record("key.change", f"key/{row.id}", before, after)
            return after

    async def _mint(
        self,
        write: Write,
        *,
        tenant_id: str,
        name: str,
        bounds: Bounds,
        expires_at: datetime | None,
    ) -> tuple[KeyRow, Secret]:
        await self._claim_pepper(write)
        minted = self._ring.mint()
        row = KeyRow(
            id=new_key_id(write.now_ns),
            public_id=minted.public_id,
            tenant_id=tenant_id,
            name=name,
            secret_hmac=minted.digest,
            **asdict(bounds),
            created_at=write.at,
            expires_at=expires_at,
            changed=write.number,
        )
        write.db.add(row)
        await write.db.flush()
        return row, minted.secret

    async def _revoke(self, write: Write, row: KeyRow) -> None:
        before = await _key_shown(write.db, row, write.at)
        row.revoked_at = write.at
        row.changed = write.number
        after = await _key_shown(write.db, row, write.at)
        write.record("key.revoke", f"key/{row.id}", before, after)

    async def _check_usable(self, write: Write, row: KeyRow) -> None:
        check_alive(await find_tenant(write.db, row.tenant_id))
        state = _key_state(row, write.at)
        if state in ("revoked", "expired"):
            raise Conflict(f"This key is {state}; create a new one.")
        if row.rotated_to is not None:
            raise Conflict(f"This key was rotated already, to {row.rotated_to}; rotate that one.")

    def _check_key(self, name: str, bounds: Bounds, expires_at: datetime | None) -> None:
        if len(name) > MAX_KEY_NAME_CHARS or not name.isprintable():
            raise BadRequest(
                f"A key's name is up to {MAX_KEY_NAME_CHARS} printable characters.", param="name"
            )
        _check_bounds(bounds)
        if expires_at is None:
            return
        if expires_at.tzinfo is None:
            raise BadRequest("The expiry needs a time zone, such as Z.", param="expires_at")
        if not self._now() < expires_at < self._now() + MAX_LIFE:
            raise BadRequest(
                "The expiry must be in the future, within 100 years.", param="expires_at"
            )

    async def _claim_pepper(self, write: Write) -> None:
        state = await write.db.get_one(IdentityStateRow, 1)
        if state.pepper_check is not None:
            self._same_pepper(state.pepper_check)
        state.pepper_check = self._ring.fingerprint()

    async def rehash(self, public_id: str, old: bytes, new: bytes) -> None:
        """Keep a key's HMAC under the newest pepper from now on, unless it changed meanwhile."""
        async with self.writing("gateway") as write:
            row = await find_key(write.db, public_id)
            if row.secret_hmac == old and row.revoked_at is None:
                row.secret_hmac = new
                row.changed = write.number
                state = await write.db.get_one(IdentityStateRow, 1)
                state.pepper_check = self._ring.fingerprint()
                write.record("key.rehash", f"key/{row.id}", None, None)

    def _same_pepper(self, known: bytes) -> None:
        if not self._ring.knows(known):
            raise Conflict(
                "The key pepper is not the one that this database's keys were made with: "
                "restore it, or no existing key is recognised."
            )

    # -- what authentication asks

    async def identity(self, public_id: str) -> Identity | None:
        query = (
            select(KeyRow, TenantRow)
            .join(TenantRow, TenantRow.id == KeyRow.tenant_id)
            .where(KeyRow.public_id == public_id)
        )
        async with self.reading() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                return None
            key, tenant = found
            limits = await limits_of(db, tenant.id)
            budgets = await budgets_of(db, tenant.id)
            ancestors = await _ancestors(db, tenant)
        return Identity(
            key_id=KeyId(key.id),
            public_id=key.public_id,
            secret_hmac=key.secret_hmac,
            tenant_id=TenantId(tenant.id),
            tenant_name=tenant.name,
            tenant_state=_state(tenant),
            model_allow=key.model_allow,
            expires_at=key.expires_at,
            revoked_at=key.revoked_at,
            grace_until=key.grace_until,
            limits=tuple(limits),
            budgets=tuple(budgets),
            ancestors=tuple(ancestors),
            target_allow=key.target_allow,
            scopes=key.scopes,
            ip_allow=key.ip_allow,
        )

    async def tenant_identity(self, ref: str) -> Identity | None:
        """A tenant by id or path, as a key of it without any bound would see it; for tokens."""
        async with self.reading() as db:
            try:
                tenant = await find_tenant(db, ref)
            except (NotFound, BadRequest):
                return None
            limits = await limits_of(db, tenant.id)
            budgets = await budgets_of(db, tenant.id)
            ancestors = await _ancestors(db, tenant)
        return Identity(
            key_id=KeyId(""),
            public_id="",
            secret_hmac=b"",
            tenant_id=TenantId(tenant.id),
            tenant_name=tenant.name,
            tenant_state=_state(tenant),
            model_allow=None,
            expires_at=None,
            revoked_at=None,
            grace_until=None,
            limits=tuple(limits),
            budgets=tuple(budgets),
            ancestors=tuple(ancestors),
        )

    async def version(self) -> int:
        """The number of the last committed write."""
        async with self.reading() as db:
            return _required(await db.scalar(select(IdentityStateRow.version)))

    async def changed_since(self, version: int) -> list[str] | None:
        """Public ids of keys touched by later writes, by those to their tenant or a tenant above it
        too; None: too many."""
        touched = _below(select(TenantRow.id).where(TenantRow.changed > version))
        query = (
            select(KeyRow.public_id)
            .where(or_(KeyRow.changed > version, KeyRow.tenant_id.in_(select(touched.c.id))))
            .limit(MAX_CHANGES + 1)
        )
        async with self.reading() as db:
            found = (await db.scalars(query)).all()
        return None if len(found) > MAX_CHANGES else list(found)

    # -- transactions

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        with translating_database_errors():
            async with self._session() as db:
                yield db

    def _session(self) -> AsyncSession:
        return AsyncSession(self._engine, expire_on_commit=False, info={WITHIN: self._view.within})

    @asynccontextmanager
    async def writing(self, actor: str) -> AsyncIterator[Write]:
        with translating_database_errors():
            async with self._session() as db, db.begin():
                # First, and in both databases a lock until commit: writes are one after the other.
                number = await db.scalar(
                    update(IdentityStateRow)
                    .where(IdentityStateRow.id == 1)
                    .values(version=IdentityStateRow.version + 1)
                    .returning(IdentityStateRow.version)
                )
                now_ns = self._clock.now_ns()
                yield Write(
                    db,
                    _required(number),
                    _instant(now_ns),
                    now_ns,
                    self._view.actor or actor,
                    self._view.request_id,
                )

    def _now(self) -> datetime:
        return _instant(self._clock.now_ns())


# ---------------------------------------------------------------------------------------- helpers


@contextmanager
def translating_database_errors() -> Iterator[None]:
    """Whatever the driver says becomes StoreUnavailable; a broken constraint stays IntegrityError
    for who knows what it means."""
    try:
        yield
    except IntegrityError:
        raise
    except SQLAlchemyError as error:
        if _tables_missing(error):
            raise StoreUnavailable(
                "The database has no tables yet: run `meterline migrate`."
            ) from error
        raise StoreUnavailable("The database cannot be reached; try again.") from error
    except (OSError, asyncpg.PostgresError) as error:
        # While connecting, drivers let these through as they are; TimeoutError is an OSError.
        raise StoreUnavailable("The database cannot be reached; try again.") from error


def _tables_missing(error: SQLAlchemyError) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    missing = getattr(error.orig, "sqlstate", None) == "42P01"  # PostgreSQL: undefined_table
    return missing or "no such table" in str(error.orig)


def _required(number: int | None) -> int:
    if number is None:
        raise StoreUnavailable("The database is incomplete: run `meterline migrate`.")
    return number


async def find_tenant(db: AsyncSession, ref: str) -> TenantRow:
    """By id; by path from the top; by name, if no other living tenant has it."""
    query = select(TenantRow)
    if _is_uuid(ref):
        query = query.where(TenantRow.id == ref.lower())
        row = (await db.scalars(query)).one_or_none()
    else:
        names = ref.split("/")
        if len(names) > MAX_DEPTH or not all(NAME.fullmatch(name) for name in names):
            raise NotFound("No such tenant.")
        row = await _by_path(db, names)
        if row is None and len(names) == 1:
            row = await _by_name(db, ref)
    if row is None or not await is_within(db, row.id):
        raise NotFound("No such tenant.")
    return row


async def is_within(db: AsyncSession, tenant_id: str) -> bool:
    """Whether the session's principal may know of this tenant."""
    within = db.info.get(WITHIN)
    return within is None or tenant_id in await subtree_ids(db, within)


def _seen(db: AsyncSession, column: Any) -> Any:
    """The condition that a column names a tenant which the session's principal may know of."""
    within = db.info.get(WITHIN)
    return true() if within is None else column.in_(select(_subtree([within]).c.id))


def _check_top(db: AsyncSession) -> None:
    if db.info.get(WITHIN) is not None:
        raise Forbidden(
            "Only who administers all tenants may put one at the top; name a parent of your part "
            "of the tree.",
            param="parent",
        )


async def _by_path(db: AsyncSession, names: Sequence[str]) -> TenantRow | None:
    row: TenantRow | None = None
    for name in names:
        row = await db.scalar(
            select(TenantRow).where(
                TenantRow.name == name,
                TenantRow.parent_id.is_(None) if row is None else TenantRow.parent_id == row.id,
                TenantRow.state != "deleted",
            )
        )
        if row is None:
            return None
    return row


async def _by_name(db: AsyncSession, name: str) -> TenantRow | None:
    query = select(TenantRow).where(TenantRow.name == name, TenantRow.state != "deleted")
    found = (await db.scalars(query.limit(2))).all()
    if len(found) > 1:
        raise BadRequest(
            f"Several tenants are named {name}: write the path from the top, such as acme/{name}, "
            "or the id.",
            param="tenant",
        )
    return found[0] if found else None


async def _find_parent(db: AsyncSession, ref: str) -> TenantRow:
    try:
        row = await find_tenant(db, ref)
    except NotFound:
        raise NotFound("No such tenant to be the parent.", param="parent") from None
    if row.state == "deleted":
        raise Conflict("The parent is deleted; choose a living tenant.", param="parent")
    return row


async def _move_below(db: AsyncSession, row: TenantRow, parent: str | None) -> None:
    """Refuses what would make a circle."""
    if parent is None:
        _check_top(db)
        row.parent_id = None
        return
    above = await _find_parent(db, parent)
    if above.id in await subtree_ids(db, row.id):
        what = "itself" if above.id == row.id else f"{above.name}, which is below it"
        raise BadRequest(
            f"{row.name} cannot be moved under {what}: that would be a circle. Move "
            f"{above.name} out of {row.name} first, or choose another parent.",
            param="parent",
        )
    row.parent_id = above.id
    await db.flush()
    await _check_depth(db, row)


async def _check_depth(db: AsyncSession, row: TenantRow) -> None:
    """The whole chain through this tenant, down to its deepest, is at most `MAX_DEPTH` long."""
    over = len(await _chain_of(db, row)) - 1
    level, ids = 0, [row.id]
    while ids and over + level <= MAX_DEPTH:
        level += 1
        ids = list(await db.scalars(select(TenantRow.id).where(TenantRow.parent_id.in_(ids))))
    if over + level > MAX_DEPTH:
        raise BadRequest(f"The tree is at most {MAX_DEPTH} tenants deep.", param="parent")


async def _chain_of(db: AsyncSession, row: TenantRow) -> list[TenantRow]:
    """The tenant and its ancestors, nearest first."""
    return (await _chains(db, [row]))[row.id]


async def _chains(db: AsyncSession, rows: Sequence[TenantRow]) -> dict[str, list[TenantRow]]:
    """Of each tenant: it and its ancestors, nearest first. One query a level."""
    known = {row.id: row for row in rows}
    missing = {row.parent_id for row in rows} - known.keys()
    while missing - {None}:
        found = (await db.scalars(select(TenantRow).where(TenantRow.id.in_(missing)))).all()
        known |= {row.id: row for row in found}
        missing = {row.parent_id for row in found} - known.keys()
    return {row.id: _chain(row.id, known) for row in rows}


def _chain(tenant_id: str, rows: Mapping[str, TenantRow]) -> list[TenantRow]:
    chain: list[TenantRow] = []
    following: str | None = tenant_id
    while following is not None and following in rows:
        chain.append(rows[following])
        following = rows[following].parent_id
    return chain


async def _ancestors(db: AsyncSession, tenant: TenantRow) -> list[Ancestor]:
    if tenant.parent_id is None:
        return []
    return [
        Ancestor(
            tenant_id=TenantId(row.id),
            tenant=row.name,
            state=_state(row),
            limits=tuple(await limits_of(db, row.id)),
            budgets=tuple(await budgets_of(db, row.id)),
        )
        for row in (await _chain_of(db, tenant))[1:]
    ]


def _below(tops: Select[str]) -> CTE:
    """The ids of these tenants and of all below them. UNION: each once, so it ends."""
    found = tops.cte("below", recursive=True)
    return found.union(select(TenantRow.id).join(found, TenantRow.parent_id == found.c.id))


def _subtree(tops: Iterable[str]) -> CTE:
    return _below(select(TenantRow.id).where(TenantRow.id.in_(list(tops))))


async def subtree_ids(db: AsyncSession, tenant_id: str) -> list[TenantId]:
    """A tenant's id and those of all below it, deleted ones too: whose usage counts for it."""
    found = await db.scalars(select(_subtree([tenant_id]).c.id))
    return [TenantId(one) for one in found]


async def find_key(db: AsyncSession, ref: str) -> KeyRow:
    query = select(KeyRow)
    if _is_uuid(ref):
        query = query.where(KeyRow.id == ref.lower())
    else:
        public_id = ref.removeprefix(PREFIX).partition("-")[0]
        if not (public_id.isascii() and public_id.isalnum()):
            raise NotFound("No such key.")
        query = query.where(KeyRow.public_id == public_id)
    row = (await db.scalars(query)).one_or_none()
    if row is None or not await is_within(db, row.tenant_id):
        raise NotFound("No such key.")
    return row


async def limits_of(db: AsyncSession, tenant_id: str | None) -> list[Limit]:
    """A tenant's limits, or all, by age."""
    query = select(LimitRow).where(_seen(db, LimitRow.tenant_id)).order_by(LimitRow.id)
    if tenant_id is not None:
        query = query.where(LimitRow.tenant_id == tenant_id)
    rows = (await db.scalars(query)).all()
    limits = [msgspec.convert(row, Limit, from_attributes=True) for row in rows]
    return [replace(limit, amount=Decimal(plain(limit.amount))) for limit in limits]


async def budgets_of(db: AsyncSession, tenant_id: str | None) -> list[Budget]:
    """A tenant's budgets, or all, by age."""
    query = select(BudgetRow).where(_seen(db, BudgetRow.tenant_id)).order_by(BudgetRow.id)
    if tenant_id is not None:
        query = query.where(BudgetRow.tenant_id == tenant_id)
    rows = (await db.scalars(query)).all()
    budgets = [msgspec.convert(row, Budget, from_attributes=True) for row in rows]
    return [replace(budget, amount_usd=Decimal(plain(budget.amount_usd))) for budget in budgets]


async def _shown(db: AsyncSession, row: TenantRow) -> Tenant:
    return (await _all_shown(db, [row]))[0]


async def _all_shown(db: AsyncSession, rows: Sequence[TenantRow]) -> list[Tenant]:
    chains = await _chains(db, rows)
    return [_tenant(chains[row.id]) for row in rows]


def _tenant(chain: Sequence[TenantRow]) -> Tenant:
    row = chain[0]
    states = {one.state for one in chain}
    state = next(worst for worst in ("deleted", "suspended", "active") if worst in states)
    return Tenant(
        id=TenantId(row.id),
        path=_place(chain).path,
        name=row.name,
        parent_id=None if row.parent_id is None else TenantId(row.parent_id),
        kind=row.kind,
        state=_state(row),
        effective_state=msgspec.convert(state, TenantState),
        cost_centre=row.cost_centre,
        currency=row.currency,
        labels=row.labels,
        created_at=row.created_at,
    )


def _place(chain: Sequence[TenantRow]) -> Place:
    return Place(
        names=tuple(row.name for row in reversed(chain)),
        ids=tuple(row.id for row in reversed(chain)),
        cost_centre=next((row.cost_centre for row in chain if row.cost_centre), None),
        currency=next((row.currency for row in chain if row.currency), None),
    )


def _state(row: TenantRow) -> TenantState:
    state: TenantState = msgspec.convert(row.state, TenantState)
    return state


async def _key_shown(db: AsyncSession, row: KeyRow, now: datetime) -> Key:
    return (await _keys_shown(db, [row], now))[0]


async def _keys_shown(db: AsyncSession, rows: Sequence[KeyRow], now: datetime) -> list[Key]:
    ids = {row.tenant_id for row in rows}
    owners = (await db.scalars(select(TenantRow).where(TenantRow.id.in_(ids)))).all()
    chains = await _chains(db, owners)
    return [_key(row, now, _place(chains[row.tenant_id]).path) for row in rows]


def _key(row: KeyRow, now: datetime, tenant: str) -> Key:
    return Key(
        id=KeyId(row.id),
        public_id=row.public_id,
        tenant_id=TenantId(row.tenant_id),
        tenant=tenant,
        name=row.name,
        state=_key_state(row, now),
        model_allow=row.model_allow,
        target_allow=row.target_allow,
        scopes=row.scopes,
        ip_allow=row.ip_allow,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        rotated_to=None if row.rotated_to is None else KeyId(row.rotated_to),
        grace_until=row.grace_until,
    )


def _key_state(row: KeyRow, now: datetime) -> KeyState:
    if row.revoked_at is not None:
        return "revoked"
    ends = [at for at in (row.expires_at, row.grace_until) if at is not None]
    if ends and min(ends) <= now:
        return "expired"
    return "active" if row.rotated_to is None else "rotated"


def check_alive(row: TenantRow) -> None:
    if row.state == "deleted":
        raise Conflict("This tenant is deleted; create a new one.")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or _is_uuid(name):
        raise BadRequest(
            "A tenant's name is 1 to 64 letters, digits, spaces and . @ + - _, starts with a "
            "letter or digit, and is not an id.",
            param="name",
        )


def _check_facts(
    kind: str | UnsetType | None,
    cost_centre: str | UnsetType | None,
    currency: str | UnsetType | None,
) -> None:
    if isinstance(kind, str) and not KIND.fullmatch(kind):
        raise BadRequest(
            "A kind is one word of a-z, 0-9 and -, such as organisation, team or project.",
            param="kind",
        )
    if isinstance(cost_centre, str) and not (
        0 < len(cost_centre) <= MAX_COST_CENTRE_CHARS and cost_centre.isprintable()
    ):
        raise BadRequest(
            f"A cost centre is 1 to {MAX_COST_CENTRE_CHARS} printable characters.",
            param="cost_centre",
        )
    if isinstance(currency, str) and not CURRENCY.fullmatch(currency):
        raise BadRequest(
            "A currency is its three letters (ISO 4217), such as EUR.", param="currency"
        )


@contextmanager
def _taken(name: str) -> Iterator[None]:
    """What a second tenant of a name at one place is told."""
    try:
        yield
    except IntegrityError:
        raise Conflict(
            f"A tenant named {name} exists already at that place.", param="name"
        ) from None


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise BadRequest(f"A tenant has at most {MAX_LABELS} labels.", param="labels")
    for key, value in labels.items():
        if not LABEL.fullmatch(key):
            raise BadRequest(
                "A label's key is 1 to 63 of a-z, 0-9 and . _ / - between letters or digits.",
                param="labels",
            )
        if len(value) > MAX_LABEL_CHARS or not value.isprintable():
            raise BadRequest(
                f"A label's value is up to {MAX_LABEL_CHARS} printable characters.",
                param=f"labels.{key}",
            )


def _listed(texts: Sequence[str] | None) -> list[str] | None:
    return None if texts is None else list(texts)


def _check_bounds(bounds: Bounds) -> None:
    """Raises BadRequest with the field's path and what to do."""
    _check_patterns(
        bounds.model_allow or (),
        "model_allow",
        "A model is a name, or the start of names followed by one `*`.",
    )
    _check_patterns(
        bounds.target_allow or (),
        "target_allow",
        "A target is BACKEND/MODEL, or the start of it followed by one `*`.",
    )
    for place, scope in enumerate(bounds.scopes or ()):
        if scope not in SCOPES:
            raise BadRequest(f"A scope is one of {', '.join(SCOPES)}.", param=f"scopes[{place}]")
    networks(bounds.ip_allow or (), "ip_allow")


def _check_patterns(patterns: Sequence[str], field: str, rule: str) -> None:
    if len(patterns) > MAX_MODEL_PATTERNS:
        raise BadRequest(
            f"A key lists at most {MAX_MODEL_PATTERNS} of them; use a pattern such as `name*`.",
            param=field,
        )
    for place, pattern in enumerate(patterns):
        if not MODEL_PATTERN.fullmatch(pattern) or not pattern.isprintable():
            raise BadRequest(rule, param=f"{field}[{place}]")


def _page_size(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        raise BadRequest(f"A page has 1 to {MAX_PAGE} items.", param="limit")
    return limit


def _cursor(after: str) -> str:
    if not _is_uuid(after):
        raise BadRequest("Continue after the id of the last item you have.", param="after")
    return after.lower()


def _is_uuid(text: str) -> bool:
    if len(text) != 36:
        return False
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _instant(now_ns: int) -> datetime:
    return datetime.fromtimestamp(now_ns // 1_000_000_000, UTC) + timedelta(
        microseconds=now_ns // 1_000 % 1_000_000
    )


async def tenant_names(tenants: Tenants) -> dict[str, str]:
    """id → path of every tenant, deleted ones too."""
    return {tenant_id: place.path for tenant_id, place in (await tenants.places()).items()}


async def tenant_places(tenants: Tenants) -> dict[str, TenantPlace]:
    """id → where it stands, for reports by level and cost centre."""
    return {
        tenant_id: TenantPlace(ids=place.ids, cost_centre=place.cost_centre)
        for tenant_id, place in (await tenants.places()).items()
    }


__all__ = [
    "AdminKeyRow",
    "Ancestor",
    "AuditRow",
    "BudgetRow",
    "Identity",
    "IdentityStateRow",
    "IssuedKey",
    "Key",
    "KeyChange",
    "KeyRow",
    "KeyState",
    "LimitRow",
    "Page",
    "Place",
    "Tenant",
    "TenantBase",
    "TenantChange",
    "TenantRow",
    "TenantState",
    "Tenants",
    "View",
    "Write",
    "is_within",
    "subtree_ids",
    "tenant_names",
    "tenant_places",
]
