"""Administrators' keys with their roles; the request of an audit line. A released revision is never
edited."""

import sqlalchemy as sa
from alembic import op

revision = "0008c"
down_revision = "0008b"
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "admin_key",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("public_id", sa.String(32), nullable=False, unique=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenant.id"), nullable=True),
        sa.Column("secret_hmac", sa.LargeBinary(32), nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("expires_at", time, nullable=True),
        sa.Column("revoked_at", time, nullable=True),
    )
    op.add_column("audit_log", sa.Column("request_id", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("audit_log", "request_id")
    op.drop_table("admin_key")
