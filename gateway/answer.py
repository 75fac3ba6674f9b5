"""The settlement scope: whoever streams an Answer enters it, and leaving it settles the record.

Leaving writes exactly one settlement, whatever happened in between: the end of the answer, an
upstream error, a client that left, cancellation, a defect of ours. A generator's `finally` is no
such scope: it runs only when somebody reads on or the collector comes by.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from backends.base import BackendError, BackendTruncated, Chunk, Final, Previous, Whole
from gateway.call import Asked, Call
from gateway.cutoff import Ending, ending_of
from gateway.dispatch import Live, as_gateway_error, fail, outcome_of
from gateway.errors import BudgetSpent, ClientGone, Draining, GatewayError, Internal
from gateway.limits import Growth
from gateway.stopping import REPORT_S
from telemetry.ledger import OpenRecord
from telemetry.ledger.estimate import fill_usage
from telemetry.record import Outcome

SPENT: str = (
    "The budget does not hold more of this answer, so it ends here. What was generated is billed."
)


class Answer:
    """A begun answer and its open record. Enter it, read `events`, leave it: settled."""

    def __init__(
        self,
        call: Call,
        asked: Asked,
        live: Live,
        record: OpenRecord,
        previous: Previous | None = None,
        growth: Growth | None = None,
    ) -> None:
        """`growth`: of its reservation, for a stream that was not told how long it may get."""
        self._growth = growth if asked.stream else None
        self._was_ended = False  # by us: what is held for it cannot grow
        self.call = call
        self.previous = previous
        self.asked = asked
        self.record = record
        self._live = live
        self._complete = False

    @property
    def backend(self) -> str:
        return self._live.attempt.backend

    @property
    def headers(self) -> dict[str, str]:
        """What is known before the first byte."""
        return {
            "x-meterline-cache": "bypass",
            "x-meterline-model": self._live.attempt.model,
            "x-meterline-backend": self._live.attempt.backend,
            "x-meterline-attempts": str(len(self.record.data.attempts)),
        }

    @property
    def upstream_ms(self) -> float:
        """Milliseconds spent waiting for backends so far, failed attempts included."""
        now_ns = self.record.now_ns()
        return (
            sum(
                (attempt.first_token_ns or attempt.ended_ns or now_ns) - attempt.started_ns
                for attempt in self.record.data.attempts
            )
            / 1e6
        )

    async def __aenter__(self) -> Self:
        return self

    async def events(self) -> AsyncIterator[Chunk | Whole | Final]:
        """The events of the attempt, the last one a Final; BackendError if it breaks off."""
        saw, attempt = self.record.saw_chunk, self._live.attempt
        growth = self._growth
        ending = None if growth is None else ending_of(self.call.surface, self.asked.choices)
        for event in self._live.held:
            if isinstance(event, Final):
                self._finish(event)
                yield event
                return
            saw(event.content_bytes, attempt)
            if ending is not None and isinstance(event, Chunk):
                ending.saw(event)
            yield event
        async for event in self._live.events:
            if isinstance(event, Final):
                self._finish(event)
                yield event
                return
            saw(event.content_bytes, attempt)
            yield event
            if growth is not None and ending is not None and isinstance(event, Chunk):
                ending.saw(event)
                data = self.record.data
                if growth.is_due(data) and not await growth.covers(data, attempt):
                    async for last in self._end(ending):
                        yield last
                    return
        raise BackendTruncated("It ended without saying so.", backend=self._live.attempt.backend)

    async def _end(self, ending: Ending) -> AsyncIterator[Chunk | Final]:
        """End the attempt where it is. Whoever can be told to stop says what it took; else what was
        read is counted."""
        self._was_ended = True
        for chunk in ending.closing(BudgetSpent.code, SPENT):
            yield chunk
        final = None
        if await self.call.presence.ask_to_stop():
            with contextlib.suppress(BackendError, TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    async for event in self._live.events:
                        if isinstance(event, Final):
                            final = event
        data = self.record.data
        if final is None:
            fill_usage(data)
            attempt = self._live.attempt
            final = Final(
                usage=attempt.usage,
                usage_source=attempt.usage_source,
                usage_quality=attempt.usage_quality,
            )
        told, final = ending.ended(final)
        for chunk in told:
            yield chunk
        self._finish(final)
        yield final

    def _finish(self, final: Final) -> None:
        attempt = self._live.attempt
        attempt.ended_ns = self.record.now_ns()
        attempt.outcome = Outcome.OK
        attempt.http_status = 200
        attempt.usage = final.usage
        attempt.usage_source = final.usage_source
        attempt.usage_quality = final.usage_quality
        attempt.timings = final.timings
        attempt.answered_model = final.answered_model
        attempt.provider_request_id = final.provider_request_id
        attempt.service_tier = final.service_tier
        attempt.finish_reasons = final.finish_reasons
        self._complete = True
        if self.call.presence.gone:  # it was asked to stop, and this is its report
            raise ClientGone("The client left.")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._settle(error)
        self._live.release()
        close = getattr(self._live.events, "aclose", None)
        if close is not None:
            with contextlib.suppress(BackendError):
                await close()

    def _settle(self, error: BaseException | None) -> None:
        ending = _ending(error, self.call, begun=self.asked.stream)
        if error is None and not self._complete:
            ending = Outcome.INTERNAL_ERROR, 200 if self.asked.stream else 500, Internal.code
        elif error is None and self._was_ended:
            ending = Outcome.BUDGET_REFUSED, 200, BudgetSpent.code
        outcome, status, code = ending
        attempt = self._live.attempt
        if not self._complete:
            if isinstance(error, BackendError):
                fail(attempt, error, self.record.now_ns())
                self._live.failed(error)
            else:
                attempt.outcome, attempt.error_code = outcome, code
        self.record.close(outcome=outcome, status=status, error_code=code)


def _ending(
    error: BaseException | None, call: Call, *, begun: bool
) -> tuple[Outcome, int, str | None]:
    """What a request's end means: outcome, the status that the client saw, and the code that says
    why. `begun`: it has a stream's head already, so its status is 200 whatever comes."""
    match error:
        case None:
            return Outcome.OK, 200, None
        case BackendError() if begun:
            return outcome_of(error), 200, as_gateway_error(error).code
        case BackendError():
            problem = as_gateway_error(error)
            return problem.outcome, problem.status, problem.code
        case GatewayError():
            gone = isinstance(error, ClientGone)
            return error.outcome, 200 if begun and not gone else error.status, error.code
        case asyncio.CancelledError() if call.presence.gone:
            return ClientGone.outcome, ClientGone.status, ClientGone.code
        case asyncio.CancelledError() if begun:
            return Outcome.TRUNCATED, 200, Draining.code
        case asyncio.CancelledError():
            return Draining.outcome, Draining.status, Draining.code
        case _:
            return Outcome.INTERNAL_ERROR, 200 if begun else Internal.status, Internal.code


@contextlib.contextmanager
def settling(record: OpenRecord, call: Call) -> Iterator[None]:
    """The scope of a request before it has an Answer: whatever raises here is settled here."""
    try:
        yield
    except BaseException as error:
        outcome, status, code = _ending(error, call, begun=False)
        for attempt in record.data.attempts:
            if attempt.outcome is None:
                attempt.outcome, attempt.error_code = outcome, code
        record.close(outcome=outcome, status=status, error_code=code)
        raise
