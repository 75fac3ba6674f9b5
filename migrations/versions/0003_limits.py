"""Limits and budgets of tenants. A released revision is never edited."""

import sqlalchemy as sa
from alembic import op

from telemetry.tables import ExactDecimal

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_limit",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(256), nullable=True),
        sa.Column("counts", sa.String(16), nullable=False),
        sa.Column("amount", ExactDecimal(38, 15), nullable=False),
        sa.Column("per_s", sa.Integer(), nullable=True),
        sa.Column("strict", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_usage_limit_tenant", "usage_limit", ["tenant_id"])
    op.create_table(
        "budget",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(36), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(256), nullable=True),
        sa.Column("amount_usd", ExactDecimal(38, 15), nullable=False),
        sa.Column("window", sa.String(16), nullable=False),
        sa.Column("hours", sa.Integer(), nullable=True),
        sa.Column("zone", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("strict", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_budget_tenant", "budget", ["tenant_id"])


def downgrade() -> None:
    op.drop_table("budget")
    op.drop_table("usage_limit")
