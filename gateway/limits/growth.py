"""A stream that was not told how long it may get: its reservation grows while it runs.

Pure but for the question that it asks. Must not know budgets or backends. Invariant: the stream
goes on only while what was generated is less than what is held for it, so that it passes its
reservation by one event at most.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from telemetry.ledger.estimate import BYTES_PER_TOKEN, output_tokens
from telemetry.record import Attempt, RequestRecord

LEAST_STEP: Final = 128  # tokens
SMALLEST: Final = 8  # tokens; a smaller rest is not worth asking for

Ask = Callable[[Attempt, int], Awaitable[bool]]


class Growth:
    """`ask` holds that many output tokens more for an attempt, or refuses."""

    __slots__ = ("_ask", "_due", "_held", "_margin", "_step")

    def __init__(self, held: int, ask: Ask) -> None:
        self._held = held
        self._ask = ask
        self._step = max(LEAST_STEP, held // 2)
        self._margin = self._step // 4
        self._due = max(1, held - self._margin)

    @property
    def held(self) -> int:
        return self._held

    def is_due(self, record: RequestRecord) -> bool:
        """Whether `covers` must be asked before the stream goes on. Costs two comparisons."""
        return record.chunks >= self._due or record.content_bytes >= self._due * BYTES_PER_TOKEN

    async def covers(self, record: RequestRecord, attempt: Attempt) -> bool:
        """Whether what was generated is held, and the stream may go on. Asks for more when it is
        near the end of what is held; when refused, again at the end itself, and for less."""
        tokens = output_tokens(record, attempt)
        if self._held - tokens > self._margin:
            return True
        step = self._step
        while step >= SMALLEST:
            if await self._ask(attempt, step):
                self._held += step
                if self._held > tokens:
                    self._margin = step // 4
                    self._due = self._held - self._margin
                    return True
            elif self._held > tokens:
                break
            else:
                step //= 4
        self._margin, self._due = 0, self._held
        return self._held > tokens
