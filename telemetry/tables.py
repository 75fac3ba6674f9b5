"""SQLAlchemy tables of the ledger, its rollups and the price books.

The same models serve SQLite and PostgreSQL 14 and newer. Times are UTC; money is exact on both.
A row is written once: rows of a settled request are never updated, only rollups are recomputed.
"""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    Numeric,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator
from typing_extensions import override

from telemetry.money import plain


class ExactDecimal(TypeDecorator[Decimal]):
    """NUMERIC on PostgreSQL; canonical text on SQLite, whose NUMERIC is a float."""

    impl = Numeric
    cache_ok = True

    def __init__(self, precision: int, scale: int) -> None:
        super().__init__()
        self.precision = precision
        self.scale = scale

    @override
    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(String(self.precision + 2))
        return dialect.type_descriptor(Numeric(self.precision, self.scale, asdecimal=True))

    @override
    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if not isinstance(value, Decimal):
            raise TypeError(f"money must be Decimal, not {type(value).__name__}")
        return plain(value) if dialect.name == "sqlite" else value

    @override
    def process_result_value(self, value: Any, dialect: Dialect) -> Decimal | None:
        return None if value is None else Decimal(value)


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC datetime on both databases."""

    impl = DateTime(timezone=True)
    cache_ok = True

    @override
    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("naive datetime in the ledger")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    @override
    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Money = ExactDecimal(38, 15)
Price = ExactDecimal(24, 9)
Big = BigInteger().with_variant(Integer, "sqlite")


class LedgerBase(DeclarativeBase):
    """Metadata of the ledger's own tables (the gateway's tenants are apart)."""


class RequestRow(LedgerBase):
    """One settled request: the whole record, and the columns that reports filter by."""

    __tablename__ = "gateway_request"

    request_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    node: Mapped[str] = mapped_column(String(80))
    tenant_id: Mapped[str | None] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(64))
    surface: Mapped[str] = mapped_column(String(20))
    asked_model: Mapped[str | None] = mapped_column(String(256))
    stream: Mapped[bool] = mapped_column(Boolean)
    opened_at: Mapped[datetime] = mapped_column(UtcTime)
    ended_at: Mapped[datetime] = mapped_column(UtcTime)
    outcome: Mapped[str] = mapped_column(String(32))
    status: Mapped[int | None] = mapped_column(Integer)
    error_code: Mapped[str | None] = mapped_column(String(64))
    trace_id: Mapped[str] = mapped_column(String(32))
    record: Mapped[str] = mapped_column(Text)  # RequestRecord as JSON: the story `explain` tells
    payload_hash: Mapped[str] = mapped_column(String(64))

    __table_args__ = (
        Index("ix_gateway_request_tenant_opened", "tenant_id", "opened_at"),
        Index("ix_gateway_request_opened", "opened_at"),
    )


class UsageEventRow(LedgerBase):
    """One attempt of a request: what one backend did, and the tokens it took."""

    __tablename__ = "usage_event"

    event_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(36), ForeignKey("gateway_request.request_id"))
    attempt_no: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[str | None] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(64))
    asked_model: Mapped[str | None] = mapped_column(String(256))
    backend: Mapped[str] = mapped_column(String(64))
    provider: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(256))  # the one that is priced: answered, else routed
    service_tier: Mapped[str | None] = mapped_column(String(32))
    occurred_at: Mapped[datetime] = mapped_column(UtcTime)  # the attempt's start
    ended_at: Mapped[datetime] = mapped_column(UtcTime)
    outcome: Mapped[str] = mapped_column(String(32))
    is_final: Mapped[bool] = mapped_column(Boolean)  # served, else last: it counts the request
    in_uncached_text: Mapped[int] = mapped_column(Big, default=0)
    in_cached_read: Mapped[int] = mapped_column(Big, default=0)
    in_cache_write_5m: Mapped[int] = mapped_column(Big, default=0)
    in_cache_write_1h: Mapped[int] = mapped_column(Big, default=0)
    in_audio: Mapped[int] = mapped_column(Big, default=0)
    in_image: Mapped[int] = mapped_column(Big, default=0)
    in_video: Mapped[int] = mapped_column(Big, default=0)
    in_document: Mapped[int] = mapped_column(Big, default=0)
    out_text: Mapped[int] = mapped_column(Big, default=0)
    out_reasoning: Mapped[int] = mapped_column(Big, default=0)
    out_audio: Mapped[int] = mapped_column(Big, default=0)
    out_image: Mapped[int] = mapped_column(Big, default=0)
    engine_us_queue: Mapped[int | None] = mapped_column(Big)
    engine_us_prefill: Mapped[int | None] = mapped_column(Big)
    engine_us_decode: Mapped[int | None] = mapped_column(Big)
    engine_us_sampling: Mapped[int | None] = mapped_column(Big)
    engine_us_recompute: Mapped[int | None] = mapped_column(Big)
    engine_us_spec_rejected: Mapped[int | None] = mapped_column(Big)
    usage_source: Mapped[str] = mapped_column(String(16))
    usage_quality: Mapped[str] = mapped_column(String(16))
    # The hour whose sums it is in: its own, or that of its arrival if its month was closed.
    booked_hour: Mapped[datetime] = mapped_column(UtcTime)

    __table_args__ = (
        Index("ix_usage_event_booked", "booked_hour"),
        Index("ix_usage_event_request", "request_id"),
        Index("ix_usage_event_tenant_occurred", "tenant_id", "occurred_at"),
        Index("ix_usage_event_occurred", "occurred_at"),
    )


class ChargeLineRow(LedgerBase):
    """One priced meter of one attempt. Never updated; corrections are new lines: a reversal (the
    same with the signs turned) and a replacement. `cause` null: as it was settled."""

    __tablename__ = "charge_line"

    line_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    event_id: Mapped[str] = mapped_column(String(36), ForeignKey("usage_event.event_id"))
    request_id: Mapped[str] = mapped_column(String(36))
    hour: Mapped[datetime] = mapped_column(UtcTime)
    tenant_id: Mapped[str | None] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(64))
    asked_model: Mapped[str | None] = mapped_column(String(256))
    backend: Mapped[str] = mapped_column(String(64))
    provider: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(256))
    meter: Mapped[str] = mapped_column(String(64))
    quantity: Mapped[int] = mapped_column(Big)
    unit: Mapped[int] = mapped_column(Big)
    unit_price: Mapped[Decimal | None] = mapped_column(Price)
    amount: Mapped[Decimal | None] = mapped_column(Money)  # null: unpriced
    currency: Mapped[str] = mapped_column(String(3))
    price_id: Mapped[str | None] = mapped_column(String(64))
    book: Mapped[str | None] = mapped_column(String(80))
    booked_hour: Mapped[datetime] = mapped_column(UtcTime)  # as in usage_event
    cause: Mapped[str | None] = mapped_column(String(16))  # rerate: a correction of ours
    reverses_id: Mapped[str | None] = mapped_column(String(36))  # the line that this one takes back

    __table_args__ = (
        Index("ix_charge_line_booked", "booked_hour"),
        Index("ix_charge_line_event", "event_id"),
        Index("ix_charge_line_hour", "hour"),
        Index("ix_charge_line_request", "request_id"),
    )


class RollupRow(LedgerBase):
    """Hourly sums. Recomputed from events and lines for each dirty hour, so replay is harmless."""

    __tablename__ = "rollup_hour"

    hour: Mapped[datetime] = mapped_column(UtcTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # "" for nobody
    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    asked_model: Mapped[str] = mapped_column(String(256), primary_key=True)
    backend: Mapped[str] = mapped_column(String(64), primary_key=True)
    provider: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    usage_source: Mapped[str] = mapped_column(String(16), primary_key=True)
    requests: Mapped[int] = mapped_column(Big)  # requests whose served (else last) attempt it is
    attempts: Mapped[int] = mapped_column(Big)
    input_tokens: Mapped[int] = mapped_column(Big)
    cached_tokens: Mapped[int] = mapped_column(Big)
    output_tokens: Mapped[int] = mapped_column(Big)
    device_us: Mapped[int] = mapped_column(Big)
    amount: Mapped[Decimal] = mapped_column(Money)
    unpriced_lines: Mapped[int] = mapped_column(Big)
    currency: Mapped[str] = mapped_column(String(3), primary_key=True)


class MeterRollupRow(LedgerBase):
    """Hourly sums of charge lines by meter and price: what invoices and exports are made of."""

    __tablename__ = "rollup_meter"

    hour: Mapped[datetime] = mapped_column(UtcTime, primary_key=True)  # booked
    charge_hour: Mapped[datetime] = mapped_column(UtcTime, primary_key=True)  # when it was used
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # "" for nobody
    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    asked_model: Mapped[str] = mapped_column(String(256), primary_key=True)
    backend: Mapped[str] = mapped_column(String(64), primary_key=True)
    provider: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    service_tier: Mapped[str] = mapped_column(String(32), primary_key=True)  # "": standard
    meter: Mapped[str] = mapped_column(String(64), primary_key=True)
    price_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # "": unpriced
    waste: Mapped[str] = mapped_column(String(24), primary_key=True)  # "": none; see rollups
    currency: Mapped[str] = mapped_column(String(3), primary_key=True)
    unit: Mapped[int] = mapped_column(Big)
    unit_price: Mapped[Decimal | None] = mapped_column(Price)
    quantity: Mapped[int] = mapped_column(Big)
    amount: Mapped[Decimal] = mapped_column(Money)
    lines: Mapped[int] = mapped_column(Big)
    unpriced_lines: Mapped[int] = mapped_column(Big)


class DirtyHourRow(LedgerBase):
    """An hour whose rollup no longer equals its events. Set in the shipper's transaction."""

    __tablename__ = "dirty_hour"

    hour: Mapped[datetime] = mapped_column(UtcTime, primary_key=True)
    marked_at: Mapped[datetime] = mapped_column(UtcTime)


