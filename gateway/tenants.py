"""Tenants, their API keys and the audit log: tables, queries, and nothing else that knows SQL.

Serves SQLite and PostgreSQL alike. Must not know HTTP, caches or how a credential arrives.
Invariants: every write is one transaction that starts by taking the next number of
`identity_state` (so writes are serial, and numbers appear in commit order), stamps the rows it
touched with that number, and appends to `audit_log`. Whoever remembers a number can ask what
changed since. No row is ever deleted: usage refers to them for years.
"""

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar
from uuid import UUID

import asyncpg
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Connection,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    event,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gateway.allowances import Budget, Limit
from gateway.errors import BadRequest, Conflict, NotFound, StoreUnavailable
from gateway.keys import MODEL_PATTERN, PREFIX, KeyRing
from telemetry.clock import Clock
from telemetry.database import open_engine
from telemetry.ids import KeyId, TenantId, new_key_id, new_tenant_id
from telemetry.money import plain
from telemetry.redaction import Secret
from telemetry.tables import Money, UtcTime

TenantState = Literal["active", "suspended", "deleted"]
KeyState = Literal["active", "rotated", "expired", "revoked"]

NAME: Final = re.compile(r"\w(?:[\w .@+-]{0,62}[\w.@+-])?")
LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,61}[a-z0-9])?")
MAX_LABELS: Final = 32
MAX_LABEL_CHARS: Final = 256
MAX_KEY_NAME_CHARS: Final = 100
MAX_MODEL_PATTERNS: Final = 100
MAX_GRACE: Final = timedelta(days=90)
MAX_LIFE: Final = timedelta(days=36_525)
MAX_PAGE: Final = 100
MAX_CHANGES: Final = 1_000

Big = BigInteger().with_variant(Integer, "sqlite")
Json = JSON(none_as_null=True)


# ------------------------------------------------------------------------------------------ tables


class TenantBase(DeclarativeBase):
    """Metadata of the gateway's own tables (the ledger's are apart)."""


class TenantRow(TenantBase):
    """Who pays. A deleted tenant keeps its row and frees its name."""

    __tablename__ = "tenant"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    labels: Mapped[dict[str, str]] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    changed: Mapped[int] = mapped_column(Big)

    __table_args__ = (
        Index(
            "uq_tenant_name",
            "name",
            unique=True,
            sqlite_where=text("state != 'deleted'"),
            postgresql_where=text("state != 'deleted'"),
        ),
        Index("ix_tenant_changed", "changed"),
    )


class KeyRow(TenantBase):
    """One API key. The secret is not in it, only its HMAC."""

    __tablename__ = "api_key"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    tenant_id: Mapped[str] = mapped_column(String(36), ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(String(MAX_KEY_NAME_CHARS))
    secret_hmac: Mapped[bytes] = mapped_column(LargeBinary(32))
    model_allow: Mapped[list[str] | None] = mapped_column(Json)  # null: all models
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcTime)
    rotated_to: Mapped[str | None] = mapped_column(String(36), ForeignKey("api_key.id"))
    grace_until: Mapped[datetime | None] = mapped_column(UtcTime)  # set with rotated_to
    changed: Mapped[int] = mapped_column(Big)

    __table_args__ = (
        Index("ix_api_key_tenant", "tenant_id", "id"),
        Index("ix_api_key_changed", "changed"),
    )


class LimitRow(TenantBase):
    """One limit. Unlike keys, a limit that is removed is gone: the audit log remembers it."""

    __tablename__ = "usage_limit"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(36), ForeignKey("tenant.id"))
    scope: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str | None] = mapped_column(String(256))  # null: each
    counts: Mapped[str] = mapped_column(String(16))
    amount: Mapped[Decimal] = mapped_column(Money)
    per_s: Mapped[int | None] = mapped_column(Integer)
    strict: Mapped[bool] = mapped_column(Boolean)

    __table_args__ = (Index("ix_usage_limit_tenant", "tenant_id"),)


