"""Any server that speaks the OpenAI API: our engine, vLLM, and the vendors.

It carries bytes: the client's body goes up and the answer comes down unchanged (`wire` says what
must change and what must be read). It never logs a body, a key or a URL and puts none of them
into an exception; nothing of httpx leaves it. Invariant: an iterator of `chat` that ends without
error has yielded exactly one `Final`, and closing it closes the upstream's connection at once.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from decimal import Decimal
from importlib import metadata
from typing import Final, Literal
from urllib.parse import quote

import httpx

from backends import egress, readers, wire
from backends.base import (
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendTruncated,
    BackendUnavailable,
    ChatRequest,
    Event,
    Phase,
)
from backends.deadlines import Deadlines, timed_out
from backends.server_load import Load, load_of
from backends.settings import BackendSettings
from backends.sse import EventTooLarge, SSEParser
from backends.transport import Answer, Client, Header, Request
from telemetry.capacity.heartbeat import StepTimes
from telemetry.clock import Clock, SystemClock
from telemetry.record import SURFACE_PATHS
from telemetry.usage import UsageSource

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024  # an error body is read only so far
MAX_ERROR_S: Final = 2.0
MAX_UNREAD_S: Final = 0.2  # how long the end of the connection's bytes is waited for after [DONE]
READY_S: Final = 2.0
CANCEL_S: Final = 0.5

_STEP_SECONDS: Final = re.compile(
    r'^meterline_engine_step_seconds_total\{[^}]*phase="(\w+)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE
)

_PATHS: Final = {surface: path.removeprefix("/v1") for surface, path in SURFACE_PATHS.items()}


def user_agent() -> str:
    try:
        return f"meterline/{metadata.version('meterline')}"
    except metadata.PackageNotFoundError:  # run from a checkout
        return "meterline/0"


def step_times(exposition: str) -> StepTimes | None:
    """The step clock in our engine's metrics. They are microsecond counts over a million, which a
    decimal takes back without a remainder. None if the engine is not warmed up yet."""
    found: dict[str, int] = {}
    for phase, seconds in _STEP_SECONDS.findall(exposition):
        found[phase] = found.get(phase, 0) + round(Decimal(seconds) * 1_000_000)
    if not found.get("warmup"):
        return None
    return StepTimes(
        load_us=found.get("load", 0),
        warmup_us=found["warmup"],
        step_us=sum(found.get(phase, 0) for phase in ("prefill", "decode", "mixed")),
        idle_us=found.get("idle", 0),
    )


class OpenAICompatible:
    """One upstream. `client` is its own (`egress.pool`) and closed with it.

    `is_engine`: ours, so it gets `cache_salt` and `priority`, and its times are believed.
    """

    def __init__(
        self,
        settings: BackendSettings,
        api_key: str | None,
        client: Client,
        *,
        normalise: wire.Normalise,
        provider: str = "openai",
        is_engine: bool = False,
        clock: Clock | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self.name = settings.name
        self.provider = provider
        self._client = client
        self._normalise = normalise
        self._is_engine = is_engine
        self._clock = clock or SystemClock()
        self._max_answer_bytes = max_answer_bytes
        self._max_event_bytes = max_event_bytes
        base_url, _ = egress.split_base_url(settings.base_url or "")
        url = httpx.URL(base_url)
        self._base_path = url.raw_path.removesuffix(b"/")
        self._targets = {
            surface: self._base_path + path.encode() for surface, path in _PATHS.items()
        }
        self._ready_target = b"/health" if is_engine else self._base_path + b"/models"
        if settings.probe is not None and settings.probe.path is not None:
            self._ready_target = settings.probe.path.encode("ascii")
        self._forwards_trace = is_engine or settings.allow_private  # never to third parties
        headers: list[Header] = [
            (b"host", url.netloc),
            (b"content-type", b"application/json"),
            (b"user-agent", user_agent().encode()),
            (b"accept-encoding", b"identity"),  # what is not encoded needs no second copy
        ]
        self._secrets = [url.netloc.decode("ascii"), url.host]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError(f"the key of backend {self.name} holds a line break or the like")
            headers.append(self._credential(api_key))
            self._secrets.insert(0, api_key)
        self._headers_whole = [*headers, (b"accept", b"application/json")]
        self._headers_ready = self._headers_whole
        self._headers_stream = [*headers, (b"accept", b"text/event-stream")]

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        """The attempt. See `backends.base` for the order of events."""
        body = wire.upstream_body(request, is_engine=self._is_engine, backend=self.name)
        deadlines = Deadlines(request.timeouts, backend=self.name, is_stream=request.stream)
        reader = readers.reader_of(
            request.surface,
            backend=self.name,
            normalise=self._normalise,
            usage_source=UsageSource.ENGINE if self._is_engine else UsageSource.REPORTED,
            scrub=self._scrub,
        )
        answer: Answer | None = None
        try:
            answer = await self._client.send(self._request(request, body), until=deadlines.at)
            await self._check(answer, is_stream=request.stream)
            headers = answer.headers
            provider_request_id = _label(headers.get(b"x-request-id") or headers.get(b"request-id"))
            if not request.stream:
                data = await self._read(answer, deadlines.at)
                yield reader.whole(data)
                yield reader.final(provider_request_id=provider_request_id)
                return
            parser = SSEParser(max_event_bytes=self._max_event_bytes)
            is_open = True
            while is_open:
                piece = await answer.read(deadlines.at)
                is_open = bool(piece)
                events = parser.feed(piece) if piece else parser.end()
                if not events:
                    deadlines.check()  # comments, however many, are no answer
                for event in events:
                    if event.data == wire.DONE:
                        is_open = False
                        break
                    if event.event == "error":
                        raise reader.failure(event.data)
                    try:
                        chunk = reader.chunk(event.data)
                    except BackendProtocol as error:
                        if piece:
                            raise
                        raise BackendTruncated(  # no blank line closed it: it is half of one
                            "the upstream's stream was cut inside an event", backend=self.name
                        ) from error
                    if chunk is not None:
                        yield chunk
                        deadlines.progressed(has_content=chunk.content_bytes > 0)
                    elif reader.is_over:
                        is_open = False
                        break
            final = reader.final(provider_request_id=provider_request_id)
            await self._exhaust(answer)
            yield final
        except _HTTPX_ERRORS as error:
            stage: Stage = "request" if answer is None else "answer"
            raise translated(error, request, self.name, stage) from None
        except TimeoutError:
            raise deadlines.expired() from None
        except EventTooLarge as error:
            raise BackendProtocol(
                "the upstream sent an event larger than the limit", backend=self.name
            ) from error
        finally:
            if answer is not None:
                answer.close()

    async def is_ready(self) -> bool:
        """Our engine: its health route. Others: whether they list their models for our key."""
        request = Request(
            method=b"GET", target=self._ready_target, headers=self._headers_ready, connect_s=READY_S
        )
        try:
            until = asyncio.get_running_loop().time() + READY_S
            answer = await self._client.send(request, until=until)
        except (httpx.HTTPError, TimeoutError):
            return False
        with contextlib.closing(answer):
            await self._read_error(answer)  # so that the connection can be used again
            return answer.status == 200

    async def load(self, path: str, /) -> Load | None:
        """See `server_load.Loaded`."""
        text = await self._page(path.encode("ascii"))
        return None if text is None else load_of(text)

    async def _page(self, target: bytes) -> bytes | None:
        """A page of the server, or None if it does not answer in time, or with another status."""
        request = Request(
            method=b"GET", target=target, headers=self._headers_whole, connect_s=READY_S
        )
        try:
            until = asyncio.get_running_loop().time() + READY_S
            answer = await self._client.send(request, until=until)
            with contextlib.closing(answer):
                text = await self._read(answer, until)
        except (httpx.HTTPError, TimeoutError, BackendProtocol):
            return None
        return text if answer.status == 200 else None

    async def aclose(self) -> None:
        await self._client.aclose()

    def _credential(self, api_key: str) -> Header:
        return b"authorization", f"Bearer {api_key}".encode()

    def _request(self, request: ChatRequest, body: bytes) -> Request:
        """Nothing but these headers goes up, and no cookie."""
        headers = [
            *(self._headers_stream if request.stream else self._headers_whole),
            (b"x-request-id", request.request_id.encode()),
            *request.vendor_headers,
        ]
        if self._is_engine:
            timeouts = request.timeouts
            first_s = timeouts.first_token_s if request.stream else timeouts.total_s
            until_s = min(first_s, timeouts.total_s)
            headers.append((wire.DEADLINE_HEADER, b"%d" % max(1, until_s * 1000)))
        if request.traceparent is not None and self._forwards_trace:
            headers.append((b"traceparent", request.traceparent.encode()))
        return Request(
            target=self._targets[request.surface],
            headers=headers,
            body=body,
            connect_s=request.timeouts.connect_s,
        )

    async def _check(self, answer: Answer, *, is_stream: bool) -> None:
        """Raise unless this is an answer of the kind that was asked for."""
        status = answer.status
        headers = answer.headers
        if 300 <= status < 400:
            raise BackendProtocol(
                "the upstream redirects, and redirects are not followed",
                backend=self.name,
                status=status,
            )
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise BackendProtocol(
                "the upstream encoded its answer though asked not to", backend=self.name
            )
        if status != 200:
            body = await self._read_error(answer)
            raise wire.error_of_status(
                status,
                body,
                backend=self.name,
                retry_after_s=wire.retry_after_s(
                    retry_after_ms=_text(headers.get(b"retry-after-ms")),
                    retry_after=_text(headers.get(b"retry-after")),
                    now_s=self._clock.now_ns() / 1e9,
                ),
                scrub=self._scrub,
            )
        content_type = headers.get(b"content-type", b"")
        if is_stream and content_type.startswith(b"application/json"):
            raise self._not_a_stream(await self._read_error(answer))
        if content_type.startswith(b"text/html") or (
            not is_stream and content_type.startswith(b"text/event-stream")
        ):
            raise BackendProtocol(
                "the upstream's answer is of another type than asked for", backend=self.name
            )

    def _not_a_stream(self, body: bytes) -> BackendError:
        if wire.is_error_body(body):
            return wire.error_in_answer(body, backend=self.name, scrub=self._scrub)
        return BackendProtocol(
            "the upstream answered whole though a stream was asked for", backend=self.name
        )

    async def _read(self, answer: Answer, until: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while piece := await answer.read(until):
            parts.append(piece)
            size += len(piece)
            if size > self._max_answer_bytes:
                raise BackendProtocol(
                    "the upstream's answer is larger than the limit", backend=self.name
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read_error(self, answer: Answer) -> bytes:
        """As much of an error's body as comes soon; its status is known without it."""
        parts: list[bytes] = []
        size = 0
        until = asyncio.get_running_loop().time() + MAX_ERROR_S
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            while size <= MAX_ERROR_BYTES and (piece := await answer.read(until)):
                parts.append(piece)
                size += len(piece)
        return b"".join(parts)

    async def _exhaust(self, answer: Answer) -> None:
        """Read the few bytes that end the body, so that the connection can be used again."""
        until = asyncio.get_running_loop().time() + MAX_UNREAD_S
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            while await answer.read(until):
                pass

    def _scrub(self, text: str) -> str:
        """Without our credential and the upstream's address."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _label(value: bytes | None) -> str | None:
    return None if value is None else wire.label(value.decode("latin-1"))


class EngineServer(OpenAICompatible):
    """Our engine: an OpenAI-compatible server that can be told to stop (`Cancellable`)
    and tells how it spent its time (`Clocked`)."""

    def __init__(
        self,
        settings: BackendSettings,
        api_key: str | None,
        client: Client,
        *,
        normalise: wire.Normalise,
        provider: str = "openai",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            settings,
            api_key,
            client,
            normalise=normalise,
            provider=provider,
            is_engine=True,
            clock=clock,
        )

    async def cancel(self, request_id: str, /) -> bool:
        """Whether the engine knew the request and ends it now."""
        target = b"%s/requests/%s/cancel" % (self._base_path, quote(request_id, safe="").encode())
        request = Request(target=target, headers=self._headers_whole)
        until = asyncio.get_running_loop().time() + CANCEL_S
        try:
            answer = await self._client.send(request, until=until)
        except (httpx.HTTPError, TimeoutError):
            return False
        with contextlib.closing(answer):
            await self._read_error(answer)  # so that the connection can be used again
            return answer.status == 200

    async def step_times(self) -> StepTimes | None:
        """What its step clock shows. None: it does not answer now, or is not warmed up."""
        text = await self._page(b"/metrics")
        return None if text is None else step_times(text.decode())


# --- httpx's exceptions -----------------------------------------------------------------------

Meaning = Literal["unavailable", "connect", "total", "lost", "protocol", "defect"]
Stage = Literal["request", "answer"]

# `lost`: the connection ended. Before the answer began that is a failure; inside it, a cut.
MEANING_OF_HTTPX: Final[dict[type[Exception], Meaning]] = {
    httpx.ConnectTimeout: "connect",
    httpx.PoolTimeout: "connect",
    httpx.ReadTimeout: "total",
    httpx.WriteTimeout: "total",
    httpx.TimeoutException: "total",
    httpx.ConnectError: "unavailable",
    httpx.ProxyError: "unavailable",
    httpx.UnsupportedProtocol: "unavailable",
    httpx.ReadError: "lost",
    httpx.WriteError: "lost",
    httpx.CloseError: "lost",
    httpx.NetworkError: "lost",
    httpx.RemoteProtocolError: "lost",
    httpx.LocalProtocolError: "protocol",
    httpx.ProtocolError: "protocol",
    httpx.DecodingError: "protocol",
    httpx.TooManyRedirects: "protocol",
    httpx.HTTPStatusError: "protocol",
    httpx.TransportError: "lost",
    httpx.RequestError: "lost",
    httpx.HTTPError: "lost",
    httpx.InvalidURL: "protocol",
    httpx.CookieConflict: "protocol",
    httpx.StreamConsumed: "defect",
    httpx.StreamClosed: "defect",
    httpx.ResponseNotRead: "defect",
    httpx.RequestNotRead: "defect",
    httpx.StreamError: "defect",
}
_HTTPX_ERRORS: Final = tuple(MEANING_OF_HTTPX)


def translated(error: Exception, request: ChatRequest, backend: str, stage: Stage) -> BackendError:
    """Ours for httpx's. Its own messages may hold URLs and header values: raise the translation
    `from None`, so that no traceback prints them."""
    known = next(kind for kind in type(error).__mro__ if kind in MEANING_OF_HTTPX)
    meaning = MEANING_OF_HTTPX[known]
    if meaning == "unavailable":
        why = (
            "the host resolves to an internal address"
            if isinstance(error, egress.EgressRefused)
            else "no connection to the upstream"
        )
        return BackendUnavailable(why, backend=backend)
    if meaning in ("connect", "total"):
        phase: Phase = "connect" if meaning == "connect" else "total"
        return timed_out(request.timeouts, phase, backend=backend)
    if meaning == "lost":
        if stage == "answer":
            return BackendTruncated("the upstream's connection was cut", backend=backend)
        return BackendFailed("no answer came from the upstream", backend=backend)
    return BackendProtocol("the exchange with the upstream broke HTTP's rules", backend=backend)
