"""Tenants, API keys, the audit log and the counter of changes.

The gateway's first tables, as `gateway.tenants` maps them. A released revision is never edited.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    big = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    time = sa.DateTime(timezone=True)
    op.create_table(
        "tenant",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("changed", big, nullable=False),
    )
    alive = sa.text("state != 'deleted'")
    op.create_index(
        "uq_tenant_name", "tenant", ["name"], unique=True,
        sqlite_where=alive, postgresql_where=alive,
    )  # fmt: skip
    op.create_index("ix_tenant_changed", "tenant", ["changed"])
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("public_id", sa.String(32), nullable=False, unique=True),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(32), nullable=False),
        sa.Column("model_allow", sa.JSON(), nullable=True),
        sa.Column("created_at", time, nullable=False),
        sa.Column("expires_at", time, nullable=True),
        sa.Column("revoked_at", time, nullable=True),
        sa.Column("rotated_to", sa.String(36), sa.ForeignKey("api_key.id"), nullable=True),
        sa.Column("grace_until", time, nullable=True),
        sa.Column("changed", big, nullable=False),
    )
    op.create_index("ix_api_key_tenant", "api_key", ["tenant_id", "id"])
    op.create_index("ix_api_key_changed", "api_key", ["changed"])
    op.create_table(
        "audit_log",
        sa.Column("id", big, primary_key=True, autoincrement=True),
        sa.Column("at", time, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object", sa.String(128), nullable=False),
        sa.Column("before", sa.JSON(), nullable=True),
        sa.Column("after", sa.JSON(), nullable=True),
    )
    op.create_index("ix_audit_log_object", "audit_log", ["object", "id"])
    op.create_table(
        "identity_state",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("version", big, nullable=False),
        sa.Column("pepper_check", sa.LargeBinary(32), nullable=True),
    )
    op.execute("INSERT INTO identity_state (id, version) VALUES (1, 0)")
    _make_the_audit_log_append_only()


def _make_the_audit_log_append_only() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_log_no_{act.lower()} BEFORE {act} ON audit_log "
                "BEGIN SELECT RAISE(ABORT, 'audit_log is append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'audit_log is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_log_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_log_is_append_only()"
    )


def downgrade() -> None:
    op.drop_table("identity_state")
    op.drop_table("audit_log")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_log_is_append_only()")
    op.drop_table("api_key")
    op.drop_table("tenant")
