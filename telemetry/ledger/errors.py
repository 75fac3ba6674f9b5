"""What the ledger raises.

LedgerError
├─ WalUnavailable    the log cannot take an intent now: the caller must not be admitted
├─ WalLocked         another process owns this node's folder
├─ WalUnreadable     a segment is of a format that this version does not know
└─ CursorMoved       somebody else shipped this node's log: the batch was rolled back
"""


class LedgerError(Exception):
    """Never raised itself. The message is safe to show to an operator."""


class WalUnavailable(LedgerError):
    """Disk full, read-only or failing, or settlements wait for room. `logged`: the intent stands in
    the log but could not be made durable, so its settlement must still close it."""

    def __init__(self, message: str, *, logged: bool = False) -> None:
        super().__init__(message)
        self.logged = logged


class WalLocked(LedgerError):
    """One process owns a node's folder at a time."""


class WalUnreadable(LedgerError):
    """Written by a newer version, or not a log of ours."""


class CursorMoved(LedgerError):
    """The cursor in the database is not where this shipper left it."""
