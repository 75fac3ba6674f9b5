"""Service tiers and drafts of prices, corrections, sums by meter, engine leases, bills, closed
months."""

import sqlalchemy as sa
from alembic import op

from telemetry.tables import ExactDecimal, UtcTime

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PRICE = ExactDecimal(24, 9)
MONEY = ExactDecimal(38, 15)
EPOCH = "'1970-01-01 00:00:00'"
BOOKED = {"usage_event": "ix_usage_event_booked", "charge_line": "ix_charge_line_booked"}
PHASES = ("load_us", "warmup_us", "step_us", "idle_us")


def upgrade() -> None:
    op.add_column(
        "price_book",
        sa.Column("status", sa.String(length=16), nullable=False, server_default="published"),
    )
    op.add_column(
        "price",
        sa.Column("service_tier", sa.String(length=32), nullable=False, server_default=""),
    )
    op.add_column("price", sa.Column("list_unit_price", PRICE, nullable=True))
    _book("usage_event", "occurred_at")
    _book("charge_line", "hour")
    with op.batch_alter_table("charge_line") as table:
        table.add_column(sa.Column("cause", sa.String(length=16), nullable=True))
        table.add_column(sa.Column("reverses_id", sa.String(length=36), nullable=True))
        table.drop_constraint("uq_charge_line_event_meter", type_="unique")
    op.create_index("ix_charge_line_event", "charge_line", ["event_id"])
    op.create_table(
        "rollup_meter",
        sa.Column("hour", UtcTime(), nullable=False),
        sa.Column("charge_hour", UtcTime(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("asked_model", sa.String(length=256), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("service_tier", sa.String(length=32), nullable=False),
        sa.Column("meter", sa.String(length=64), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("waste", sa.String(length=24), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("unit", BIG, nullable=False),
        sa.Column("unit_price", PRICE, nullable=True),
        sa.Column("quantity", BIG, nullable=False),
        sa.Column("amount", MONEY, nullable=False),
        sa.Column("lines", BIG, nullable=False),
        sa.Column("unpriced_lines", BIG, nullable=False),
        sa.PrimaryKeyConstraint(
            "hour",
            "charge_hour",
            "tenant_id",
            "key_id",
            "asked_model",
            "backend",
            "provider",
            "model",
            "service_tier",
            "meter",
            "price_id",
            "waste",
            "currency",
        ),
    )
    op.create_table(
        "engine_lease",
        sa.Column("lease_id", sa.String(length=36), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("started_at", UtcTime(), nullable=False),
        sa.Column("seen_at", UtcTime(), nullable=False),
        sa.Column("rate_per_hour", PRICE, nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        *(sa.Column(phase, BIG, nullable=False) for phase in PHASES),
        sa.PrimaryKeyConstraint("lease_id"),
    )
    op.create_index("ix_engine_lease_backend_seen", "engine_lease", ["backend", "seen_at"])
    op.create_table(
        "engine_hour",
        sa.Column("lease_id", sa.String(length=36), nullable=False),
        sa.Column("hour", UtcTime(), nullable=False),
        *(sa.Column(phase, BIG, nullable=False) for phase in PHASES),
        sa.ForeignKeyConstraint(["lease_id"], ["engine_lease.lease_id"]),
        sa.PrimaryKeyConstraint("lease_id", "hour"),
    )
    op.create_index("ix_engine_hour_hour", "engine_hour", ["hour"])
    op.create_table(
        "bill",
        sa.Column("bill_id", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("imported_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("bill_id"),
    )
    op.create_table(
        "bill_line",
        sa.Column("bill_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("day", UtcTime(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("meter", sa.String(length=64), nullable=False),
        sa.Column("quantity", BIG, nullable=True),
        sa.Column("amount", MONEY, nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("raw", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["bill_id"], ["bill.bill_id"]),
        sa.PrimaryKeyConstraint("bill_id", "number"),
    )
    op.create_index("ix_bill_line_day", "bill_line", ["day"])
    op.create_table(
        "posting",
        sa.Column("posting_id", sa.String(length=36), nullable=False),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("account", sa.String(length=96), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("day", UtcTime(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("meter", sa.String(length=64), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount", MONEY, nullable=False),
        sa.Column("cause", sa.String(length=96), nullable=False),
        sa.Column("posted_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("posting_id"),
    )
    op.create_index("ix_posting_day", "posting", ["day"])
    op.create_table(
        "billing_period",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("closed_at", UtcTime(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("month"),
    )
    # Every hour is summed again, so that the sums by meter exist for what was there before.
    op.execute(
        "INSERT INTO dirty_hour (hour, marked_at) SELECT DISTINCT booked_hour, booked_hour "
        "FROM usage_event WHERE booked_hour NOT IN (SELECT hour FROM dirty_hour)"
    )


def _book(table: str, moment: str) -> None:
    """Add `booked_hour` and give every row the hour that it happened in."""
    # With a default, since SQLite adds no other NOT NULL column without copying the table.
    op.add_column(
        table, sa.Column("booked_hour", UtcTime(), nullable=False, server_default=sa.text(EPOCH))
    )
    if op.get_bind().dialect.name == "sqlite":
        hour = f"strftime('%Y-%m-%d %H:00:00.000000', {moment})"
    else:
        hour = f"date_trunc('hour', {moment}, 'UTC')"
        op.alter_column(table, "booked_hour", server_default=None)
    op.execute(f"UPDATE {table} SET booked_hour = {hour}")  # noqa: S608  # our own names
    op.create_index(BOOKED[table], table, ["booked_hour"])


def downgrade() -> None:
    for table in ("billing_period", "posting", "bill_line", "bill", "engine_hour", "engine_lease"):
        op.drop_table(table)
    op.drop_table("rollup_meter")
    op.execute("DELETE FROM charge_line WHERE cause IS NOT NULL")
    op.drop_index("ix_charge_line_event", "charge_line")
    op.drop_index("ix_charge_line_booked", "charge_line")
    op.drop_index("ix_usage_event_booked", "usage_event")
    with op.batch_alter_table("charge_line") as table:
        table.drop_column("booked_hour")
        table.drop_column("cause")
        table.drop_column("reverses_id")
        table.create_unique_constraint("uq_charge_line_event_meter", ["event_id", "meter"])
    with op.batch_alter_table("usage_event") as table:
        table.drop_column("booked_hour")
    op.drop_column("price", "service_tier")
    op.drop_column("price", "list_unit_price")
    op.drop_column("price_book", "status")