class SpoolCursorRow(LedgerBase):
    """How far one node's write-ahead log has been shipped. Advanced with the rows it stands for."""

    __tablename__ = "spool_cursor"

    node: Mapped[str] = mapped_column(String(80), primary_key=True)
    segment: Mapped[int] = mapped_column(Big)
    byte_offset: Mapped[int] = mapped_column(Big)
    records: Mapped[int] = mapped_column(Big)  # log records shipped so far, of every kind
    admitted: Mapped[int] = mapped_column(Big)  # intents among them
    settled: Mapped[int] = mapped_column(Big)  # settlements that became a gateway_request
    refused: Mapped[int] = mapped_column(Big)  # of those, without an intent
    swept: Mapped[int] = mapped_column(Big)  # of those, abandoned: closed by the sweeper
    updated_at: Mapped[datetime] = mapped_column(UtcTime)


class OpenIntentRow(LedgerBase):
    """An intent that was shipped before its settlement. The sweeper closes what stays here."""

    __tablename__ = "open_intent"

    request_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    node: Mapped[str] = mapped_column(String(80))
    boot: Mapped[str] = mapped_column(String(32))  # the life of the process that admitted it
    deadline_at: Mapped[datetime] = mapped_column(UtcTime)
    record: Mapped[str] = mapped_column(Text)

    __table_args__ = (Index("ix_open_intent_node", "node"),)