class BudgetRow(TenantBase):
    """One budget; what is spent of it is not here but in the ledger."""

    __tablename__ = "budget"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(36), ForeignKey("tenant.id"))
    scope: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str | None] = mapped_column(String(256))  # null: each
    amount_usd: Mapped[Decimal] = mapped_column(Money)
    window: Mapped[str] = mapped_column(String(16))
    hours: Mapped[int | None] = mapped_column(Integer)
    zone: Mapped[str] = mapped_column(String(64))
    mode: Mapped[str] = mapped_column(String(16))
    strict: Mapped[bool] = mapped_column(Boolean)

    __table_args__ = (Index("ix_budget_tenant", "tenant_id"),)


class DrainRow(TenantBase):
    """A backend, or one of its servers (`endpoint`; "": all of it), that gets nothing new."""

    __tablename__ = "drain"

    backend: Mapped[str] = mapped_column(String(63), primary_key=True)
    endpoint: Mapped[str] = mapped_column(String(255), primary_key=True)
    since: Mapped[datetime] = mapped_column(UtcTime)


class AuditRow(TenantBase):
    """One administrative act. The database itself refuses to change or remove it."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcTime)
    actor: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    object: Mapped[str] = mapped_column(String(128))
    before: Mapped[Any | None] = mapped_column(Json)
    after: Mapped[Any | None] = mapped_column(Json)

    __table_args__ = (Index("ix_audit_log_object", "object", "id"),)


class IdentityStateRow(TenantBase):
    """The single row that numbers the writes, and knows which pepper the keys were made with."""

    __tablename__ = "identity_state"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(Big)
    pepper_check: Mapped[bytes | None] = mapped_column(LargeBinary(32))


_APPEND_ONLY: Final = {
    "sqlite": (
        "CREATE TRIGGER audit_log_no_update BEFORE UPDATE ON audit_log "
        "BEGIN SELECT RAISE(ABORT, 'audit_log is append-only'); END",
        "CREATE TRIGGER audit_log_no_delete BEFORE DELETE ON audit_log "
        "BEGIN SELECT RAISE(ABORT, 'audit_log is append-only'); END",
    ),
    "postgresql": (
        "CREATE FUNCTION audit_log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'audit_log is append-only'; END $$",
        "CREATE TRIGGER audit_log_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_log_is_append_only()",
    ),
}


@event.listens_for(AuditRow.__table__, "after_create")
def _make_the_audit_log_append_only(_table: object, connection: Connection, **_: object) -> None:
    for statement in _APPEND_ONLY[connection.dialect.name]:
        connection.execute(text(statement))


@event.listens_for(IdentityStateRow.__table__, "after_create")
def _start_counting(_table: object, connection: Connection, **_: object) -> None:
    connection.execute(text("INSERT INTO identity_state (id, version) VALUES (1, 0)"))


# ------------------------------------------------------------------------------- what callers see


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: Annotated[TenantId, Meta(description="Never changes and is never used again.")]
    name: Annotated[str, Meta(description="Unique among tenants that are not deleted.")]
    state: Annotated[
        TenantState, Meta(description="The keys of a tenant that is not active are refused.")
    ]
    labels: Annotated[dict[str, str], Meta(description="Free facts, such as a cost centre.")]
    created_at: datetime


class Key(Struct, frozen=True, kw_only=True):
    """An API key as it may be shown: all but the secret and its HMAC."""

    id: Annotated[KeyId, Meta(description="What the ledger and the audit log call it.")]
    public_id: Annotated[str, Meta(description="The readable part: `sk-ml-PUBLICID-…`.")]
    tenant_id: TenantId
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
    expires_at: datetime | UnsetType | None = UNSET


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

    __repr__ = object.__repr__


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some rows, oldest first, and whether more follow the last one."""

    items: list[Item]
    has_more: bool


# ---------------------------------------------------------------------------------------- queries


@dataclass(slots=True)
class Write:
    """One open write transaction. Whoever changes what a key may do stamps its row, or its
    tenant's, with `number`: then every replica hears of it."""

    db: AsyncSession
    number: int
    at: datetime
    now_ns: int
    actor: str

    def record(self, action: str, of: str, before: Struct | None, after: Struct | None) -> None:
        self.db.add(
            AuditRow(
                at=self.at,
                actor=self.actor[:128],
                action=action,
                object=of,
                before=None if before is None else msgspec.to_builtins(before),
                after=None if after is None else msgspec.to_builtins(after),
            )
        )


