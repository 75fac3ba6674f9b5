"""The engine as an OpenAI-compatible server: a plain ASGI app over one `Engine`.

The only file that knows HTTP. An error before the first output is a status; after it, an SSE
event with an `error` key and no [DONE]. A client that goes away cancels its job, streamed or not;
one that wants to know what was computed until then asks for that by its request id, and its answer
ends early but properly: finish reason `cancelled`, usage, [DONE].
"""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec import Struct, structs
from prometheus_client.core import Metric as Family

from backends.engine import embed
from backends.engine.engine import Engine, State, Stream
from backends.engine.errors import EngineError, NotReady, Overloaded, RequestInvalid, TooLate
from backends.engine.guided import Guides
from backends.engine.metrics import CONTENT_TYPE, EngineMetrics
from backends.engine.progress import Loading
from backends.engine.render import Renderer, embed_usage
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Cancelled, Delta, Done, Failed, JobUsage, Vector
from backends.engine.wire import Ask, Parser, Surface
from backends.wire import DEADLINE_HEADER, DEADLINE_UNREACHABLE
from telemetry.clock import Clock
from telemetry.ids import new_request_id

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

MAX_BODY_BYTES = 32 * 1024 * 1024
_OFF_LOOP_BYTES = 16 * 1024  # bodies from here on are tokenised in a thread
_JSON = b"application/json"
_DEADLINES = (  # header, its units per second
    (DEADLINE_HEADER, 1000),
    (b"x-stainless-read-timeout", 1),
    (b"x-stainless-timeout", 1),
)


class ServedModel(Struct, frozen=True):
    name: str
    fingerprint: str
    context: int
    created: int


class _Problem(Exception):
    """What the client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # 503: loading, full or draining: soon over, one way or the other
        self.retry_after_s = 1.0 if status == 503 else retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Running:
    """A request under its client's id: what can be told to stop, from before it is parsed."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._is_told = False

    def began(self, stream: Stream) -> None:
        self._stream = stream
        if self._is_told:
            stream.finish()

    def finish(self) -> None:
        self._is_told = True
        if self._stream is not None:
            self._stream.finish()


class _Gone(Exception):
    """The client went away: there is nobody to answer."""


