"""The routes that a model answers: chat, completions, embeddings, responses, messages.

They are plain ASGI below the framework: the answer's scope must close whatever the socket does,
and a streamed chunk passes here thousands of times a second.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from litestar import asgi
from litestar.types import Receive, Scope, Send

from backends.base import BackendError, Chunk, Final, Whole
from gateway.answer import Answer
from gateway.api import bodies, idempotency, problems
from gateway.api.voices import Voice, voice_of
from gateway.auth import read_credential
from gateway.call import Call, Presence
from gateway.dispatch import as_gateway_error
from gateway.errors import (
    ClientGone,
    Draining,
    GatewayError,
    Internal,
    MethodNotAllowed,
)
from gateway.pipeline import Gateway
from gateway.stopping import REPORT_S
from telemetry.ids import RequestId, new_request_id
from telemetry.money import plain
from telemetry.record import Surface

log = logging.getLogger(__name__)

Headers = Mapping[bytes, bytes]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
    *problems.COMMON_HEADERS,
]
WHOLE_HEADERS = [(b"content-type", b"application/json"), *problems.COMMON_HEADERS]
CLIENT_REQUEST_ID_LIMIT = 128
VENDOR_HEADERS = (b"anthropic-version", b"anthropic-beta")
VENDOR_HEADER_LIMIT = 1_000
_ANTHROPIC = frozenset({"messages", "count_tokens"})


@asgi(["/v1/chat/completions", "/chat/completions"], opt={"caller": "tenant"}, copy_scope=False)
async def chat(scope: Scope, receive: Receive, send: Send) -> None:
    """Chat completions, whole and streamed. Caller: a tenant's key."""
    await serve(scope, receive, send, "chat")


@asgi(["/v1/completions", "/completions"], opt={"caller": "tenant"}, copy_scope=False)
async def completions(scope: Scope, receive: Receive, send: Send) -> None:
    """Text completions, whole and streamed. Caller: a tenant's key."""
    await serve(scope, receive, send, "completions")


@asgi(["/v1/embeddings", "/embeddings"], opt={"caller": "tenant"}, copy_scope=False)
async def embeddings(scope: Scope, receive: Receive, send: Send) -> None:
    """Embeddings of texts or token ids. Caller: a tenant's key."""
    await serve(scope, receive, send, "embeddings")


@asgi(["/v1/responses", "/responses"], opt={"caller": "tenant"}, copy_scope=False)
async def responses(scope: Scope, receive: Receive, send: Send) -> None:
    """OpenAI's responses, whole and streamed. Caller: a tenant's key."""
    await serve(scope, receive, send, "responses")


@asgi("/v1/messages", opt={"caller": "tenant"}, copy_scope=False)
async def messages(scope: Scope, receive: Receive, send: Send) -> None:
    """Anthropic's messages, whole and streamed. Caller: a tenant's key."""
    await serve(scope, receive, send, "messages")


@asgi("/v1/messages/count_tokens", opt={"caller": "tenant"}, copy_scope=False)
async def count_tokens(scope: Scope, receive: Receive, send: Send) -> None:
    """How many tokens a message would have as input. Caller: a tenant's key."""
    await serve(scope, receive, send, "count_tokens")


async def serve(scope: Scope, receive: Receive, send: Send, surface: Surface) -> None:
    """Read the request, let the pipeline answer it, render whatever comes of it."""
    gateway: Gateway = scope["litestar_app"].state.gateway
    request_id = new_request_id()
    if scope.get("method") != "POST":
        error = MethodNotAllowed("Use POST.", allowed=["POST"])
        await _Sending(send, voice_of(surface)).problem(error, request_id, close=False)
        return
    call = await _read(gateway, scope["headers"], receive, surface, request_id)
    if idempotency.has_key(call):
        await idempotency.serve(
            gateway,
            scope["litestar_app"].state.idempotency,
            call,
            receive,
            send,
            lambda to: _answer(gateway, call, _Sending(to, voice_of(surface))),
        )
        return
    sending = _Sending(send, voice_of(surface))
    await _while_connected(_answer(gateway, call, sending), receive, call.presence, sending)


