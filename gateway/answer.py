"""The settlement scope: whoever streams an Answer enters it, and leaving it settles the record.

Leaving writes exactly one settlement, whatever happened in between: the end of the answer, an
upstream error, a client that left, cancellation, a defect of ours. A generator's `finally` is no
such scope: it runs only when somebody reads on or the collector comes by.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from backends.base import BackendError, Chunk, Final, Whole
from gateway.call import Asked, Call
from gateway.dispatch import Live, as_gateway_error, fail, outcome_of
from gateway.errors import ClientGone, GatewayError, Internal
from telemetry.ledger import OpenRecord
from telemetry.record import Outcome

CANCEL_S = 1.0  # how long a cancelled backend may take to say what it generated


@runtime_checkable
class Cancellable(Protocol):
    """A backend that can be told to stop and then reports what it did until then."""

    async def cancel(self, request_id: str) -> bool:
        """Ask it to stop. True: the stream will now end with its Final."""
        ...


class Answer:
    """A begun answer and its open record. Enter it, read `events`, leave it: settled."""

    def __init__(self, call: Call, asked: Asked, live: Live, record: OpenRecord) -> None:
        self.call = call
        self.asked = asked
        self.record = record
        self._live = live
        self._complete = False

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
        """The events of the attempt; BackendError if it breaks off."""
        saw = self.record.saw_chunk
        for event in self._live.held:
            if isinstance(event, Final):
                self._finish(event)
            else:
                saw(event.content_bytes)
            yield event
        async for event in self._live.events:
            if isinstance(event, Final):
                self._finish(event)
            else:
                saw(event.content_bytes)
            yield event

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
        try:
            if not self._complete and isinstance(error, asyncio.CancelledError | ClientGone):
                await self._stop()
        finally:
            self._settle(error)
            close = getattr(self._live.events, "aclose", None)
            if close is not None:
                with contextlib.suppress(BackendError):
                    await close()

    async def _stop(self) -> None:
        """Tell the backend to stop, and take what it then reports: its count is exact, ours would
        be an estimate. Bounded, and given up at a second cancellation."""
        backend = self._live.backend
        if not isinstance(backend, Cancellable):
            return
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                if not await backend.cancel(self.record.data.request_id):
                    return
                async for event in self._live.events:
                    if isinstance(event, Final):
                        self._finish(event)
                        return

    def _settle(self, error: BaseException | None) -> None:
        attempt = self._live.attempt
        if isinstance(error, BackendError) and not self._complete:
            fail(attempt, error, self.record.now_ns())
        outcome, code = _ending(error, self._complete, self.call)
        if attempt.outcome is None or outcome is not Outcome.OK:
            attempt.outcome = outcome
            attempt.error_code = attempt.error_code or code
        status = 200
        if outcome is Outcome.CLIENT_DISCONNECT:
            status = 499
        elif isinstance(error, BackendError) and not self.asked.stream:
            status = as_gateway_error(error).status
        self.record.close(outcome=outcome, status=status, error_code=code)


def _ending(error: BaseException | None, complete: bool, call: Call) -> tuple[Outcome, str | None]:
    """How a begun answer ended, and the code that says why."""
    match error:
        case None if complete:
            return Outcome.OK, None
        case None:
            return Outcome.INTERNAL_ERROR, "unfinished"
        case BackendError():
            return outcome_of(error), error.code
        case GatewayError():
            return error.outcome, error.code
        case asyncio.CancelledError() if not call.presence.gone:
            return Outcome.TRUNCATED, "shutting_down"
        case asyncio.CancelledError():
            return Outcome.CLIENT_DISCONNECT, ClientGone.code
        case _:
            return Outcome.INTERNAL_ERROR, Internal.code


@contextlib.contextmanager
def settling(record: OpenRecord, call: Call) -> Iterator[None]:
    """The scope of a request before it has an Answer: whatever raises here is settled here."""
    try:
        yield
    except GatewayError as error:
        record.close(outcome=error.outcome, status=error.status, error_code=error.code)
        raise
    except asyncio.CancelledError:
        outcome, code = _ending(asyncio.CancelledError(), False, call)
        status = 499 if call.presence.gone else 503
        record.close(outcome=outcome, status=status, error_code=code)
        raise
    except BaseException:
        record.close(outcome=Outcome.INTERNAL_ERROR, status=500, error_code=Internal.code)
        raise
