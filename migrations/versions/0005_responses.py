"""Responses that clients go on from."""

import sqlalchemy as sa
from alembic import op

from telemetry.tables import UtcTime

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "stored_response",
        sa.Column("tenant_id", sa.String(length=36), nullable=False),
        sa.Column("response_id", sa.String(length=128), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("expires_at", UtcTime(), nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("items", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "response_id"),
    )
    op.create_index("ix_stored_response_expires", "stored_response", ["expires_at"])
    op.create_index("ix_stored_response_age", "stored_response", ["tenant_id", "created_at"])


def downgrade() -> None:
    op.drop_table("stored_response")
