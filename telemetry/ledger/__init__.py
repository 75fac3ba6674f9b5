"""The append-only cost ledger: write-ahead log, shipper, rating, rollups, sweeper."""

from telemetry.ledger.errors import LedgerError, WalLocked, WalUnavailable, WalUnreadable
from telemetry.ledger.record import Ledger, Observer, OpenRecord, Rate
from telemetry.ledger.wal import FsyncPolicy, WriteAheadLog

__all__ = [
    "FsyncPolicy",
    "Ledger",
    "LedgerError",
    "Observer",
    "OpenRecord",
    "Rate",
    "WalLocked",
    "WalUnavailable",
    "WalUnreadable",
    "WriteAheadLog",
]
