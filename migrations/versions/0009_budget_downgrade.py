"""The cheaper route of a budget of mode downgrade. A released revision is never edited."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008c"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("budget", sa.Column("downgrade_to", sa.String(256), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("budget") as table:
        table.drop_column("downgrade_to")
