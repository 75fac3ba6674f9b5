"""Walk the plan until an attempt has generated something. Retries and fallback live only here,
within one budget of attempts and one deadline.

The promise to the client is made at the first *content*: before it another target may be tried,
after it never, so an error inside the first events still falls back and no text is sent twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from backends import translate
from backends.base import (
    Backend,
    BackendCannot,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTimeout,
    BackendTooLate,
    BackendTruncated,
    BackendUnavailable,
    ChatRequest,
    Event,
    Final,
    Timeouts,
)
from backends.settings import Dialect
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    CircuitOpen,
    ContextTooLong,
    GatewayError,
    UpstreamError,
    UpstreamRateLimited,
    UpstreamTimeout,
)
from gateway.health import Health
from gateway.routing import Target
from telemetry.ledger import OpenRecord
from telemetry.record import Attempt, AttemptReason, Outcome

# What may be held back while waiting for content. More is not a preamble but a defect.
HELD_EVENTS = 64
FIRST_PAUSE_S = 0.1  # before a second turn
_TIMER_S = 0.002  # timers may fire that much too early, and a circuit is exact
MAX_PAUSE_S = 5.0  # a longer one is the client's to make


class Upstream(Struct, frozen=True):
    """A backend as the runtime knows it."""

    backend: Backend
    timeouts: Timeouts
    dialect: Dialect = Dialect()


class Live(Struct, frozen=True):
    """An attempt that has begun to answer: its first events, and those to come."""

    backend: Backend
    attempt: Attempt
    held: list[Event]
    events: AsyncIterator[Event]
    failed: Callable[[BackendError], None]  # to be told when it breaks off after all


async def first_success(
    plan: Sequence[Target],
    upstreams: Mapping[str, Upstream],
    request: Callable[[Target, Attempt, Timeouts], ChatRequest],
    record: OpenRecord,
    health: Health,
    *,
    attempts: int | None = None,
    dice: Callable[[], float] = lambda: 1.0,
) -> Live:
    """The first target that generates. Raises the GatewayError that the last failure means.

    Each target once, in order, as far as its circuits let through. With `attempts` beyond that,
    those that failed and may have recovered are asked again, after a pause."""
    failure: BackendError | None = None
    waits_s: list[float] = []
    left = len(plan) if attempts is None else attempts
    turn, turns = plan, 0
    while True:
        again: list[Target] = []
        for target in turn:
            if left <= 0 or (failure is not None and record.remaining_s() <= 0):
                break
            if not health.begin(target):
                continue
            left -= 1
            upstream = upstreams[target.backend]
            attempt = record.attempt(
                backend=target.backend,
                provider=upstream.backend.provider,
                model=target.model,
                reason=_reason(failure, turns),
            )
            timeouts = within(upstream.timeouts, record.remaining_s())
            asked = request(target, attempt, timeouts)
            events = translate.ask(upstream.backend, upstream.dialect, asked)
            try:
                held = await _until_content(events, target.backend)
            except BackendError as error:
                fail(attempt, error, record.now_ns())
                if timeouts is not upstream.timeouts and _is_total(error):
                    health.gave_up(target)  # the request's life was short, not the backend slow
                elif isinstance(error, BackendCannot):
                    health.gave_up(target)  # it was not asked
                else:
                    health.failed(target, error)
                if not _may_go_elsewhere(error):
                    raise as_gateway_error(error) from error
                failure = error
                if error.retry_after_s is not None:
                    waits_s.append(error.retry_after_s)
                if _may_recover(error):
                    again.append(target)
            except BaseException:
                health.gave_up(target)
                await _close(events)
                raise
            else:
                if translate.is_asked(asked, upstream.dialect):
                    health.succeeded(target)
                else:
                    health.gave_up(target)  # the answer is ours
                failed = partial(health.failed, target)
                return Live(upstream.backend, attempt, held, events, failed)
        if attempts is None or left <= 0 or not again:
            break
        blocks = [health.blocked(target) for target in again]
        wait_s = pause_s(turns, min(0.0 if block is None else block[1] for block in blocks), dice())
        if wait_s > MAX_PAUSE_S or wait_s >= record.remaining_s():
            break
        await asyncio.sleep(wait_s)
        turn, turns = again, turns + 1
    if failure is None:
        raise _left_alone(plan, health)
    failure.retry_after_s = min(waits_s, default=None)  # the first that may be free again
    raise as_gateway_error(failure) from failure


def _reason(failure: BackendError | None, turns: int) -> AttemptReason:
    if turns:
        return "retry"
    return "primary" if failure is None else "fallback"


def pause_s(turns: int, wait_s: float, dice: float) -> float:
    """Seconds before those that failed are asked again: what they ask for, and at least a pause
    that doubles, with jitter, so that many who failed at once do not come back at once."""
    pause = max(wait_s, min(FIRST_PAUSE_S * (1 << turns), MAX_PAUSE_S))
    return pause * (1 + dice / 2) + _TIMER_S


def _left_alone(plan: Sequence[Target], health: Health) -> GatewayError:
    """Why nothing was tried: the target that may be asked again first says it."""
    blocks = [block for target in plan if (block := health.blocked(target)) is not None]
    fault, wait_s = min(blocks, key=lambda block: block[1], default=("endpoint", 1.0))
    wait_s = max(wait_s, 0.001)
    if fault == "limit":
        return UpstreamRateLimited(
            "The backend is at its rate limit. Retry after the time in Retry-After.",
            retry_after_s=wait_s,
        )
    why = "refuses our credential" if fault == "credential" else "keeps failing"
    return CircuitOpen(
        f"The backend {why} and is left alone for now. Retry after the time in Retry-After.",
        retry_after_s=wait_s,
    )


def _is_total(error: BackendError) -> bool:
    return isinstance(error, BackendTimeout) and error.phase == "total"


def _may_recover(error: BackendError) -> bool:
    """Whether the same target may do better soon. A timeout has had its time already, and a wrong
    key or an answer that is none will be so again."""
    match error:
        case BackendTooLate():
            return False  # with less time left it will be refused again
        case BackendTimeout():
            return error.phase == "connect"
        case BackendUnavailable() | BackendRateLimited() | BackendFailed() | BackendTruncated():
            return True
        case _:
            return False


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
        case BackendTooLate():
            return UpstreamRateLimited(
                "The backend is too busy to begin in time. Retry after the time in Retry-After.",
                retry_after_s=error.retry_after_s or 1.0,
            )
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
