"""`Idempotency-Key`: a request that is sent again gets the answer of the first, and is billed once.

The first request with a key is the one that runs; its answer is recorded as it is sent, and whoever
comes with the same key and body meanwhile or later follows the recording from its beginning. A
named request runs to its end even if its client leaves: naming it means that it may be asked for
again. An answer that failed on our side is not kept, so that sending it again tries again. Knows
ASGI messages, and of the pipeline only how to identify and to open a record. Invariants: keys are a
tenant's own, on its own surface; a replay settles a record of its own, without attempts or cost.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from litestar.types import Receive, Send

from gateway.api import problems
from gateway.api.shared_answers import Kept, Running, SharedAnswers
from gateway.api.voices import voice_of
from gateway.auth import Caller
from gateway.call import Call
from gateway.errors import BadRequest, GatewayError, IdempotencyMismatch
from gateway.limits import StoreGone
from gateway.pipeline import Gateway
from telemetry import trace_context
from telemetry.clock import Clock
from telemetry.record import Outcome

log = logging.getLogger(__name__)

HEADER = b"idempotency-key"
REPLAYED = b"idempotent-replayed"
REPLAY_OF = b"x-meterline-replay-of"
KEY_BYTES = 255
OWN_HEADERS = frozenset({b"x-request-id", b"x-meterline-cost-usd", b"openai-processing-ms"})
NOT_KEPT = frozenset({408, 409, 425, 429, 499})

Name = tuple[str, str, str]  # tenant, surface, key
Message = Any  # of ASGI


class Recording:
    """One answer as it is sent. `send` is what the pipeline's edge sends to."""

    def __init__(self, request_id: str, fingerprint: bytes, most: int) -> None:
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.expires_ns = 0
        self.messages: list[Message] = []
        self.size = 0
        self.is_over = False
        self.refusal: GatewayError | None = None  # why it never began
        self.task: asyncio.Task[None] | None = None
        self._most = most
        self._more = asyncio.Condition()
        self._readers: dict[object, int] = {}

    @property
    def is_too_large(self) -> bool:
        """To be kept: from here on only those who follow already get it, at their own pace."""
        return self.size > self._most

    @property
    def is_good(self) -> bool:
        """Over, whole, and not to be tried again."""
        if not self.is_over or not self.messages or self.is_too_large:
            return False
        status = self.messages[0]["status"]
        is_whole = not self.messages[-1].get("more_body", False) and len(self.messages) > 1
        return is_whole and status < 500 and status not in NOT_KEPT and not self._broke_off()

    def _broke_off(self) -> bool:
        """A stream that ended in an error event has status 200, and nobody wants it again."""
        kind = dict(self.messages[0]["headers"]).get(b"content-type", b"")
        last = self.messages[-1].get("body", b"")
        return kind.startswith(b"text/event-stream") and (
            b'"error"' in last[:64] or b"event: error" in last[:64]
        )

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.size += len(message.get("body", b""))
        async with self._more:
            self._more.notify_all()
            if self.is_too_large:
                await self._more.wait_for(self._all_have_read)
                for index in range(1, min(self._readers.values(), default=len(self.messages))):
                    self.messages[index] = {**self.messages[index], "body": b""}

    def _all_have_read(self) -> bool:
        return all(at >= len(self.messages) for at in self._readers.values())

    async def end(self) -> None:
        self.is_over = True
        async with self._more:
            self._more.notify_all()

    async def follow(self, take: Callable[[Message], Awaitable[None]]) -> None:
        """Every message from the first on, until the answer is over."""
        me, readers = object(), self._readers
        readers[me] = 0
        try:
            while True:
                async with self._more:
                    await self._more.wait_for(
                        lambda: readers[me] < len(self.messages) or self.is_over
                    )
                if readers[me] >= len(self.messages):
                    return
                await take(self.messages[readers[me]])
                readers[me] += 1
                if self.is_too_large:
                    async with self._more:
                        self._more.notify_all()
        finally:
            del self._readers[me]
            async with self._more:
                self._more.notify_all()


