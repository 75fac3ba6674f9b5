"""From log records to table rows. Pure: the same bytes always give the same rows and ids.

A settlement becomes one gateway_request, a usage_event per attempt and a charge_line per charge.
All are booked in the hour that they happened in; whoever ships them into a closed month moves them.
Text is cut to its column and freed of NUL (PostgreSQL refuses it) in the columns only; the `record`
column keeps the logged bytes, which `payload_hash` is taken of.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import msgspec
from msgspec import Struct, structs
from sqlalchemy import String, Table

from telemetry.ids import usage_event_id
from telemetry.ledger import entries
from telemetry.ledger.frames import Frame, Kind
from telemetry.record import Attempt, Outcome, RequestRecord
from telemetry.tables import (
    ChargeLineRow,
    LedgerBase,
    OpenIntentRow,
    RequestRow,
    UsageEventRow,
)
from telemetry.usage import Usage

Row = dict[str, Any]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LINES = UUID("0c5dbb3a-5f0e-5f43-a3c5-0b5b0e0d8a11")
_NO_USAGE = Usage()
_LATEST_NS = 253_402_300_799 * 10**9


class Settled(Struct, frozen=True):
    """The rows of one settlement."""

    request_id: str
    admitted: bool
    abandoned: bool
    request: Row
    events: list[Row]
    lines: list[Row]


class Folded(Struct, frozen=True):
    """A batch of the log, reduced: what was opened and settled in the same batch is only settled.

    `attempts`: newer attempt lists of requests whose intent was in an earlier batch."""

    records: int
    admitted: int
    settled: dict[str, Settled]
    again: list[Settled]  # a request id settled twice in one batch: a defect, kept as a conflict
    opened: dict[str, Row]
    attempts: dict[str, bytes]
    unreadable: list[bytes]  # whole frames that do not decode: kept as conflicts


def at(ns: int) -> datetime:
    """Nanoseconds since the epoch as a UTC datetime, cut to microseconds and to year 9999."""
    ns = max(0, min(ns, _LATEST_NS))
    return EPOCH + timedelta(microseconds=ns // 1000)


def hour_of(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def payload_hash(record: str) -> str:
    """SHA-256 of the record's text as it is stored."""
    return hashlib.sha256(record.encode()).hexdigest()


def fold(records: list[Frame], node: str) -> Folded:
    """Decode a batch in order and reduce it."""
    folded = Folded(len(records), 0, {}, [], {}, {}, [])
    admitted = 0
    for frame in records:
        admitted += frame.kind == Kind.INTENT
        try:
            _fold_one(folded, frame, node)
        except (msgspec.MsgspecError, ValueError):
            folded.unreadable.append(frame.payload)
    return structs.replace(folded, admitted=admitted)


def _fold_one(folded: Folded, frame: Frame, node: str) -> None:
    if frame.kind == Kind.INTENT:
        intent = entries.unpack_intent(frame.payload)
        folded.opened[intent.request_id] = intent_row(intent, node)
    elif frame.kind == Kind.ATTEMPTS:
        update = entries.unpack_attempts(frame.payload)
        if (row := folded.opened.get(update.request_id)) is not None:
            row["record"] = with_attempts(row["record"], update.attempts)
        elif update.request_id not in folded.settled:
            folded.attempts[update.request_id] = update.attempts
    elif frame.kind == Kind.SETTLEMENT:
        settled = settlement_rows(entries.unpack_settlement(frame.payload))
        folded.opened.pop(settled.request_id, None)
        folded.attempts.pop(settled.request_id, None)
        first = folded.settled.setdefault(settled.request_id, settled)
        if first is not settled:
            folded.again.append(settled)


def intent_row(intent: entries.Intent, node: str) -> Row:
    return {
        "request_id": intent.request_id,
        "node": node,
        "boot": intent.boot,
        "deadline_at": at(intent.deadline_ns),
        "record": intent.record.decode(),
    }


def with_attempts(record: str, attempts: bytes) -> str:
    """An intent's record with the attempts that were started since."""
    data = entries.record_from_json(record)
    data.attempts = entries.attempts_from_json(attempts)
    return entries.to_json(data).decode()


def settlement_rows(settlement: entries.Settlement) -> Settled:
    data = entries.record_from_json(settlement.record)
    text = settlement.record.decode()
    request = _request_row(data, text)
    events: list[Row] = []
    lines: list[Row] = []
    final = data.served or (data.attempts[-1] if data.attempts else None)
    for attempt in data.attempts:
        event = _event_row(data, attempt, is_final=attempt is final)
        events.append(event)
        lines.extend(line_rows(event, attempt))
    return Settled(
        data.request_id,
        settlement.admitted,
        data.outcome == Outcome.ABANDONED,
        request,
        events,
        lines,
    )