async def _answer(gateway: Gateway, call: Call, sending: "_Sending") -> None:
    """The whole life of a request that was read. Settles it, and raises nothing."""
    try:
        answer = await gateway.complete(call)
        if answer.asked.stream:
            await _stream(answer, sending, gateway)
        else:
            await _whole(answer, sending, gateway)
    except ClientGone:
        pass  # settled; there is no one left to answer
    except GatewayError as error:
        if sending.started:
            await _end_in_band(sending, error, call.request_id)
        else:
            close, more = call.fault is not None, call.answer_headers
            await sending.problem(error, call.request_id, close=close, more=more)
    except asyncio.CancelledError:
        # Settled already. The client has left; or we were told to stop, by the server that is
        # shutting down: then what is left is to say so, and this task ends as it was told to.
        if not call.presence.gone:
            shutdown = Draining("The gateway is shutting down. Retry the request.")
            await _tell(sending, shutdown, call.request_id)
    except Exception:
        log.exception("request_failed", extra={"request_id": call.request_id})
        await _tell(sending, Internal(problems.OUR_SIDE), call.request_id)
    finally:
        sending.stop_pings()


async def _tell(sending: "_Sending", error: GatewayError, request_id: str) -> None:
    """The error, in the form that is still possible: a status before the head, an event after."""
    if sending.started:
        await _end_in_band(sending, error, request_id)
    else:
        await sending.problem(error, request_id, close=True)