class EngineApp:
    """Routes: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/requests/{id}/cancel,
    /tokenize, /detokenize, /v1/models[/{id}], /health, /metrics."""

    def __init__(
        self,
        engine: Engine,
        parser: Parser,
        tokenizer: Tokenizer,
        model: ServedModel,
        clock: Clock,
        *,
        vllm_metrics: bool = False,
        loading: Loading | None = None,
    ) -> None:
        self._engine = engine
        self._parser = parser
        self._tokenizer = tokenizer
        self._model = model
        self._clock = clock
        self._loading = loading
        self._metrics = EngineMetrics(engine, model=model.name, with_vllm_names=vllm_metrics)
        self._guides = Guides(tokenizer)
        self._translations: dict[str, Callable[[bytes], Struct]] = {
            "/tokenize": parser.tokenize,
            "/detokenize": parser.detokenize,
        }
        self._running: dict[str, list[_Running]] = {}  # by the x-request-id that they came with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = _Exchange(receive, send)
        try:
            await self._route(scope, exchange)
        except _Gone:
            return
        except _Problem as problem:
            await exchange.fail(problem)
        except Exception:
            log.exception("answering failed")
            await exchange.fail(
                _Problem(500, "internal error", "server_error", code="internal_error")
            )

    async def _route(self, scope: Scope, exchange: "_Exchange") -> None:
        path, method = scope["path"].rstrip("/"), scope["method"]
        surface = _SURFACES.get(path)
        to_cancel = _CANCEL.fullmatch(path)
        translate = self._translations.get(path)
        is_asked = surface or to_cancel or translate or path == "/v1/embeddings"
        allowed = "POST" if is_asked else "GET"
        if method != allowed and not (method == "HEAD" and allowed == "GET"):
            if allowed == "GET" and not self._is_page(path):
                raise _not_found(path)
            raise _Problem(
                405, f"use {allowed} here", "invalid_request_error", code="method_not_allowed"
            )
        if surface:
            with self._registered(_header(scope, b"x-request-id")) as running:
                await self._answer(surface, scope, exchange, running)
        elif path == "/v1/embeddings":
            with self._registered(_header(scope, b"x-request-id")) as running:
                await self._embed(scope, exchange, running)
        elif to_cancel:
            await self._cancel(to_cancel["id"], exchange)
        elif translate:
            await self._translate(translate, exchange)
        elif path == "/health":
            await self._health(exchange)
        elif path == "/metrics":
            await exchange.reply(200, self._metrics.text(), CONTENT_TYPE.encode())
        elif path == "/v1/models":
            listing = {"object": "list", "data": [self.model_card()]}
            await exchange.reply(200, msgspec.json.encode(listing))
        elif path.startswith("/v1/models/"):
            await self._one_model(path.removeprefix("/v1/models/"), exchange)
        else:
            raise _not_found(path)

    def _is_page(self, path: str) -> bool:
        return path in ("/health", "/metrics", "/v1/models") or path.startswith("/v1/models/")

    async def _health(self, exchange: "_Exchange") -> None:
        state = self._engine.state
        body: dict[str, object] = {"status": state, "model": self._model.name}
        if state is State.LOADING and self._loading is not None:
            body["loaded_percent"] = self._loading.percent
        content = msgspec.json.encode(body)
        if state is State.READY:
            await exchange.reply(200, content)
        else:
            await exchange.reply(503, content, retry_after_s=1.0)

    async def _one_model(self, name: str, exchange: "_Exchange") -> None:
        if name != self._model.name:
            raise _Problem(
                404,
                f"model `{name[:100]}` is not served here",
                "invalid_request_error",
                code="model_not_found",
                param="model",
            )
        await exchange.reply(200, msgspec.json.encode(self.model_card()))

    def families(self) -> Iterator[Family]:
        """Its metrics, for who shows those of several."""
        return self._metrics.collect()

    def close(self) -> None:
        """After the last answer."""
        self._guides.close()

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def model_card(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "meterline",
            "max_model_len": self._model.context,
        }

    @contextmanager
    def _registered(self, request_id: str | None) -> Iterator[_Running]:
        running = _Running()
        if request_id is None:
            yield running
            return
        among = self._running.setdefault(request_id, [])
        among.append(running)
        try:
            yield running
        finally:
            among.remove(running)
            if not among:
                del self._running[request_id]

    async def _cancel(self, request_id: str, exchange: "_Exchange") -> None:
        """End all that runs under this id within a step. Its answer says what it took."""
        among = self._running.get(request_id)
        if among is None:
            raise _Problem(
                404, "no such request is running", "invalid_request_error", code="not_running"
            )
        for running in among:
            running.finish()
        body = {"id": request_id, "object": "request.cancellation", "cancelled": len(among)}
        await exchange.reply(200, msgspec.json.encode(body))

    async def _translate(self, work: Callable[[bytes], Struct], exchange: "_Exchange") -> None:
        """Text to tokens or back; nothing of it is the engine's work."""
        data = await exchange.body()
        try:
            result = await asyncio.to_thread(work, data)
        except EngineError as error:
            raise _problem(error) from error
        await exchange.reply(200, msgspec.json.encode(result))

    async def _embed(self, scope: Scope, exchange: "_Exchange", running: _Running) -> None:
        """Texts to vectors; scheduled and charged with all other work."""
        data = await exchange.body()
        traceparent = _header(scope, b"traceparent")
        try:
            ask = await asyncio.to_thread(self._parser.embeddings, data, traceparent=traceparent)
            stream = self._engine.submit(ask.job)
        except EngineError as error:
            raise _problem(error) from error
        running.began(stream)
        watcher = asyncio.create_task(exchange.until_gone(stream.cancel))
        try:
            vectors, usage = await _vectors(stream)
            model = self._model.name
            answer = await asyncio.to_thread(
                embed.rendered, vectors, ask, model=model, usage=embed_usage(usage)
            )
            await exchange.reply(200, msgspec.json.encode(answer))
        finally:
            stream.cancel()
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _answer(
        self, surface: Surface, scope: Scope, exchange: "_Exchange", running: _Running
    ) -> None:
        data = await exchange.body()
        with_traceparent = _header(scope, b"traceparent")
        parse = self._parser.chat if surface == "chat" else self._parser.completion
        try:
            if len(data) < _OFF_LOOP_BYTES:
                ask = parse(data, traceparent=with_traceparent)
            else:
                ask = await asyncio.to_thread(parse, data, traceparent=with_traceparent)
            job = ask.job
            if ask.constraint is not None:
                job = structs.replace(job, guide=await self._guides.guide(ask.constraint))
            stream = self._engine.submit(job, deadline_s=_deadline_s(scope))
        except EngineError as error:
            raise _problem(error) from error
        running.began(stream)
        renderer = Renderer(
            surface,
            self._tokenizer,
            answer_id=new_request_id(self._clock.now_ns()).replace("-", ""),
            created=self._clock.now_ns() // 1_000_000_000,
            model=self._model.name,
            fingerprint=self._model.fingerprint,
            include_usage=ask.include_usage,
            has_logprobs=ask.logprobs is not None,
            tools=ask.tools,
            choices_per_prompt=ask.job.n,
            echoes=ask.echoes,
            best=ask.best,
        )
        watcher = asyncio.create_task(exchange.until_gone(stream.cancel))
        try:
            if ask.stream:
                await _streamed(ask, stream, renderer, exchange)
            else:
                await _whole(stream, renderer, exchange)
        finally:
            stream.cancel()
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