class UsageConflictRow(LedgerBase):
    """The same request id arrived again with other facts. Kept, alarmed, never overwritten."""

    __tablename__ = "usage_conflict"

    conflict_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(36))
    seen_at: Mapped[datetime] = mapped_column(UtcTime)
    payload_hash: Mapped[str] = mapped_column(String(64))
    record: Mapped[str] = mapped_column(Text)


class PriceBookRow(LedgerBase):
    """A list of prices. A draft prices nothing; once published it is immutable."""

    __tablename__ = "price_book"

    book_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int] = mapped_column(Integer)
    published_at: Mapped[datetime] = mapped_column(UtcTime)  # of a draft: when it was imported
    source: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), default="published")  # draft | published

    __table_args__ = (UniqueConstraint("name", "version", name="uq_price_book_name_version"),)


class PriceRow(LedgerBase):
    """One dated price of one meter."""

    __tablename__ = "price"

    price_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    book_id: Mapped[str] = mapped_column(String(36), ForeignKey("price_book.book_id"))
    provider: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(256))  # a name, or a pattern of `match`
    match: Mapped[str] = mapped_column(String(16))  # equals | starts_with | contains | regex | any
    priority: Mapped[int] = mapped_column(Integer)  # lower is tried first
    meter: Mapped[str] = mapped_column(String(64))
    service_tier: Mapped[str] = mapped_column(String(32), default="")  # "": standard
    min_input_tokens: Mapped[int] = mapped_column(Big, default=0)
    unit: Mapped[int] = mapped_column(Big)
    unit_price: Mapped[Decimal] = mapped_column(Price)  # what is paid: contracted
    list_unit_price: Mapped[Decimal | None] = mapped_column(Price)  # the public one, if it differs
    currency: Mapped[str] = mapped_column(String(3))
    effective_from: Mapped[datetime | None] = mapped_column(UtcTime)
    effective_to: Mapped[datetime | None] = mapped_column(UtcTime)

    __table_args__ = (Index("ix_price_book", "book_id"),)