class Tenants:
    """Every query on tenants and keys. A tenant is referred to by id or name, a key by id, public
    id, or any text that starts like the key. Raises leaves of the gateway's error tree only."""

    def __init__(self, engine: AsyncEngine, ring: KeyRing, clock: Clock) -> None:
        self._engine = engine
        self._ring = ring
        self._clock = clock

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
        self, name: str, labels: Mapping[str, str] | None = None, *, actor: str
    ) -> Tenant:
        _check_name(name)
        _check_labels(labels or {})
        try:
            async with self.writing(actor) as write:
                row = TenantRow(
                    id=new_tenant_id(write.now_ns),
                    name=name,
                    state="active",
                    labels=dict(labels or {}),
                    created_at=write.at,
                    changed=write.number,
                )
                write.db.add(row)
                await write.db.flush()
                tenant = _tenant(row)
                write.record("tenant.create", f"tenant/{row.id}", None, tenant)
        except IntegrityError:
            raise Conflict(f"A tenant named {name} exists already.", param="name") from None
        return tenant

    async def tenants(self, *, after: str | None = None, limit: int = 20) -> Page[Tenant]:
        """All tenants, deleted ones too, by age."""
        query = select(TenantRow).order_by(TenantRow.id).limit(_page_size(limit) + 1)
        if after is not None:
            query = query.where(TenantRow.id > _cursor(after))
        async with self.reading() as db:
            rows = (await db.scalars(query)).all()
        return Page([_tenant(row) for row in rows[:limit]], len(rows) > limit)

    async def tenant(self, ref: str) -> Tenant:
        async with self.reading() as db:
            return _tenant(await find_tenant(db, ref))

    async def suspend_tenant(self, ref: str, *, actor: str) -> Tenant:
        """From now on its keys are refused. Suspending twice is one act."""
        return await self._set_state(ref, "suspended", "tenant.suspend", actor)

    async def resume_tenant(self, ref: str, *, actor: str) -> Tenant:
        return await self._set_state(ref, "active", "tenant.resume", actor)

    async def delete_tenant(self, ref: str, *, actor: str) -> Tenant:
        """For good: its keys are revoked and its name is free again; its usage stays."""
        async with self.writing(actor) as write:
            row = await find_tenant(write.db, ref)
            if row.state == "deleted":
                return _tenant(row)
            keys = await write.db.scalars(
                select(KeyRow).where(KeyRow.tenant_id == row.id, KeyRow.revoked_at.is_(None))
            )
            for key in keys:
                self._revoke(write, key)
            return self._move(write, row, "deleted", "tenant.delete")

    async def _set_state(self, ref: str, state: TenantState, action: str, actor: str) -> Tenant:
        async with self.writing(actor) as write:
            row = await find_tenant(write.db, ref)
            if row.state == state:
                return _tenant(row)
            check_alive(row)
            return self._move(write, row, state, action)

    def _move(self, write: Write, row: TenantRow, state: TenantState, action: str) -> Tenant:
        before = _tenant(row)
        row.state = state
        row.changed = write.number
        write.record(action, f"tenant/{row.id}", before, _tenant(row))
        return _tenant(row)

    # -- keys

    async def create_key(
        self,
        tenant: str,
        *,
        name: str = "",
        model_allow: Sequence[str] | None = None,
        expires_at: datetime | None = None,
        actor: str,
    ) -> IssuedKey:
        """`model_allow`: names and `prefix*` patterns; None allows all, an empty list none."""
        self._check_key(name, model_allow, expires_at)
        async with self.writing(actor) as write:
            owner = await find_tenant(write.db, tenant)
            check_alive(owner)
            row, secret = await self._mint(
                write,
                tenant_id=owner.id,
                name=name,
                model_allow=None if model_allow is None else list(model_allow),
                expires_at=expires_at,
            )
            write.record("key.create", f"key/{row.id}", None, _key(row, write.at))
            return IssuedKey(key=_key(row, write.at), secret=secret)

    async def keys(
        self, tenant: str | None = None, *, after: str | None = None, limit: int = 20
    ) -> Page[Key]:
        """One tenant's keys, or all; revoked ones too, by age."""
        query = select(KeyRow).order_by(KeyRow.id).limit(_page_size(limit) + 1)
        if after is not None:
            query = query.where(KeyRow.id > _cursor(after))
        async with self.reading() as db:
            if tenant is not None:
                query = query.where(KeyRow.tenant_id == (await find_tenant(db, tenant)).id)
            rows = (await db.scalars(query)).all()
        now = self._now()
        return Page([_key(row, now) for row in rows[:limit]], len(rows) > limit)

    async def key(self, ref: str) -> Key:
        async with self.reading() as db:
            return _key(await find_key(db, ref), self._now())

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
            before = _key(old, write.at)
            new, secret = await self._mint(
                write,
                tenant_id=old.tenant_id,
                name=old.name,
                model_allow=old.model_allow,
                expires_at=old.expires_at and write.at + (old.expires_at - old.created_at),
            )
            old.rotated_to = new.id
            old.grace_until = write.at + grace
            old.changed = write.number
            write.record("key.create", f"key/{new.id}", None, _key(new, write.at))
            write.record("key.rotate", f"key/{old.id}", before, _key(old, write.at))
            return IssuedKey(key=_key(new, write.at), secret=secret)

    async def revoke_key(self, ref: str, *, actor: str) -> Key:
        """At once and for good; a second time changes nothing."""
        async with self.writing(actor) as write:
            row = await find_key(write.db, ref)
            if row.revoked_at is None:
                self._revoke(write, row)
            return _key(row, write.at)

    async def change_key(self, ref: str, change: KeyChange, *, actor: str) -> Key:
        self._check_key(
            "" if change.name is UNSET else change.name,
            None if change.model_allow is UNSET else change.model_allow,
            None if change.expires_at is UNSET else change.expires_at,
        )
        async with self.writing(actor) as write:
            row = await find_key(write.db, ref)
            if row.revoked_at is not None:
                raise Conflict("This key is revoked; create a new one.")
            before = _key(row, write.at)
            for column in change.__struct_fields__:
                value = getattr(change, column)
                if value is not UNSET:
                    setattr(row, column, value)
            row.changed = write.number
            after = _key(row, write.at)
            write.record("key.change", f"key/{row.id}", before, after)
            return after

    async def _mint(
        self,
        write: Write,
        *,
        tenant_id: str,
        name: str,
        model_allow: list[str] | None,
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
            model_allow=model_allow,
            created_at=write.at,
            expires_at=expires_at,
            changed=write.number,
        )
        write.db.add(row)
        await write.db.flush()
        return row, minted.secret

    def _revoke(self, write: Write, row: KeyRow) -> None:
        before = _key(row, write.at)
        row.revoked_at = write.at
        row.changed = write.number
        write.record("key.revoke", f"key/{row.id}", before, _key(row, write.at))

    async def _check_usable(self, write: Write, row: KeyRow) -> None:
        check_alive(await find_tenant(write.db, row.tenant_id))
        state = _key(row, write.at).state
        if state in ("revoked", "expired"):
            raise Conflict(f"This key is {state}; create a new one.")
        if row.rotated_to is not None:
            raise Conflict(f"This key was rotated already, to {row.rotated_to}; rotate that one.")

    def _check_key(
        self, name: str, model_allow: Sequence[str] | None, expires_at: datetime | None
    ) -> None:
        if len(name) > MAX_KEY_NAME_CHARS or not name.isprintable():
            raise BadRequest(
                f"A key's name is up to {MAX_KEY_NAME_CHARS} printable characters.", param="name"
            )
        _check_models(model_allow or ())
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
        if state.pepper_check is None:
            state.pepper_check = self._ring.fingerprint()
        self._same_pepper(state.pepper_check)

    def _same_pepper(self, known: bytes) -> None:
        if known != self._ring.fingerprint():
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
        return Identity(
            key_id=KeyId(key.id),
            public_id=key.public_id,
            secret_hmac=key.secret_hmac,
            tenant_id=TenantId(tenant.id),
            tenant_name=tenant.name,
            tenant_state=_tenant(tenant).state,
            model_allow=key.model_allow,
            expires_at=key.expires_at,
            revoked_at=key.revoked_at,
            grace_until=key.grace_until,
            limits=tuple(limits),
            budgets=tuple(budgets),
        )

    async def version(self) -> int:
        """The number of the last committed write."""
        async with self.reading() as db:
            return _required(await db.scalar(select(IdentityStateRow.version)))

    async def changed_since(self, version: int) -> list[str] | None:
        """Public ids of keys touched by later writes, by their tenant's too; None: too many."""
        query = (
            select(KeyRow.public_id)
            .join(TenantRow, TenantRow.id == KeyRow.tenant_id)
            .where(or_(KeyRow.changed > version, TenantRow.changed > version))
            .limit(MAX_CHANGES + 1)
        )
        async with self.reading() as db:
            found = (await db.scalars(query)).all()
        return None if len(found) > MAX_CHANGES else list(found)

    # -- transactions

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        with translating_database_errors():
            async with AsyncSession(self._engine, expire_on_commit=False) as db:
                yield db

    @asynccontextmanager
    async def writing(self, actor: str) -> AsyncIterator[Write]:
        with translating_database_errors():
            async with AsyncSession(self._engine, expire_on_commit=False) as db, db.begin():
                # First, and in both databases a lock until commit: writes are one after the other.
                number = await db.scalar(
                    update(IdentityStateRow)
                    .where(IdentityStateRow.id == 1)
                    .values(version=IdentityStateRow.version + 1)
                    .returning(IdentityStateRow.version)
                )
                now_ns = self._clock.now_ns()
                yield Write(db, _required(number), _instant(now_ns), now_ns, actor)

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
    query = select(TenantRow)
    if _is_uuid(ref):
        query = query.where(TenantRow.id == ref.lower())
    elif NAME.fullmatch(ref):
        query = query.where(TenantRow.name == ref, TenantRow.state != "deleted")
    else:
        raise NotFound("No such tenant.")
    row = (await db.scalars(query)).one_or_none()
    if row is None:
        raise NotFound("No such tenant.")
    return row


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
    if row is None:
        raise NotFound("No such key.")
    return row


