"""Walk the plan until an attempt has generated something. Retries and fallback live only here,
within one budget of attempts and one deadline.

The promise to the client is made at the first *content*: before it another target may be tried,
after it never, so an error inside the first events still falls back and no text is sent twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Self

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
from backends.fleet import Server
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
from gateway.health import Fault, Health, fault_of
from gateway.hedging import Hedge
from gateway.routing import Target
from gateway.upstreams import Place, Upstream
from telemetry.ledger import OpenRecord
from telemetry.record import Attempt, AttemptReason, Outcome
from telemetry.usage import Usage, UsageQuality, UsageSource

# What may be held back while waiting for content. More is not a preamble but a defect.
HELD_EVENTS = 64
MAX_PLACES = 3  # servers and keys of one target that one request tries
HEDGE_LOST = "hedge_lost"  # the attempt's code, where a rival had content first
FIRST_PAUSE_S = 0.1  # before a second turn
_TIMER_S = 0.002  # timers may fire that much too early, and a circuit is exact
MAX_PAUSE_S = 5.0  # a longer one is the client's to make


def _nothing() -> None:
    return None


class Live(Struct, frozen=True):
    """An attempt that has begun to answer: its first events, and those to come."""

    backend: Backend
    attempt: Attempt
    held: list[Event]
    events: AsyncIterator[Event]
    failed: Callable[[BackendError], None]  # to be told when it breaks off after all
    release: Callable[[], None] = _nothing  # to be told when it is over, once


Ask = Callable[[Target, Attempt, Timeouts], ChatRequest]


async def first_success(
    plan: Sequence[Target],
    upstreams: Mapping[str, Upstream],
    request: Ask,
    record: OpenRecord,
    health: Health,
    *,
    attempts: int | None = None,
    dice: Callable[[], float] = lambda: 1.0,
    hedge: Hedge | None = None,
) -> Live:
    """The first target that generates. Raises the GatewayError that the last failure means.

    Each target once, in order, as far as its circuits let through, and on others of its servers
    and keys where it has several. With `attempts` beyond that, those that failed and may have
    recovered are asked again, after a pause. With a `hedge`, one that is slow gets a rival."""
    walk = _Walk(upstreams, request, record, health, attempts, dice)
    if hedge is not None:
        walk.hedges(hedge, plan)
    turn, turns = plan, 0
    while True:
        again: list[Target] = []
        for target in turn:
            live = await walk.ask(target, again, is_again=turns > 0)
            if live is not None:
                if hedge is not None:
                    first = record.data.attempts[0]  # where a rival won, it would have taken longer
                    hedge.observe((record.now_ns() - first.started_ns) / 1e9)
                return live
        if attempts is None or not walk.goes_on or not again:
            break
        wait_s = pause_s(turns, walk.wait_s(again), dice())
        if wait_s > MAX_PAUSE_S or wait_s >= record.remaining_s():
            break
        await asyncio.sleep(wait_s)
        turn, turns = again, turns + 1
    failure = walk.failure
    if failure is None:
        raise _left_alone([one for target in plan for one in walk.targets(target)], health)
    failure.retry_after_s = min(walk.waits_s, default=None)  # the first that may be free again
    raise as_gateway_error(failure) from failure


class _Walk:
    """One request on its way through the plan: what it has left, and what has failed so far."""

    __slots__ = (
        *("_dice", "_health", "_hedge", "_left", "_plan", "_record", "_request", "_upstreams"),
        *("_rival_failed", "failure", "waits_s"),
    )

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        request: Ask,
        record: OpenRecord,
        health: Health,
        attempts: int | None,
        dice: Callable[[], float],
    ) -> None:
        self.failure: BackendError | None = None
        self.waits_s: list[float] = []
        self._upstreams = upstreams
        self._request = request
        self._record = record
        self._health = health
        self._left = attempts
        self._dice = dice
        self._hedge: Hedge | None = None
        self._rival_failed: list[tuple[Place, Fault]] = []
        self._plan: Sequence[Target] = ()

    def hedges(self, hedge: Hedge, plan: Sequence[Target]) -> None:
        """The first attempt may get a rival, from elsewhere in the plan."""
        self._hedge, self._plan = hedge, plan

    @property
    def goes_on(self) -> bool:
        """Whether there is an attempt and time left for it."""
        if self._left is not None and self._left <= 0:
            return False
        return self.failure is None or self._record.remaining_s() > 0

    def targets(self, target: Target) -> Sequence[Target]:
        """Its servers and keys, as health speaks of them."""
        return [place.target for place in self._upstreams[target.backend].places(target)]

    def wait_s(self, targets: Sequence[Target]) -> float:
        """Seconds until the first of them may be asked."""
        blocks = [self._health.blocked(one) for target in targets for one in self.targets(target)]
        return min((0.0 if block is None else block[1] for block in blocks), default=0.0)

    async def ask(self, target: Target, again: list[Target], *, is_again: bool) -> Live | None:
        """The answer of one target, from the first of its places that gives one, each asked once.
        None: it has none. What may do better soon goes into `again`."""
        upstream = self._upstreams[target.backend]
        failed = [
            item
            for item in self._rival_failed
            if item[0].target.backend == target.backend and not is_again
        ]
        while self.goes_on and len(failed) < MAX_PLACES:
            place = upstream.choose(target, self._health, failed, self._dice())
            if place is None:
                return None
            hedge, self._hedge = self._hedge, None  # one rival for a request
            try:
                reason = _reason(self.failure, is_again=is_again or bool(failed))
                if hedge is None:
                    return await self._attempt(upstream, place, reason)
                return await self._raced(hedge, upstream, place, reason)
            except BackendError as error:
                if not _may_go_elsewhere(error):
                    raise as_gateway_error(error) from error
                self.failure = error
                if error.retry_after_s is not None:
                    self.waits_s.append(error.retry_after_s)
                if target not in again and _may_recover(error):
                    again.append(target)
                fault = None if isinstance(error, BackendCannot) else fault_of(error)
                if fault is None:  # what is missing there is so on all servers of it
                    return None
                failed.append((place, fault))
        return None

    async def _raced(
        self, hedge: Hedge, upstream: Upstream, place: Place, reason: AttemptReason
    ) -> Live:
        """The attempt; if it has no content after the route's usual time, one more elsewhere at the
        same time, and the first to have content wins. Raises what the first one failed of."""
        data = self._record.data
        tokens = data.input_estimate + (data.output_limit or 0)
        hedge.asked(tokens)
        delay_s = hedge.delay_s()
        async with _Race(self._record) as race:
            first = race.start(self._attempt(upstream, place, reason))
            if delay_s is not None and not await race.any_done(delay_s):
                rival = self._rival(place)
                if rival is not None:
                    if hedge.may_spend(tokens):
                        return await self._decided(hedge, race, first, rival)
                    self._health.gave_up(rival.target)
            return await first

    async def _decided(
        self, hedge: Hedge, race: "_Race", first: "asyncio.Task[Live]", rival: Place
    ) -> Live:
        second = race.start(self._attempt(self._upstreams[rival.target.backend], rival, "hedge"))
        winner = await race.winner()
        if winner is None:
            hedge.ended("failed")
            self._rival_failed.append((rival, "endpoint"))
            return await first  # raises: its failure is what the walk goes on from
        hedge.ended("won" if winner is second else "lost")
        return await winner

    def _rival(self, place: Place) -> Place | None:
        """Another place that may be asked now: another server of the target, or another target."""
        if not self.goes_on:
            return None
        others = [target for target in self._plan if target.backend != place.target.backend]
        same = [target for target in self._plan if target.backend == place.target.backend]
        for target in (*same, *others):
            upstream = self._upstreams[target.backend]
            taken: list[tuple[Place, Fault]] = [(place, "endpoint")] if target in same else []
            found = upstream.choose(target, self._health, taken, self._dice())
            if found is not None:
                return found
        return None

    async def _attempt(self, upstream: Upstream, place: Place, reason: AttemptReason) -> Live:
        """One try: a row, whatever becomes of it."""
        record, health = self._record, self._health
        if self._left is not None:
            self._left -= 1
        backend, target, server = place.member.backend, place.target, place.member.server
        attempt = record.attempt(
            backend=target.backend,
            provider=backend.provider,
            model=target.model,
            reason=reason,
        )
        attempt.endpoint = target.endpoint or None
        timeouts = within(upstream.timeouts, record.remaining_s())
        server.in_flight += 1
        asked = self._request(target, attempt, timeouts)
        events = translate.ask(backend, upstream.dialect, asked)
        try:
            held = await _until_content(events, target.backend)
        except BackendError as error:
            server.in_flight -= 1
            fail(attempt, error, record.now_ns())
            if timeouts is not upstream.timeouts and _is_total(error):
                health.gave_up(target)  # the request's life was short, not the backend slow
            elif isinstance(error, BackendCannot):
                health.gave_up(target)  # it was not asked
            else:
                health.failed(target, error)
            raise
        except BaseException:
            server.in_flight -= 1
            health.gave_up(target)
            attempt.ended_ns = record.now_ns()
            await _close(events)
            raise
        if translate.is_asked(asked, upstream.dialect):
            health.succeeded(target)
        else:
            health.gave_up(target)  # the answer is ours
        return Live(
            backend, attempt, held, events, partial(health.failed, target), partial(_free, server)
        )


class _Race:
    """Attempts that run at the same time; those that lost are cancelled when the scope is left, and
    what a rival lost costs is written down."""

    def __init__(self, record: OpenRecord) -> None:
        self._record = record
        self._tasks: list[asyncio.Task[Live]] = []
        self._winner: asyncio.Task[Live] | None = None

    async def __aenter__(self) -> Self:
        return self

    def start(self, attempt: Coroutine[Any, Any, Live]) -> "asyncio.Task[Live]":
        task = asyncio.get_running_loop().create_task(attempt)
        self._tasks.append(task)
        return task

    async def any_done(self, within_s: float) -> bool:
        done, _ = await asyncio.wait(self._tasks, timeout=within_s)
        return bool(done)

    async def winner(self) -> "asyncio.Task[Live] | None":
        """The first that has content; None: none of them ever will."""
        running = set(self._tasks)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:  # in order: of two at once the first asked
                if task in done and task.exception() is None:
                    self._winner = task
                    return task
        return None

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        kept = None if kind is not None else self._winner or self._tasks[0]
        losers = [task for task in self._tasks if task is not kept or not task.done()]
        for task in losers:
            task.cancel()
        for ended in await asyncio.gather(*losers, return_exceptions=True):
            if isinstance(ended, Live):  # it had content as well, a moment later
                ended.release()
                await _close(ended.events)
        if self._winner is not None:
            _book_losers(self._record, self._winner.result().attempt)


def _book_losers(record: OpenRecord, winner: Attempt) -> None:
    """Whoever was asked and not waited for may have read the prompt: that much is estimated."""
    for attempt in record.data.attempts:
        if attempt is winner or attempt.outcome is not None:
            continue
        attempt.ended_ns = attempt.ended_ns or record.now_ns()
        attempt.outcome, attempt.error_code = Outcome.CLIENT_DISCONNECT, HEDGE_LOST
        attempt.usage = Usage(in_uncached_text=record.data.input_estimate)
        attempt.usage_source = UsageSource.ESTIMATED
        attempt.usage_quality = UsageQuality.AMBIGUOUS


def _free(server: Server) -> None:
    server.in_flight -= 1


def _reason(failure: BackendError | None, *, is_again: bool) -> AttemptReason:
    if is_again:
        return "retry"
    return "primary" if failure is None else "fallback"


def pause_s(turns: int, wait_s: float, dice: float) -> float:
    """Seconds before those that failed are asked again: what they ask for, and at least a pause
    that doubles, with jitter, so that many who failed at once do not come back at once."""
    pause = max(wait_s, min(FIRST_PAUSE_S * (1 << turns), MAX_PAUSE_S))
    return pause * (1 + dice / 2) + _TIMER_S


_WHY: dict[str, str] = {
    "endpoint": "keeps failing and is left alone for now",
    "credential": "refuses our credential and is left alone for now",
    "drained": "is being drained and takes no new requests",
    "down": "says that it is not ready",
    "empty": "has no server now",
}


def _left_alone(plan: Sequence[Target], health: Health) -> GatewayError:
    """Why nothing was tried: the target that may be asked again first says it."""
    blocks = [block for target in plan if (block := health.blocked(target)) is not None]
    fault, wait_s = min(blocks, key=lambda block: block[1], default=("empty", 1.0))
    wait_s = max(wait_s, 0.001)
    if fault == "limit":
        return UpstreamRateLimited(
            "The backend is at its rate limit. Retry after the time in Retry-After.",
            retry_after_s=wait_s,
        )
    why = _WHY[fault]
    return CircuitOpen(
        f"The backend {why}. Retry after the time in Retry-After.",
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
