"""Walk the plan until an attempt has generated something. Retries and fallback live only here.

The promise to the client is made at the first *content*: before it another target may be tried,
after it never, so an error inside the first events still falls back and no text is sent twice.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from backends.base import (
    Backend,
    BackendError,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTimeout,
    BackendTruncated,
    ChatRequest,
    Event,
    Final,
    Timeouts,
)
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ContextTooLong,
    GatewayError,
    UpstreamError,
    UpstreamRateLimited,
    UpstreamTimeout,
)
from gateway.routing import Target
from telemetry.ledger import OpenRecord
from telemetry.record import Attempt, Outcome

# What may be held back while waiting for content. More is not a preamble but a defect.
HELD_EVENTS = 64


class Upstream(Struct, frozen=True):
    """A backend as the runtime knows it."""

    backend: Backend
    timeouts: Timeouts


class Live(Struct, frozen=True):
    """An attempt that has begun to answer: its first events, and those to come."""

    backend: Backend
    attempt: Attempt
    held: list[Event]
    events: AsyncIterator[Event]


async def first_success(
    plan: Sequence[Target],
    upstreams: Mapping[str, Upstream],
    request: Callable[[Target, Attempt, Timeouts], ChatRequest],
    record: OpenRecord,
) -> Live:
    """The first target that generates. Raises the GatewayError that the last failure means."""
    failure: BackendError | None = None
    waits_s: list[float] = []
    for target in plan:
        upstream = upstreams[target.backend]
        attempt = record.attempt(
            backend=target.backend,
            provider=upstream.backend.provider,
            model=target.model,
            reason="primary" if failure is None else "fallback",
        )
        timeouts = within(upstream.timeouts, record.remaining_s())
        events = upstream.backend.chat(request(target, attempt, timeouts))
        try:
            held = await _until_content(events, target.backend)
        except BackendError as error:
            fail(attempt, error, record.now_ns())
            if not _may_go_elsewhere(error):
                raise as_gateway_error(error) from error
            failure = error
            if error.retry_after_s is not None:
                waits_s.append(error.retry_after_s)
        except BaseException:
            await _close(events)
            raise
        else:
            return Live(upstream.backend, attempt, held, events)
    assert failure is not None, "a plan has at least one target"
    failure.retry_after_s = min(waits_s, default=None)  # the first that may be free again
    raise as_gateway_error(failure) from failure


def _may_go_elsewhere(error: BackendError) -> bool:
    """What is the request's own fault is so everywhere; a model that is missing there is not."""
    return error.retryable or error.status == 404


async def _until_content(events: AsyncIterator[Event], backend: str) -> list[Event]:
    held: list[Event] = []
    try:
        async for event in events:
            held.append(event)
            if isinstance(event, Final) or event.content_bytes:
                return held
            if len(held) >= HELD_EVENTS:
                raise BackendProtocol("It sent many events and no content.", backend=backend)
    except BackendError:
        await _close(events)
        raise
    raise BackendTruncated("It ended without an answer.", backend=backend)


async def _close(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def fail(attempt: Attempt, error: BackendError, now_ns: int) -> None:
    """Write down how the attempt failed."""
    attempt.ended_ns = now_ns
    attempt.outcome = outcome_of(error)
    attempt.error_code = error.code
    attempt.http_status = error.status


def outcome_of(error: BackendError) -> Outcome:
    match error:
        case BackendTimeout():
            return Outcome.TIMEOUT
        case BackendRefused():
            return Outcome.CLIENT_ERROR
        case BackendTruncated():
            return Outcome.TRUNCATED
        case _:
            return Outcome.UPSTREAM_ERROR


def as_gateway_error(error: BackendError) -> GatewayError:
    """What the client is told. An upstream's credential problem is never theirs."""
    match error:
        case BackendRefused(error_code="context_length_exceeded"):
            return ContextTooLong(error.message, param=error.param)
        case BackendRefused(status=413):
            return BodyTooLarge(error.message)
        case BackendRefused(status=404):
            return UpstreamError(
                "The backend does not know the model that this route points to.", code=error.code
            )
        case BackendRefused():
            return BadRequest(
                error.message, param=error.param, type=error.error_type, code=error.error_code
            )
        case BackendTimeout():
            return UpstreamTimeout(f"The backend was too slow ({error.phase}).")
        case BackendRateLimited():
            return UpstreamRateLimited(
                "The backend is at its rate limit. Retry after the time in Retry-After.",
                retry_after_s=error.retry_after_s or 1.0,
            )
        case _:
            return UpstreamError(
                f"The backend could not answer: {error.message}",
                code=error.code,
                retry_after_s=error.retry_after_s,
            )


def within(timeouts: Timeouts, remaining_s: float) -> Timeouts:
    """The backend's timeouts, cut to what is left of the request's life."""
    if remaining_s >= timeouts.total_s:
        return timeouts
    return msgspec.structs.replace(timeouts, total_s=max(remaining_s, 0.001))
