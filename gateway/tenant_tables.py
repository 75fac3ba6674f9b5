"""The gateway's own tables: tenants, keys, limits, budgets, drains, administrators, the audit log.

Rows only; queries are in `tenants.py` and the modules beside it. Invariants: the audit log is
append-only by triggers on both databases; `identity_state` has one row, which numbers the writes.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any, Final

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
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from telemetry.tables import Money, UtcTime

MAX_COST_CENTRE_CHARS: Final = 64
MAX_KEY_NAME_CHARS: Final = 100

Big = BigInteger().with_variant(Integer, "sqlite")
Json = JSON(none_as_null=True)


class TenantBase(DeclarativeBase):
    """Metadata of the gateway's own tables (the ledger's are apart)."""


class TenantRow(TenantBase):
    """Who pays. A deleted tenant keeps its row and frees its name."""

    __tablename__ = "tenant"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    parent_id: Mapped[str | None] = mapped_column(String(36))  # null: at the top
    name: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str | None] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16))
    cost_centre: Mapped[str | None] = mapped_column(String(MAX_COST_CENTRE_CHARS))
    currency: Mapped[str | None] = mapped_column(String(3))
    labels: Mapped[dict[str, str]] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    changed: Mapped[int] = mapped_column(Big)

    __table_args__ = (
        Index(
            "uq_tenant_name",
            "name",
            unique=True,
            sqlite_where=text("state != 'deleted' AND parent_id IS NULL"),
            postgresql_where=text("state != 'deleted' AND parent_id IS NULL"),
        ),
        Index(
            "uq_tenant_name_below",
            "parent_id",
            "name",
            unique=True,
            sqlite_where=text("state != 'deleted'"),
            postgresql_where=text("state != 'deleted'"),
        ),
        Index("ix_tenant_changed", "changed"),
        Index("ix_tenant_parent", "parent_id"),
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
    target_allow: Mapped[list[str] | None] = mapped_column(Json)  # null: all targets
    scopes: Mapped[list[str] | None] = mapped_column(Json)  # null: all scopes
    ip_allow: Mapped[list[str] | None] = mapped_column(Json)  # null: from anywhere
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
    downgrade_to: Mapped[str | None] = mapped_column(String(256))

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
    request_id: Mapped[str | None] = mapped_column(String(64))

    __table_args__ = (Index("ix_audit_log_object", "object", "id"),)


class AdminKeyRow(TenantBase):
    """An administrator's key: a role, for all tenants or for one and what is below it."""

    __tablename__ = "admin_key"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(MAX_KEY_NAME_CHARS))
    role: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[str | None] = mapped_column(String(36), ForeignKey("tenant.id"))
    secret_hmac: Mapped[bytes] = mapped_column(LargeBinary(32))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcTime)


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
