"""The ledger's tables: requests, usage, charges, roll-ups, cursors and price books."""

import sqlalchemy as sa
from alembic import op

from telemetry.tables import ExactDecimal, UtcTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "dirty_hour",
        sa.Column("hour", UtcTime(), nullable=False),
        sa.Column("marked_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("hour"),
    )
    op.create_table(
        "gateway_request",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("node", sa.String(length=80), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("surface", sa.String(length=20), nullable=False),
        sa.Column("asked_model", sa.String(length=256), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("opened_at", UtcTime(), nullable=False),
        sa.Column("ended_at", UtcTime(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("trace_id", sa.String(length=32), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("payload_hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("ix_gateway_request_opened", "gateway_request", ["opened_at"], unique=False)
    op.create_index(
        "ix_gateway_request_tenant_opened",
        "gateway_request",
        ["tenant_id", "opened_at"],
        unique=False,
    )
    op.create_table(
        "open_intent",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("node", sa.String(length=80), nullable=False),
        sa.Column("boot", sa.String(length=32), nullable=False),
        sa.Column("deadline_at", UtcTime(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("ix_open_intent_node", "open_intent", ["node"], unique=False)
    op.create_table(
        "price_book",
        sa.Column("book_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("published_at", UtcTime(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("book_id"),
        sa.UniqueConstraint("name", "version", name="uq_price_book_name_version"),
    )
    op.create_table(
        "rollup_hour",
        sa.Column("hour", UtcTime(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("asked_model", sa.String(length=256), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("usage_source", sa.String(length=16), nullable=False),
        sa.Column("requests", BIG, nullable=False),
        sa.Column("attempts", BIG, nullable=False),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.Column("device_us", BIG, nullable=False),
        sa.Column("amount", ExactDecimal(38, 15), nullable=False),
        sa.Column("unpriced_lines", BIG, nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour",
            "tenant_id",
            "key_id",
            "asked_model",
            "backend",
            "provider",
            "model",
            "usage_source",
            "currency",
        ),
    )
    op.create_table(
        "spool_cursor",
        sa.Column("node", sa.String(length=80), nullable=False),
        sa.Column("segment", BIG, nullable=False),
        sa.Column("byte_offset", BIG, nullable=False),
        sa.Column("records", BIG, nullable=False),
        sa.Column("admitted", BIG, nullable=False),
        sa.Column("settled", BIG, nullable=False),
        sa.Column("refused", BIG, nullable=False),
        sa.Column("swept", BIG, nullable=False),
        sa.Column("updated_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("node"),
    )
    op.create_table(
        "usage_conflict",
        sa.Column("conflict_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("seen_at", UtcTime(), nullable=False),
        sa.Column("payload_hash", sa.String(length=64), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("conflict_id"),
    )
    op.create_table(
        "price",
        sa.Column("price_id", sa.String(length=36), nullable=False),
        sa.Column("book_id", sa.String(length=36), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("match", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("meter", sa.String(length=64), nullable=False),
        sa.Column("min_input_tokens", BIG, nullable=False),
        sa.Column("unit", BIG, nullable=False),
        sa.Column("unit_price", ExactDecimal(24, 9), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("effective_from", UtcTime(), nullable=True),
        sa.Column("effective_to", UtcTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["book_id"],
            ["price_book.book_id"],
        ),
        sa.PrimaryKeyConstraint("price_id"),
    )
    op.create_index("ix_price_book", "price", ["book_id"], unique=False)
    op.create_table(
        "usage_event",
        sa.Column("event_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("asked_model", sa.String(length=256), nullable=True),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("service_tier", sa.String(length=32), nullable=True),
        sa.Column("occurred_at", UtcTime(), nullable=False),
        sa.Column("ended_at", UtcTime(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("is_final", sa.Boolean(), nullable=False),
        sa.Column("in_uncached_text", BIG, nullable=False),
        sa.Column("in_cached_read", BIG, nullable=False),
        sa.Column("in_cache_write_5m", BIG, nullable=False),
        sa.Column("in_cache_write_1h", BIG, nullable=False),
        sa.Column("in_audio", BIG, nullable=False),
        sa.Column("in_image", BIG, nullable=False),
        sa.Column("in_video", BIG, nullable=False),
        sa.Column("in_document", BIG, nullable=False),
        sa.Column("out_text", BIG, nullable=False),
        sa.Column("out_reasoning", BIG, nullable=False),
        sa.Column("out_audio", BIG, nullable=False),
        sa.Column("out_image", BIG, nullable=False),
        sa.Column("engine_us_queue", BIG, nullable=True),
        sa.Column("engine_us_prefill", BIG, nullable=True),
        sa.Column("engine_us_decode", BIG, nullable=True),
        sa.Column("engine_us_sampling", BIG, nullable=True),
        sa.Column("engine_us_recompute", BIG, nullable=True),
        sa.Column("engine_us_spec_rejected", BIG, nullable=True),
        sa.Column("usage_source", sa.String(length=16), nullable=False),
        sa.Column("usage_quality", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["gateway_request.request_id"],
        ),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_usage_event_occurred", "usage_event", ["occurred_at"], unique=False)
    op.create_index("ix_usage_event_request", "usage_event", ["request_id"], unique=False)
    op.create_index(
        "ix_usage_event_tenant_occurred", "usage_event", ["tenant_id", "occurred_at"], unique=False
    )
    op.create_table(
        "charge_line",
        sa.Column("line_id", sa.String(length=36), nullable=False),
        sa.Column("event_id", sa.String(length=36), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("hour", UtcTime(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("asked_model", sa.String(length=256), nullable=True),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("meter", sa.String(length=64), nullable=False),
        sa.Column("quantity", BIG, nullable=False),
        sa.Column("unit", BIG, nullable=False),
        sa.Column("unit_price", ExactDecimal(24, 9), nullable=True),
        sa.Column("amount", ExactDecimal(38, 15), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=True),
        sa.Column("book", sa.String(length=80), nullable=True),
        sa.ForeignKeyConstraint(
            ["event_id"],
            ["usage_event.event_id"],
        ),
        sa.PrimaryKeyConstraint("line_id"),
        sa.UniqueConstraint("event_id", "meter", name="uq_charge_line_event_meter"),
    )
    op.create_index("ix_charge_line_hour", "charge_line", ["hour"], unique=False)
    op.create_index("ix_charge_line_request", "charge_line", ["request_id"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_charge_line_request", table_name="charge_line")
    op.drop_index("ix_charge_line_hour", table_name="charge_line")
    op.drop_table("charge_line")
    op.drop_index("ix_usage_event_tenant_occurred", table_name="usage_event")
    op.drop_index("ix_usage_event_request", table_name="usage_event")
    op.drop_index("ix_usage_event_occurred", table_name="usage_event")
    op.drop_table("usage_event")
    op.drop_index("ix_price_book", table_name="price")
    op.drop_table("price")
    op.drop_table("usage_conflict")
    op.drop_table("spool_cursor")
    op.drop_table("rollup_hour")
    op.drop_table("price_book")
    op.drop_index("ix_open_intent_node", table_name="open_intent")
    op.drop_table("open_intent")
    op.drop_index("ix_gateway_request_tenant_opened", table_name="gateway_request")
    op.drop_index("ix_gateway_request_opened", table_name="gateway_request")
    op.drop_table("gateway_request")
    op.drop_table("dirty_hour")