class EngineLeaseRow(LedgerBase):
    """One life of an engine on hardware with one rate, as its step clock told it. The counters are
    those of the last heartbeat: adding a heartbeat twice adds nothing."""

    __tablename__ = "engine_lease"

    lease_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    backend: Mapped[str] = mapped_column(String(64))
    started_at: Mapped[datetime] = mapped_column(UtcTime)
    seen_at: Mapped[datetime] = mapped_column(UtcTime)  # started_at + the clock's wall time
    rate_per_hour: Mapped[Decimal] = mapped_column(Price)  # of one device
    devices: Mapped[int] = mapped_column(Integer)
    load_us: Mapped[int] = mapped_column(Big)
    warmup_us: Mapped[int] = mapped_column(Big)
    step_us: Mapped[int] = mapped_column(Big)
    idle_us: Mapped[int] = mapped_column(Big)

    __table_args__ = (Index("ix_engine_lease_backend_seen", "backend", "seen_at"),)


class EngineHourRow(LedgerBase):
    """The part of a lease that lies in one hour: the four phases are all of its wall time."""

    __tablename__ = "engine_hour"

    lease_id: Mapped[str] = mapped_column(
        String(36), ForeignKey("engine_lease.lease_id"), primary_key=True
    )
    hour: Mapped[datetime] = mapped_column(UtcTime, primary_key=True)
    load_us: Mapped[int] = mapped_column(Big)
    warmup_us: Mapped[int] = mapped_column(Big)
    step_us: Mapped[int] = mapped_column(Big)
    idle_us: Mapped[int] = mapped_column(Big)

    __table_args__ = (Index("ix_engine_hour_hour", "hour"),)


class BillRow(LedgerBase):
    """A bill as a provider sent it. The same file is imported once."""

    __tablename__ = "bill"

    bill_id: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of the file
    provider: Mapped[str] = mapped_column(String(64))
    format: Mapped[str] = mapped_column(String(16))
    source: Mapped[str] = mapped_column(Text)
    imported_at: Mapped[datetime] = mapped_column(UtcTime)


class BillLineRow(LedgerBase):
    """One line of a bill, as far as it says: a model or meter that it does not name is empty."""

    __tablename__ = "bill_line"

    bill_id: Mapped[str] = mapped_column(String(64), ForeignKey("bill.bill_id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    day: Mapped[datetime] = mapped_column(UtcTime)
    model: Mapped[str] = mapped_column(String(256))
    meter: Mapped[str] = mapped_column(String(64))
    quantity: Mapped[int | None] = mapped_column(Big)
    amount: Mapped[Decimal] = mapped_column(Money)
    currency: Mapped[str] = mapped_column(String(3))
    raw: Mapped[str] = mapped_column(Text)  # the line as it came, JSON

    __table_args__ = (Index("ix_bill_line_day", "day"),)


class PostingRow(LedgerBase):
    """What a bill says beyond what was rated, made visible when a month was closed: rated plus the
    postings of a day is what was billed for it."""

    __tablename__ = "posting"

    posting_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    month: Mapped[str] = mapped_column(String(7))  # whose closing posted it
    account: Mapped[str] = mapped_column(String(96))  # unreconciled:<provider>
    provider: Mapped[str] = mapped_column(String(64))
    day: Mapped[datetime] = mapped_column(UtcTime)
    model: Mapped[str] = mapped_column(String(256))
    meter: Mapped[str] = mapped_column(String(64))
    currency: Mapped[str] = mapped_column(String(3))
    amount: Mapped[Decimal] = mapped_column(Money)
    cause: Mapped[str] = mapped_column(String(96))  # suspected
    posted_at: Mapped[datetime] = mapped_column(UtcTime)

    __table_args__ = (Index("ix_posting_day", "day"),)


class BillingPeriodRow(LedgerBase):
    """A closed month, UTC. Its manifest can be made again from the rows, byte for byte, and names
    the hash of the month that was closed before it."""

    __tablename__ = "billing_period"

    month: Mapped[str] = mapped_column(String(7), primary_key=True)  # 2026-11
    closed_at: Mapped[datetime] = mapped_column(UtcTime)
    manifest: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