class _Sending:
    """Whether the head has gone out: before it an error has a status, after it an event. And
    whether the answer is out to its end: then a client that leaves leaves nothing undone."""

    __slots__ = ("_pinging", "_timer", "ended", "send", "sent", "started", "streams", "voice")

    def __init__(self, send: Send, voice: Voice) -> None:
        self.send = send
        self.voice = voice
        self.started = False
        self.streams = False
        self.ended = False
        self.sent = 0  # events
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def head(self, status: int, headers: list[tuple[bytes, bytes]], *, streams: bool) -> None:
        self.started = True
        self.streams = streams
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def problem(
        self,
        error: GatewayError,
        request_id: str,
        *,
        close: bool,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.started = self.ended = True
        extra = {name.decode(): value.decode() for name, value in self.voice.headers(request_id)}
        content = self.voice.problem(error, request_id)
        await problems.send_problem(
            self.send,
            error,
            request_id,
            close=close,
            more={**(more or {}), **extra},
            content=content,
        )

    async def body(self, data: bytes, *, more: bool) -> None:
        self.sent += 1
        if not more:
            self.ended = True
            self.stop_pings()
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    def ping_when_silent(self, every_s: float) -> None:
        """From now on send a comment whenever nothing was sent for so long: proxies and clients
        give up on a connection that says nothing. A stream that never pauses has no task for it."""
        if every_s <= 0:
            return
        loop = asyncio.get_running_loop()

        def begin(sent: int) -> None:
            if self.sent != sent:
                self._timer = loop.call_later(every_s, begin, self.sent)
            elif not self.ended:
                self._pinging = loop.create_task(self._ping(every_s))

        self._timer = loop.call_later(every_s, begin, self.sent)

    async def _ping(self, every_s: float) -> None:
        ping: Any = {"type": "http.response.body", "body": self.voice.ping, "more_body": True}
        with contextlib.suppress(OSError):  # the client has left: who waits for that hears of it
            while True:
                sent = self.sent
                await self.send(ping)
                await asyncio.sleep(every_s)
                while self.sent != sent:
                    sent = self.sent
                    await asyncio.sleep(every_s)

    def stop_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()


async def _read(
    gateway: Gateway,
    raw: Iterable[tuple[bytes, bytes]],
    receive: Receive,
    surface: Surface,
    request_id: RequestId,
) -> Call:
    """The request as a Call. A body that cannot be taken is a fault that the pipeline raises once
    it knows whose request it is, so that it is recorded like any other refusal."""
    headers = dict(raw)
    server = gateway.runtimes.current.config.server
    body, fault = b"", None
    try:
        body = await bodies.read(
            headers,
            receive,
            server.max_body_mb * 1_000_000,
            server.body_timeout_s,
            lambda: gateway.auth.identify(read_credential(raw)),
        )
    except GatewayError as error:
        fault = error
    return Call(
        request_id=request_id,
        surface=surface,
        body=body,
        fault=fault,
        headers=tuple(raw),
        presence=Presence(),
        traceparent=_text(headers, b"traceparent"),
        client_request_id=_text(headers, b"x-client-request-id", CLIENT_REQUEST_ID_LIMIT),
        vendor_headers=_vendor_headers(headers) if surface in _ANTHROPIC else (),
    )


def _vendor_headers(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """What a vendor's client says to the vendor, and nothing else that it sends."""
    found = ((name, _text(headers, name, VENDOR_HEADER_LIMIT)) for name in VENDOR_HEADERS)
    return tuple((name, value.encode()) for name, value in found if value)


def _text(headers: Headers, name: bytes, limit: int = 256) -> str | None:
    """A header as printable ASCII of bounded length; anything else is as if it was not sent."""
    value = headers.get(name)
    if value is None or len(value) > limit or not value.isascii():
        return None
    text = value.decode()
    return text if text.isprintable() else None


async def _while_connected(
    work: Coroutine[Any, Any, None], receive: Receive, presence: Presence, sending: _Sending
) -> None:
    """Run `work` to its end, in a task of its own: each step of a task walks all that awaits below
    it, and a stream's steps are many. Meanwhile this task waits for the client to leave. Then, if
    the backend can be asked to stop, `work` ends by itself with the backend's report; else, or when
    that takes too long, it sees an ordinary cancellation, and `presence.gone` says why."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.sleep(0)  # it begins, so that a cancellation finds it inside its scopes
        await _until_left_or_done(receive, task, sending)
        if not task.done() and not sending.ended:
            presence.gone = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    if await presence.ask_to_stop():
                        await asyncio.wait((task,))
            task.cancel()
        await task
    except asyncio.CancelledError:
        # Told to stop ourselves, by the server that is shutting down. So is the answer, which
        # settles and says so; then this task ends as it was told to, and has nothing to report.
        task.cancel()
        await asyncio.wait((task,))


async def _until_left_or_done(
    receive: Receive, task: "asyncio.Task[None]", sending: _Sending
) -> None:
    """Return when the client has left or the answer is out: ASGI says `http.disconnect` for both.
    For work that ends and leaves its answer unfinished nothing is said: then `task` says it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as waiting:

            def done(_: object) -> None:
                if not sending.ended and not is_over:
                    waiting.reschedule(asyncio.get_running_loop().time())

            is_over = False
            task.add_done_callback(done)
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:
                is_over = True


async def _whole(answer: Answer, sending: _Sending, gateway: Gateway) -> None:
    """Settle, then send: the cost is a header, so it must be known before the first byte."""
    data = b""
    try:
        async with answer:
            async for event in answer.events():
                if isinstance(event, Whole):
                    data = event.data
    except BackendError as error:
        raise as_gateway_error(error) from error
    if answer.asked.stores:
        await gateway.remember(answer, data)
    headers = [*WHOLE_HEADERS, *_answer_headers(answer, sending.voice)]
    headers.append((b"content-length", str(len(data)).encode()))
    cost = answer.record.data.cost
    if cost is not None:
        headers.append((b"x-meterline-cost-usd", plain(cost).encode()))
    await sending.head(200, headers, streams=False)
    await sending.body(data, more=False)


async def _stream(answer: Answer, sending: _Sending, gateway: Gateway) -> None:
    """Forward each event as it comes. `[DONE]` only after a complete answer; a broken one ends
    with an error event and without it, so that it can never be taken for a whole one."""
    voice, end = sending.voice, None
    framed = voice.event
    try:
        async with answer:
            await sending.head(
                200, [*STREAM_HEADERS, *_answer_headers(answer, voice)], streams=True
            )
            sending.ping_when_silent(gateway.runtimes.current.config.server.ping_s)
            async for event in answer.events():
                if isinstance(event, Chunk):
                    await sending.body(framed(event), more=True)
                elif isinstance(event, Final):
                    end = event
                    if answer.asked.include_usage and event.usage_chunk is not None:
                        await sending.body(framed(Chunk(event.usage_chunk)), more=True)
    except BackendError as error:
        await _end_in_band(sending, as_gateway_error(error), answer.call.request_id)
    else:
        if answer.asked.stores and end is not None and end.last is not None:
            await gateway.remember(answer, voice.response(end.last))
        await sending.body(voice.last(end), more=False)


async def _end_in_band(sending: _Sending, error: GatewayError, request_id: str) -> None:
    """The end of a stream that broke: an error event, then the close, and no `[DONE]`."""
    if sending.streams:
        sending.streams = False
        await sending.body(sending.voice.error(error, request_id, sending.sent), more=False)


def _answer_headers(answer: Answer, voice: Voice) -> list[tuple[bytes, bytes]]:
    data = answer.record.data
    elapsed_ms = (answer.record.now_ns() - data.opened_ns) / 1e6
    overhead_ms = elapsed_ms - answer.upstream_ms
    return [
        (b"x-request-id", data.request_id.encode()),
        *voice.headers(data.request_id),
        (b"openai-processing-ms", str(round(elapsed_ms)).encode()),
        (b"x-meterline-overhead-ms", f"{overhead_ms:.3f}".encode()),
        *((name.encode(), value.encode()) for name, value in answer.headers.items()),
        *((name.encode(), value.encode()) for name, value in answer.call.answer_headers.items()),
    ]