def _request_row(data: RequestRecord, text: str) -> Row:
    assert data.outcome is not None
    return _fitted(
        RequestRow.__table__,
        {
            "request_id": data.request_id,
            "node": data.node,
            "tenant_id": data.tenant_id,
            "key_id": data.key_id,
            "surface": data.surface,
            "asked_model": data.asked_model,
            "stream": data.stream,
            "opened_at": at(data.opened_ns),
            "ended_at": at(data.ended_ns or data.opened_ns),
            "outcome": data.outcome.value,
            "status": data.status,
            "error_code": data.error_code,
            "trace_id": data.trace_id,
            "record": text,
            "payload_hash": payload_hash(text),
        },
    )


def _event_row(data: RequestRecord, attempt: Attempt, *, is_final: bool) -> Row:
    usage = attempt.usage or _NO_USAGE
    timings = attempt.timings
    device = timings.device_us if timings is not None else None
    queue_s = timings.queue_s if timings is not None else None
    row: Row = {
        "event_id": usage_event_id(data.request_id, attempt.attempt_no),
        "request_id": data.request_id,
        "attempt_no": attempt.attempt_no,
        "reason": attempt.reason,
        "tenant_id": data.tenant_id,
        "key_id": data.key_id,
        "asked_model": data.asked_model,
        "backend": attempt.backend,
        "provider": attempt.provider,
        "model": attempt.answered_model or attempt.model,
        "service_tier": attempt.service_tier,
        "occurred_at": at(attempt.started_ns),
        "ended_at": at(attempt.ended_ns or attempt.started_ns),
        "outcome": (attempt.outcome or Outcome.INTERNAL_ERROR).value,
        "is_final": is_final,
        "engine_us_queue": None if queue_s is None else round(queue_s * 1e6),
        "engine_us_prefill": None if device is None else device.prefill,
        "engine_us_decode": None if device is None else device.decode,
        "engine_us_sampling": None if device is None else device.sampling,
        "engine_us_recompute": None if device is None else device.recompute,
        "engine_us_spec_rejected": None if device is None else device.spec_rejected,
        "usage_source": attempt.usage_source.value,
        "usage_quality": attempt.usage_quality.value,
        "booked_hour": hour_of(at(attempt.started_ns)),
    }
    row.update(structs.asdict(usage))
    return _fitted(UsageEventRow.__table__, row)


def line_rows(event: Row, attempt: Attempt) -> list[Row]:
    """A line per meter and charge; a meter that was charged twice (a price change inside it would
    be such a case) gets distinct names, because (event, meter) is the line's identity."""
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for charge in attempt.charges:
        count = seen[charge.meter] = seen.get(charge.meter, 0) + 1
        meter = charge.meter if count == 1 else f"{charge.meter} ({count})"
        rows.append(
            _fitted(
                ChargeLineRow.__table__,
                {
                    "line_id": str(uuid5(_LINES, f"{event['event_id']}/{meter}")),
                    "event_id": event["event_id"],
                    "request_id": event["request_id"],
                    "hour": hour_of(event["occurred_at"]),
                    "tenant_id": event["tenant_id"],
                    "key_id": event["key_id"],
                    "asked_model": event["asked_model"],
                    "backend": event["backend"],
                    "provider": event["provider"],
                    "model": event["model"],
                    "meter": meter,
                    "quantity": charge.quantity,
                    "unit": charge.unit,
                    "unit_price": charge.unit_price,
                    "amount": charge.amount,
                    "currency": charge.currency,
                    "price_id": charge.price_id,
                    "book": charge.book,
                    "booked_hour": event["booked_hour"],
                    "cause": None,
                    "reverses_id": None,
                },
            )
        )
    return rows


def _widths(table: Any) -> dict[str, int]:
    assert isinstance(table, Table)
    return {
        column.name: column.type.length
        for column in table.columns
        if type(column.type) is String and column.type.length is not None
    }


_WIDTHS = {
    name: _widths(LedgerBase.metadata.tables[name])
    for name in (
        RequestRow.__tablename__,
        UsageEventRow.__tablename__,
        ChargeLineRow.__tablename__,
        OpenIntentRow.__tablename__,
    )
}


def _fitted(table: Any, row: Row) -> Row:
    """Cut text to its column."""
    for name, width in _WIDTHS[table.name].items():
        text = row.get(name)
        if text is not None and (len(text) > width or "\0" in text):
            row[name] = text.replace("\0", "�")[:width]
    return row