class Idempotency:
    """The recordings of this process, at most `most_bytes` of finished ones for at most `ttl_s`.

    Plain counters: `replayed`, `mismatched`."""

    def __init__(
        self, clock: Clock, *, ttl_s: float, most_bytes: int, shared: SharedAnswers | None = None
    ) -> None:
        """`shared`: where replicas find each other's."""
        self.shared = shared
        self.replayed = 0
        self.mismatched = 0
        self._clock = clock
        self._ttl_ns = round(ttl_s * 1e9)
        self._most_bytes = most_bytes
        self._known: OrderedDict[Name, Recording] = OrderedDict()
        self._bytes = 0

    async def aclose(self) -> None:
        """End what still runs for clients that left: each tells who follows, and settles."""
        tasks = [recording.task for recording in self._known.values() if recording.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, name: Name) -> Recording | None:
        found = self._known.get(name)
        if found is not None and found.is_too_large:
            return None
        if found is not None and found.is_over and found.expires_ns <= self._clock.monotonic_ns():
            self._forget(name, found)
            return None
        return found

    def begin(self, name: Name, request_id: str, fingerprint: bytes) -> Recording:
        recording = Recording(request_id, fingerprint, self._most_bytes // 8)
        self._known[name] = recording
        return recording

    async def run(
        self, name: Name, recording: Recording, work: Coroutine[Any, Any, None], *, claimed: bool
    ) -> None:
        """The first request's work, to its end. `claimed`: replicas wait for what comes of it."""
        renewing = None
        if claimed and self.shared is not None:
            renewing = asyncio.get_running_loop().create_task(self.shared.renew(name))
        try:
            await work
        finally:
            recording.task = None
            if renewing is not None:
                renewing.cancel()
            await self.over(name, recording)
            if claimed:
                await self._publish(name, recording)

    async def over(self, name: Name, recording: Recording) -> None:
        """Nothing more comes; keep it if it is worth it."""
        await recording.end()
        if self._known.get(name) is recording:
            self._keep(name, recording)

    async def elsewhere(self, name: Name, recording: Recording, wait_s: float) -> bool | None:
        """Ask the replicas. True: it was answered there, and the recording has it; False: it is
        claimed, and ours to run; None: they cannot be asked. Raises IdempotencyMismatch."""
        if self.shared is None:
            return None
        mine = Running(recording.request_id, recording.fingerprint)
        try:
            found = await self.shared.claim(name, mine, wait_s)
        except StoreGone:
            return None
        if found is None:
            return False
        if isinstance(found, Running) or found.fingerprint != recording.fingerprint:
            recording.refusal = IdempotencyMismatch(_OTHER_BODY)
            await self.over(name, recording)
            raise recording.refusal
        status, headers = found.start
        recording.request_id = found.request_id
        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await recording.send(start)
        for number, part in enumerate(found.parts, 1):
            more = number < len(found.parts)
            await recording.send({"type": "http.response.body", "body": part, "more_body": more})
        await self.over(name, recording)
        return True

    async def _publish(self, name: Name, recording: Recording) -> None:
        assert self.shared is not None
        try:
            if not recording.is_good:
                await self.shared.release(name)
                return
            first, *rest = recording.messages
            kept = Kept(
                recording.request_id,
                recording.fingerprint,
                (first["status"], tuple(first["headers"])),
                tuple(message.get("body", b"") for message in rest),
            )
            await self.shared.keep(name, kept)
        except StoreGone:
            log.warning("idempotent answer not shared")

    def _keep(self, name: Name, recording: Recording) -> None:
        if not recording.is_good:
            del self._known[name]
            return
        recording.expires_ns = self._clock.monotonic_ns() + self._ttl_ns
        self._known.move_to_end(name)
        self._bytes += recording.size
        for old, kept in list(self._known.items()):
            if self._bytes <= self._most_bytes:
                break
            if kept.is_over:
                self._forget(old, kept)

    def _forget(self, name: Name, recording: Recording) -> None:
        del self._known[name]
        self._bytes -= recording.size


def key_of(call: Call) -> str | None:
    """The header as it was sent. Raises BadRequest for one that cannot be a key."""
    for name, value in call.headers:
        if name == HEADER:
            text = value.decode("latin-1")
            if not text or len(value) > KEY_BYTES or not (text.isascii() and text.isprintable()):
                raise BadRequest(_RULE, param="Idempotency-Key")
            return text
    return None


def has_key(call: Call) -> bool:
    return any(name == HEADER for name, _ in call.headers)


async def serve(
    gateway: Gateway,
    idempotency: Idempotency,
    call: Call,
    receive: Receive,
    send: Send,
    work: Callable[[Send], Coroutine[Any, Any, None]],
) -> None:
    """Answer a named request. `work` answers it as if it had no name, to what it is given."""
    try:
        if call.fault is not None:
            raise call.fault
        key = key_of(call)
        caller = await gateway.auth.identify(call.credential())
    except GatewayError:
        if call.fault is None and _is_malformed(call):
            await _refuse(gateway, call, None, send, BadRequest(_RULE, param="Idempotency-Key"))
        else:  # refused as any other: recorded, counted, told
            await work(send)
        return
    assert key is not None
    name = (caller.tenant_id, call.surface, key)
    fingerprint = hashlib.sha256(call.body).digest()
    recording = idempotency.find(name)
    if recording is None:
        recording = idempotency.begin(name, call.request_id, fingerprint)
        wait_s = gateway.runtimes.current.config.server.request_timeout_s
        try:
            was_answered = await idempotency.elsewhere(name, recording, wait_s)
        except IdempotencyMismatch as error:
            await _refuse(gateway, call, caller, send, error)
            return
        except BaseException:
            await idempotency.over(name, recording)
            raise
        if was_answered:
            idempotency.replayed += 1
            await _replay(gateway, call, caller, recording, receive, send)
            return
        claimed = was_answered is False
        recording.task = asyncio.get_running_loop().create_task(
            idempotency.run(name, recording, work(recording.send), claimed=claimed)
        )
        await _while_there(recording.follow(send), receive)
    elif recording.fingerprint != fingerprint:
        idempotency.mismatched += 1
        await _refuse(gateway, call, caller, send, IdempotencyMismatch(_OTHER_BODY))
    else:
        idempotency.replayed += 1
        await _replay(gateway, call, caller, recording, receive, send)


_RULE = f"Idempotency-Key must be 1 to {KEY_BYTES} printable ASCII characters."
_OTHER_BODY = (
    "This Idempotency-Key was used with another request body. Use a new key for a new request."
)


def _is_malformed(call: Call) -> bool:
    try:
        key_of(call)
    except BadRequest:
        return True
    return False


async def _replay(
    gateway: Gateway,
    call: Call,
    caller: Caller,
    recording: Recording,
    receive: Receive,
    send: Send,
) -> None:
    """The answer of the first request, as an answer to this one."""
    status: list[int] = []

    async def take(message: Message) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
            kept = [pair for pair in message["headers"] if pair[0] not in OWN_HEADERS]
            own = [
                (b"x-request-id", call.request_id.encode()),
                (REPLAYED, b"true"),
                (REPLAY_OF, recording.request_id.encode()),
            ]
            message = {**message, "headers": [*kept, *own]}
        await send(message)

    outcome: Outcome | None = Outcome.CLIENT_DISCONNECT
    try:
        if await _while_there(recording.follow(take), receive):
            if recording.refusal is not None:  # it never began, and neither does this one
                outcome = None
                await _refuse(gateway, call, caller, send, recording.refusal)
                return
            is_ok = bool(status) and status[0] < 400 and recording.is_good
            outcome = Outcome.OK if is_ok else Outcome.CLIENT_ERROR
    finally:
        if outcome is not None:
            code = None if outcome is Outcome.OK else "replayed_failure"
            _record(gateway, call, caller, outcome, status[0] if status else None, code)


async def _refuse(
    gateway: Gateway, call: Call, caller: Caller | None, send: Send, error: GatewayError
) -> None:
    _record(gateway, call, caller, error.outcome, error.status, error.code)
    voice = voice_of(call.surface)
    await problems.send_problem(
        send,
        error,
        call.request_id,
        close=False,
        more={n.decode(): v.decode() for n, v in voice.headers(call.request_id)},
        content=voice.problem(error, call.request_id),
    )


def _record(
    gateway: Gateway,
    call: Call,
    caller: Caller | None,
    outcome: Outcome,
    status: int | None,
    code: str | None,
) -> None:
    """One settled record for a request that nothing was spent on."""
    runtime = gateway.runtimes.current
    record = gateway.ledger.open(
        request_id=call.request_id,
        surface=call.surface,
        trace=trace_context.read(call.traceparent, sample_root=True),
        deadline_s=runtime.config.server.request_timeout_s,
        client_request_id=call.client_request_id,
    )
    if caller is not None:
        record.data.tenant_id, record.data.key_id = caller.tenant_id, caller.key_id
    record.close(outcome=outcome, status=status, error_code=code)


async def _while_there(following: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Follow until the end, or until this client leaves, which ends nothing but its own following.
    Whether it was there to the end."""
    task = asyncio.get_running_loop().create_task(following)
    leaving = asyncio.get_running_loop().create_task(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        # Both at once: the end of an answer is said to be a disconnect, too.
        await asyncio.wait((task,), timeout=0)
        return task.done() and not task.cancelled() and task.exception() is None
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