async def limits_of(db: AsyncSession, tenant_id: str | None) -> list[Limit]:
    """A tenant's limits, or all, by age."""
    query = select(LimitRow).order_by(LimitRow.id)
    if tenant_id is not None:
        query = query.where(LimitRow.tenant_id == tenant_id)
    rows = (await db.scalars(query)).all()
    limits = [msgspec.convert(row, Limit, from_attributes=True) for row in rows]
    return [replace(limit, amount=Decimal(plain(limit.amount))) for limit in limits]


async def budgets_of(db: AsyncSession, tenant_id: str | None) -> list[Budget]:
    """A tenant's budgets, or all, by age."""
    query = select(BudgetRow).order_by(BudgetRow.id)
    if tenant_id is not None:
        query = query.where(BudgetRow.tenant_id == tenant_id)
    rows = (await db.scalars(query)).all()
    budgets = [msgspec.convert(row, Budget, from_attributes=True) for row in rows]
    return [replace(budget, amount_usd=Decimal(plain(budget.amount_usd))) for budget in budgets]


def _tenant(row: TenantRow) -> Tenant:
    return msgspec.convert(row, Tenant, from_attributes=True)


def _key(row: KeyRow, now: datetime) -> Key:
    return Key(
        id=KeyId(row.id),
        public_id=row.public_id,
        tenant_id=TenantId(row.tenant_id),
        name=row.name,
        state=_key_state(row, now),
        model_allow=row.model_allow,
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


def _check_models(patterns: Sequence[str]) -> None:
    if len(patterns) > MAX_MODEL_PATTERNS:
        raise BadRequest(
            f"A key lists at most {MAX_MODEL_PATTERNS} models; use a pattern such as `name*`.",
            param="model_allow",
        )
    for place, pattern in enumerate(patterns):
        if not MODEL_PATTERN.fullmatch(pattern) or not pattern.isprintable():
            raise BadRequest(
                "A model is a name, or the start of names followed by one `*`.",
                param=f"model_allow[{place}]",
            )


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


__all__ = [
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
    "Tenant",
    "TenantBase",
    "TenantRow",
    "TenantState",
    "Tenants",
    "Write",
]


async def tenant_names(tenants: Tenants) -> dict[str, str]:
    """id → name of every tenant, deleted ones too."""
    names: dict[str, str] = {}
    after: str | None = None
    while True:
        page = await tenants.tenants(after=after, limit=MAX_PAGE)
        names |= {tenant.id: tenant.name for tenant in page.items}
        if not page.has_more:
            return names
        after = page.items[-1].id
