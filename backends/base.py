"""The seam between the gateway and anything that generates tokens.

A backend turns a `ChatRequest` into an async iterator of events and raises `BackendError` and
nothing else; foreign exceptions are translated inside the backend. The iterator yields any number
of `Chunk` (streamed) or one `Whole`, then exactly one `Final`. An iterator that ends without
`Final` is a defect of the backend; an answer that was cut raises `BackendTruncated` instead.
Closing the iterator (`aclose`) cancels the upstream work.

BackendError
├─ BackendUnavailable   no connection could be made
├─ BackendTimeout       connected, but too slow (phase says where)
├─ BackendRefused       4xx about this request: the caller's to mend, never retried
│  └─ BackendCannot     this backend's API has no way to say it; another's may
├─ BackendAuth          401/403: our credential, never shown to the caller as theirs
├─ BackendRateLimited   429
├─ BackendFailed        5xx
├─ BackendProtocol      an answer that cannot be understood
└─ BackendTruncated     the answer stopped before its end
"""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct

from telemetry.capacity.heartbeat import StepTimes
from telemetry.record import Surface, Timings
from telemetry.usage import Usage, UsageQuality, UsageSource

Seconds = Annotated[float, Meta(gt=0)]
Phase = Literal["connect", "first_token", "inter_token", "total"]


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The four timeouts of an attempt, in seconds."""

    connect_s: Annotated[Seconds, Meta(description="To open a connection.")] = 3.0
    first_token_s: Annotated[
        Seconds, Meta(description="From sending to the first event, queueing there included.")
    ] = 60.0
    inter_token_s: Annotated[Seconds, Meta(description="Between two events of a stream.")] = 30.0
    total_s: Annotated[Seconds, Meta(description="The whole attempt.")] = 600.0


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What a backend is asked for. `body` is the client's JSON, byte for byte: unknown fields
    survive because nothing re-serialises them; a backend changes only the keys it must."""

    surface: Surface
    model: str  # the name this backend knows
    body: bytes
    stream: bool
    timeouts: Timeouts
    request_id: str
    traceparent: str | None = None  # of the attempt's span, never the caller's
    cache_salt: str | None = None  # set by us from the authenticated tenant, never by the client
    priority: int = 0
    created_s: int = 0  # Unix seconds, for answers that are translated
    vendor_headers: tuple[tuple[bytes, bytes], ...] = ()  # allow-listed by the edge
    previous: "Previous | None" = None  # what a request of surface `responses` goes on from


class Previous(Struct, frozen=True):
    """An earlier response of the same tenant, found by `previous_response_id`."""

    backend: str | None  # that knows it by its id, if the backend speaks `responses` itself
    items: bytes  # the whole conversation until then, a JSON list: what went in, and what came out


class Chunk(Struct, frozen=True, gc=False):
    """One streamed event. `data` is its JSON, to be forwarded unchanged."""

    data: bytes
    content_bytes: int = 0  # UTF-8 bytes of generated text, reasoning or tool arguments; 0: none
    event: str = ""  # its name, on surfaces whose events have one


class Whole(Struct, frozen=True, gc=False):
    """A whole answer: the response body, to be forwarded unchanged."""

    data: bytes
    content_bytes: int = 0


class Final(Struct, frozen=True, kw_only=True):
    """The end of a complete answer, and what the backend says it took."""

    usage: Usage | None = None  # None: the backend reported none
    usage_source: UsageSource = UsageSource.NONE
    usage_quality: UsageQuality = UsageQuality.EXACT
    timings: Timings | None = None
    answered_model: str | None = None
    provider_request_id: str | None = None
    service_tier: str | None = None
    finish_reasons: tuple[str, ...] = ()  # in order of choice index
    usage_chunk: bytes | None = None  # the streamed usage event, for clients who asked for it
    last: Chunk | None = None  # the event that says that all is there, on surfaces that have one


Event = Chunk | Whole | Final


class Backend(Protocol):
    """One configured upstream. Safe for concurrent use; `aclose` releases its connections."""

    name: str
    provider: str  # gen_ai.provider.name

    def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        """Start the attempt. Raises only BackendError, also while iterating."""
        ...

    async def is_ready(self) -> bool:
        """Whether it would answer a request now. Cheap, bounded by its own timeout."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Clocked(Protocol):
    """A backend whose hardware is ours and which tells how it spent its time."""

    async def step_times(self) -> StepTimes | None:
        """Its step clock; None: it has none, or does not answer now."""
        ...


@runtime_checkable
class Cancellable(Protocol):
    """A backend that can be told to stop, and whose answer then ends early but properly."""

    async def cancel(self, request_id: str, /) -> bool:
        """Ask it to stop what runs under this id. True: the iterator of `chat` will soon yield a
        `Final` that says what was computed until then. Bounded by its own timeout; never raises a
        BackendError."""
        ...


class BackendError(Exception):
    """Never raised itself. `message` is safe to show: no URL, credential or upstream body in it."""

    code: ClassVar[str] = "upstream_error"
    retryable: ClassVar[bool] = True  # another attempt, here or elsewhere, may succeed

    def __init__(
        self,
        message: str,
        *,
        backend: str,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.backend = backend
        self.status = status
        self.retry_after_s = retry_after_s


class BackendUnavailable(BackendError):
    """No connection: refused, unresolvable, TLS failure, or our engine is still starting."""

    code = "upstream_unavailable"


class BackendTimeout(BackendError):
    """One of the four timeouts ran out."""

    code = "upstream_timeout"

    def __init__(self, message: str, *, backend: str, phase: Phase) -> None:
        super().__init__(message, backend=backend)
        self.phase = phase


class BackendRefused(BackendError):
    """The upstream says the request is wrong (400, 404, 413, 422). Its own error object is about
    the caller's request and is passed on, cut to `message`, `type`, `param` and `code`."""

    code = "upstream_refused"
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        backend: str,
        status: int,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        error_code: str | None = None,
    ) -> None:
        super().__init__(message, backend=backend, status=status)
        self.error_type = error_type
        self.param = param
        self.error_code = error_code


class BackendCannot(BackendRefused):
    """The request cannot be translated into what this backend speaks. Nothing was sent."""

    retryable = True


class BackendAuth(BackendError):
    """401 or 403 for our own credential."""

    code = "upstream_auth"


class BackendRateLimited(BackendError):
    """429 from the upstream."""

    code = "upstream_rate_limited"


class BackendTooLate(BackendRateLimited):
    """Our engine says that its answer would begin after the deadline: it is busy, not broken, and
    a request with more time may be taken at once."""

    code = "upstream_too_late"


class BackendFailed(BackendError):
    """5xx from the upstream, or an error event inside a stream."""

    code = "upstream_failed"


class BackendProtocol(BackendError):
    """Not JSON, not SSE, redirects, or an event larger than the limit."""

    code = "upstream_protocol"


class BackendTruncated(BackendError):
    """The connection or the stream ended before a finish reason for each choice."""

    code = "upstream_truncated"


Environment = Mapping[str, str]
