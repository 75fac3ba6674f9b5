"""What keys are narrowed to: targets, scopes, addresses. A released revision is never edited."""

import sqlalchemy as sa
from alembic import op

revision = "0008b"
down_revision = "0008"
branch_labels = None
depends_on = None

COLUMNS = ("target_allow", "scopes", "ip_allow")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("api_key", sa.Column(name, sa.JSON(), nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("api_key", name)