class _Exchange:
    """One request and its response."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_open = False

    async def body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                raise _Problem(
                    413,
                    f"the body is larger than {MAX_BODY_BYTES >> 20} MiB",
                    "invalid_request_error",
                    code="request_too_large",
                )
            if not message.get("more_body"):
                return b"".join(parts)

    async def until_gone(self, act: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        act()

    async def reply(
        self,
        status: int,
        body: bytes,
        content_type: bytes = _JSON,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        self._is_open = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(retry_after_s)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def open_events(self) -> None:
        self._is_open = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, problem: _Problem) -> None:
        data = msgspec.json.encode(problem.body)
        if not self._is_open:
            await self.reply(problem.status, data, retry_after_s=problem.retry_after_s)
            return
        await self.event(data)  # and no [DONE]
        await self.close_events()


async def _streamed(ask: Ask, stream: Stream, renderer: Renderer, exchange: _Exchange) -> None:
    is_open = False
    while True:
        for output in await stream.next():
            match output:
                case Delta():
                    if not is_open:
                        is_open = True
                        await exchange.open_events()
                    for data in renderer.chunks(output):
                        await exchange.event(data)
                case Done(usage):
                    if ask.include_usage:
                        await exchange.event(renderer.usage_chunk(usage))
                    await exchange.event(b"[DONE]")
                    await exchange.close_events()
                    return
                case Failed() | Cancelled():
                    raise _ended(output)


async def _whole(stream: Stream, renderer: Renderer, exchange: _Exchange) -> None:
    deltas: list[Delta] = []
    usage: JobUsage | None = None
    while usage is None:
        for output in await stream.next():
            match output:
                case Delta():
                    deltas.append(output)
                case Done():
                    usage = output.usage
                case Failed() | Cancelled():
                    raise _ended(output)
    await exchange.reply(200, renderer.whole(deltas, usage))


async def _vectors(stream: Stream) -> tuple[list[Vector], JobUsage]:
    """All of them. One that was told to end early has no answer."""
    vectors: list[Vector] = []
    while True:
        for output in await stream.next():
            match output:
                case Vector():
                    vectors.append(output)
                case Done(usage):
                    return vectors, usage
                case Failed() | Cancelled():
                    raise _ended(output)


def _ended(output: Failed | Cancelled) -> Exception:
    if isinstance(output, Cancelled):
        return _Gone()
    return _Problem(500, output.message, "server_error", code="engine_failed")


_CANCEL = re.compile(r"/v1/requests/(?P<id>[^/]{1,200})/cancel")
_SURFACES: dict[str, Surface] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}


def _problem(error: EngineError) -> _Problem:
    match error:
        case RequestInvalid():
            return _Problem(
                error.status,
                error.message,
                "invalid_request_error",
                code=error.code,
                param=error.param,
            )
        case Overloaded():
            return _Problem(503, error.message, "server_error", code="overloaded")
        case TooLate():
            return _Problem(
                429,
                error.message,
                "rate_limit_error",
                code=DEADLINE_UNREACHABLE,
                retry_after_s=error.retry_after_s,
            )
        case NotReady():
            return _Problem(503, error.message, "server_error", code="not_ready")
        case _:
            return _Problem(500, error.message, "server_error", code="internal_error")


def _not_found(path: str) -> _Problem:
    return _Problem(
        404, f"there is nothing at {path[:100]}", "invalid_request_error", code="not_found"
    )


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def _deadline_s(scope: Scope) -> float | None:
    """Seconds in which the answer must begin to be of use: as the gateway or any client says it in
    our header, else as OpenAI's libraries tell their time-out. Nonsense is no deadline."""
    for name, unit in _DEADLINES:
        text = _header(scope, name)
        if text is None:
            continue
        with suppress(ValueError):
            seconds = float(text) / unit
            if math.isfinite(seconds) and seconds > 0:
                return seconds
    return None


async def _lifespan(receive: Receive, send: Send) -> None:
    """The engine's life is `serve`'s business; the protocol is only acknowledged."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
