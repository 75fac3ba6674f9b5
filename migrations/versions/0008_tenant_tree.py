"""Tenants as a tree: the parent, what it is, where it is booked. A released revision is never
edited."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = {"parent_id": 36, "kind": 32, "cost_centre": 64, "currency": 3}


def upgrade() -> None:
    for name, length in COLUMNS.items():
        op.add_column("tenant", sa.Column(name, sa.String(length), nullable=True))
    op.create_index("ix_tenant_parent", "tenant", ["parent_id"])
    op.drop_index("uq_tenant_name", "tenant")
    _unique("uq_tenant_name", ["name"], "state != 'deleted' AND parent_id IS NULL")
    _unique("uq_tenant_name_below", ["parent_id", "name"], "state != 'deleted'")


def _unique(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, "tenant", columns, unique=True,
        sqlite_where=sa.text(where), postgresql_where=sa.text(where),
    )  # fmt: skip


def downgrade() -> None:
    """Fails where two living tenants have one name: rename one first."""
    for index in ("uq_tenant_name_below", "uq_tenant_name", "ix_tenant_parent"):
        op.drop_index(index, "tenant")
    for name in COLUMNS:
        op.drop_column("tenant", name)
    _unique("uq_tenant_name", ["name"], "state != 'deleted'")
