"""What ledger tests share: a price, a disk that can fill, and a log with its ledger."""

import errno
import os
from decimal import Decimal
from pathlib import Path

from typing_extensions import override

from telemetry.clock import Clock
from telemetry.ledger import Ledger, OpenRecord, WriteAheadLog
from telemetry.ledger.wal import Disk, FsyncPolicy
from telemetry.money import amount
from telemetry.record import Attempt, Charge, Outcome
from telemetry.trace_context import TraceContext
from telemetry.usage import Usage, UsageSource

IN_PRICE = Decimal("0.15")
OUT_PRICE = Decimal("0.6")
TRACE = TraceContext("a" * 32, None, True)


def rate(attempt: Attempt) -> tuple[Charge, ...]:
    """Input and output tokens at a fixed price; an unknown model is unpriced."""
    if attempt.usage is None:
        return ()
    known = attempt.model != "unknown"
    return tuple(
        Charge(
            meter=meter,
            quantity=tokens,
            unit=1_000_000,
            unit_price=price if known else None,
            amount=amount(tokens, price, 1_000_000) if known else None,
            book="test@1",
        )
        for meter, tokens, price in (
            ("Input Tokens", attempt.usage.input_tokens, IN_PRICE),
            ("Output Tokens", attempt.usage.output_tokens, OUT_PRICE),
        )
        if tokens
    )


def cost(tokens_in: int, tokens_out: int) -> Decimal:
    """What `rate` must come to, computed by hand."""
    return (tokens_in * IN_PRICE + tokens_out * OUT_PRICE) / 1_000_000


class FillingDisk(Disk):
    """A disk that can be full, in the part that is not preallocated or in all of it."""

    def __init__(self) -> None:
        self.may_allocate = True
        self.may_write = True
        self.may_sync = True

    @override
    def write(self, fd: int, data: bytes, offset: int) -> int:
        if not self.may_write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)

    @override
    def allocate(self, fd: int, offset: int, size: int) -> None:
        if not self.may_allocate:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, size)

    @override
    def sync(self, fd: int) -> None:
        if not self.may_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_log(
    wal_dir: Path,
    clock: Clock,
    name: str = "gateway-0",
    *,
    segment_bytes: int = 1 << 20,
    fsync: FsyncPolicy = "group",
    disk: Disk | None = None,
) -> WriteAheadLog:
    """A log with small segments."""
    return WriteAheadLog.open(
        wal_dir, name, clock=clock, segment_bytes=segment_bytes, fsync=fsync, disk=disk
    )


def admit(
    ledger: Ledger,
    *,
    tenant: str = "t1",
    model: str = "m",
    provider: str = "scripted",
    tokens_in: int = 7,
    stream: bool = True,
) -> OpenRecord:
    """A request that was admitted and asked its backend."""
    record = ledger.open(surface="chat", trace=TRACE, deadline_s=60)
    data = record.data
    data.tenant_id = tenant  # type: ignore[assignment]  # ids are NewType over str
    data.key_id = "k1"  # type: ignore[assignment]  # as above
    data.asked_model = "assistant"
    data.stream = stream
    data.input_estimate = tokens_in
    record.intend()
    record.attempt(backend="b", provider=provider, model=model, reason="primary")
    return record


def serve(
    ledger: Ledger, *, tokens_out: int = 3, tokens_in: int = 7, tenant: str = "t1", model: str = "m"
) -> OpenRecord:
    """A request from admission to settlement, with usage reported by the backend."""
    record = admit(ledger, tenant=tenant, model=model, tokens_in=tokens_in)
    for _ in range(tokens_out):
        record.saw_chunk(4)
    attempt = record.data.attempts[-1]
    attempt.usage = Usage(in_uncached_text=tokens_in, out_text=tokens_out)
    attempt.usage_source = UsageSource.REPORTED
    record.close(outcome=Outcome.OK, status=200)
    return record


def refuse(ledger: Ledger) -> OpenRecord:
    """A request that was refused before it was admitted."""
    record = ledger.open(surface="chat", trace=TRACE, deadline_s=60)
    record.close(outcome=Outcome.CLIENT_ERROR, status=401, error_code="invalid_api_key")
    return record
