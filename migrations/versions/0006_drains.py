"""Backends and servers that get no new requests. A released revision is never edited."""

import sqlalchemy as sa
from alembic import op

from telemetry.tables import UtcTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drain",
        sa.Column("backend", sa.String(63), primary_key=True),
        sa.Column("endpoint", sa.String(255), primary_key=True),
        sa.Column("since", UtcTime(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("drain")
