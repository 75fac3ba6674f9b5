"""Requests that came without a valid key: each is counted by reason, and recorded in the ledger at
a bounded rate, so that a flood of bad keys can fill neither the disk nor the reports."""

from typing import Final

from gateway.auth import ADDRESS, AMBIGUOUS, EXPIRED, MISSING, REVOKED, SUSPENDED
from gateway.errors import Unauthenticated
from gateway.tokens import REASONS as TOKEN_REASONS
from telemetry.clock import Clock

_REASONS: Final = {
    MISSING: "missing",
    AMBIGUOUS: "ambiguous",
    EXPIRED: "expired",
    REVOKED: "revoked",
    SUSPENDED: "suspended",
    ADDRESS: "address",
    **dict.fromkeys(TOKEN_REASONS, "token"),
}
PER_S: Final = 20
BURST: Final = 200


class Refusals:
    """Counts, and a token bucket of `BURST` records that refills with `PER_S`."""

    def __init__(self, clock: Clock) -> None:
        self.counts = dict.fromkeys((*_REASONS.values(), "wrong"), 0)
        self._clock = clock
        self._tokens = float(BURST)
        self._filled_ns = clock.monotonic_ns()

    def count(self, error: Unauthenticated) -> None:
        self.counts[_REASONS.get(error.message, "wrong")] += 1

    def may_record(self) -> bool:
        """Whether this one gets a row of its own."""
        now_ns = self._clock.monotonic_ns()
        self._tokens = min(BURST, self._tokens + (now_ns - self._filled_ns) * PER_S / 1e9)
        self._filled_ns = now_ns
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
