"""The OpenAI wire as a client of it sees it: request bodies, answers, chunks and error objects.

Pure: bytes and values in, bytes and values out; no HTTP library, no clock, no I/O. Invariant: what
it does not have to change it does not touch, so unknown fields, big integers and floats survive,
and a chunk is forwarded byte for byte. Nothing here is trusted to be well formed.
"""

import logging
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from backends import base
from backends.base import (
    BackendAuth,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTooLate,
    BackendTruncated,
    ChatRequest,
    Chunk,
    Whole,
)
from telemetry.usage import Normalised, UsageQuality, UsageSource

_log = logging.getLogger(__name__)

# Our engine is told when an answer would come too late, and says so before it begins.
DEADLINE_HEADER: Final = b"x-meterline-deadline-ms"
DEADLINE_UNREACHABLE: Final = "deadline_unreachable"

MESSAGE_CHARS: Final = 1_000  # of an upstream's error message
FIELD_CHARS: Final = 200  # of its type, param and code, and of ids and names
MAX_CHOICES: Final = 1_024  # choices of one answer that are kept track of
MAX_RETRY_AFTER_S: Final = 86_400.0

DONE: Final = b"[DONE]"

# What decoding foreign JSON may raise; nesting beyond the decoder's depth is a RecursionError.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# Cut a `usage` object, given as its JSON; None when it says nothing that can be counted.
Normalise = Callable[[bytes], Normalised | None]


# --- requests ---------------------------------------------------------------------------------

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.encode
_SPACE: Final = b" \t\r\n"
_COMPLETES: Final = frozenset({"chat", "completions"})


def upstream_body(request: ChatRequest, *, is_engine: bool, backend: str) -> bytes:
    """The body to send: the client's bytes, unless a top-level key must change.

    `model` becomes the backend's name for it; `stream` what the gateway decided; a stream always
    asks for its usage; our engine gets `cache_salt` and `priority` from us and never from the
    client, and a salt that a client sends to any other server is replaced by its tenant's. Where a
    key is given twice the last one wins, for us and for the upstream alike: else a body could pass
    our checks as one request and be answered as another.
    """
    try:
        fields = _decode_fields(request.body)
    except MALFORMED as error:
        raise BackendRefused(
            "the request body is not a JSON object", backend=backend, status=400
        ) from error
    changes: dict[str, object] = {}
    is_pruned = False
    if bytes(fields.get("model", b"")) != _encode(request.model):
        changes["model"] = request.model
    if (bytes(fields.get("stream", b"false")) == b"true") != request.stream:
        changes["stream"] = request.stream
    if request.stream and request.surface in _COMPLETES:  # elsewhere usage comes unasked
        _ask_for_usage(fields, changes)
    if is_engine and request.surface in _COMPLETES:
        for key, value in (("cache_salt", request.cache_salt), ("priority", request.priority)):
            if value:
                changes[key] = value
            else:
                is_pruned |= fields.pop(key, None) is not None
    elif "cache_salt" in fields and request.cache_salt:  # a chosen salt is another's cache
        changes["cache_salt"] = request.cache_salt
    if not changes and not is_pruned and _is_each_key_once(request.body, fields):
        return request.body
    return _encode({**fields, **changes})


def _ask_for_usage(fields: dict[str, Raw], changes: dict[str, object]) -> None:
    """Keep the other stream options; an ill-typed one is left for the upstream to refuse."""
    given = fields.get("stream_options")
    try:
        options = _decode_fields(given) if given is not None and bytes(given) != b"null" else {}
    except MALFORMED:
        return
    if bytes(options.get("include_usage", b"")) != b"true":
        changes["stream_options"] = {**options, "include_usage": True}


def _is_each_key_once(body: bytes, fields: dict[str, Raw]) -> bool:
    """Whether `body` is exactly `fields`, in order, with nothing but white space between."""
    position, opening = 0, b"{"
    for key, value in fields.items():
        name = _encode(key)
        start = body.find(name, position)
        end = body.find(value, start + len(name))
        if start < 0 or end < 0:
            return False
        if body[position:start].translate(None, _SPACE) != opening:
            return False
        if body[start + len(name) : end].translate(None, _SPACE) != b":":
            return False
        position, opening = end + len(bytes(value)), b","
    return body[position:].translate(None, _SPACE) == (b"}" if fields else b"{}")


# --- answers ----------------------------------------------------------------------------------


class _Function(Struct, gc=False):
    arguments: Any = None


class _ToolCall(Struct, gc=False):
    function: _Function | None = None
    custom: Any = None


class _Message(Struct, gc=False):
    """A `message` or a `delta`. Ill-typed text counts as none: it is forwarded, not judged."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Choice(Struct, gc=False):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: Any = None
    finish_reason: str | None = None


_ABSENT: Final = Raw()
_NULL: Final = b"null"


class _View(Struct, gc=False):
    """What we must know of an answer or a chunk; everything else stays in its bytes."""

    choices: list[_Choice] | None = None
    usage: Raw = _ABSENT
    error: Raw = _ABSENT
    id: Any = None
    model: Any = None
    service_tier: Any = None


_decode_view = msgspec.json.Decoder(_View).decode
_NOTHING: Final = (b"", b"null")


class AnswerReader:
    """Follows one answer, whole or streamed, and knows whether it is complete.

    `chunk` is called for each event's data, `whole` for a body; then `final` says what it took,
    or raises BackendTruncated when a choice that appeared was not finished.
    """

    def __init__(
        self,
        *,
        backend: str,
        normalise: Normalise,
        usage_source: UsageSource = UsageSource.REPORTED,
        scrub: Callable[[str], str] = str,
    ) -> None:
        self._backend = backend
        self._normalise = normalise
        self._usage_source = usage_source
        self._scrub = scrub
        self.is_over = False  # such a stream ends with [DONE], which is no event
        self._finish_reasons: dict[int, str | None] = {}
        self._usage: bytes | None = None
        self._usage_chunk: bytes | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._service_tier: str | None = None

    def chunk(self, data: bytes) -> Chunk | None:
        """The chunk to forward, or None for the usage chunk, which is kept for `final`. Raises
        what an error event says, BackendProtocol for anything that is not a chunk."""
        view = self._read(data)
        choices = view.choices
        if view.usage is not _ABSENT and (usage := bytes(view.usage)) != _NULL:
            self._usage = usage  # cumulative where it comes often: the last one counts
            if not choices:
                self._usage_chunk = data
                return None
        content_bytes = 0
        if choices:
            for choice in choices:
                delta = choice.delta
                if delta is not None:
                    content_bytes += _message_bytes(delta)
                elif choice.text:
                    content_bytes += text_bytes(choice.text)
                if choice.finish_reason is not None or choice.index not in self._finish_reasons:
                    self._finished(choice)
        return Chunk(data, content_bytes)

    def whole(self, data: bytes) -> Whole:
        """The answer to forward. Raises as `chunk` does."""
        view = self._read(data)
        if view.choices is None:
            raise BackendProtocol("the upstream's answer has no choices", backend=self._backend)
        if view.usage is not _ABSENT and (usage := bytes(view.usage)) != _NULL:
            self._usage = usage
        content_bytes = 0
        for choice in view.choices:
            if choice.message is not None:
                content_bytes += _message_bytes(choice.message)
            elif choice.text:
                content_bytes += text_bytes(choice.text)
            self._finished(choice)
        return Whole(data, content_bytes)

    @property
    def is_finished(self) -> bool:
        """Whether each choice that appeared has its finish reason, and at least one appeared."""
        reasons = self._finish_reasons
        return bool(reasons) and None not in reasons.values()

    def final(self, *, provider_request_id: str | None = None) -> base.Final:
        """The end of the stream or body: what it took, or BackendTruncated."""
        if not self.is_finished:
            raise BackendTruncated(
                "the upstream's answer stopped before its end", backend=self._backend
            )
        return ended(
            self._usage,
            self._normalise,
            self._usage_source,
            backend=self._backend,
            answered_model=self._model,
            provider_request_id=provider_request_id or self._id,
            service_tier=self._service_tier,
            finish_reasons=tuple(
                reason for _, reason in sorted(self._finish_reasons.items()) if reason is not None
            ),
            usage_chunk=self._usage_chunk,
        )

    def _read(self, data: bytes) -> _View:
        try:
            view = _decode_view(data)
        except MALFORMED as error:
            raise BackendProtocol(
                "the upstream sent something that is no OpenAI answer", backend=self._backend
            ) from error
        if view.error is not _ABSENT and bytes(view.error) != _NULL:
            raise self.failure(data)
        if self._id is None:
            self._id = label(view.id)
        if view.model is not None and self._model is None:
            self._model = label(view.model)
        if view.service_tier is not None:
            self._service_tier = label(view.service_tier)
        return view

    def failure(self, data: bytes) -> BackendError:
        """What an error event, or an error body under status 200, means."""
        return error_in_answer(data, backend=self._backend, scrub=self._scrub)

    def _finished(self, choice: _Choice) -> None:
        reasons = self._finish_reasons
        if choice.index not in reasons and len(reasons) >= MAX_CHOICES:
            raise BackendProtocol(
                "the upstream's answer has no end of choices", backend=self._backend
            )
        reason = choice.finish_reason
        if reason is not None:
            reasons[choice.index] = reason[:FIELD_CHARS]
        else:
            reasons.setdefault(choice.index, None)


def ended(
    report: bytes | None,
    normalise: Normalise,
    source: UsageSource,
    *,
    backend: str,
    answered_model: str | None,
    provider_request_id: str | None,
    service_tier: str | None,
    finish_reasons: tuple[str, ...],
    usage_chunk: bytes | None = None,
    last: Chunk | None = None,
) -> base.Final:
    """The end of an answer whose usage was reported as `report`, on any surface."""
    cut = None if report is None else normalise(report)
    if cut is None and report is not None:
        _log.warning("usage not understood", extra={"backend": backend})
    # Only our engine's word is taken for times: they decide what its time costs.
    is_engine = source is UsageSource.ENGINE
    return base.Final(
        usage=cut.usage if cut else None,
        usage_source=source if cut else UsageSource.NONE,
        usage_quality=cut.quality if cut else UsageQuality.EXACT,
        timings=cut.timings if cut and is_engine else None,
        answered_model=answered_model,
        provider_request_id=provider_request_id,
        service_tier=service_tier,
        finish_reasons=finish_reasons,
        usage_chunk=usage_chunk,
        last=last,
    )


def _message_bytes(message: _Message) -> int:
    total = 0
    if message.content:
        total += text_bytes(message.content)
    if message.reasoning_content:
        total += text_bytes(message.reasoning_content)
    elif message.reasoning:  # a second name for the same text
        total += text_bytes(message.reasoning)
    if message.refusal:
        total += text_bytes(message.refusal)
    if message.tool_calls:
        for call in message.tool_calls:
            total += _function_bytes(call.function)
            if isinstance(call.custom, dict):
                total += text_bytes(call.custom.get("input"))
    if message.function_call is not None:
        total += _function_bytes(message.function_call)
    return total


def _function_bytes(function: _Function | None) -> int:
    return 0 if function is None else text_bytes(function.arguments)


def text_bytes(text: object) -> int:
    """UTF-8 bytes of a string, or of the text parts of a content list."""
    if isinstance(text, str):
        return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if isinstance(text, list):
        return sum(text_bytes(part.get("text")) for part in text if isinstance(part, dict))
    return 0


# --- errors -----------------------------------------------------------------------------------


class _ErrorObject(Struct, gc=False):
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None


class _ErrorBody(Struct, gc=False):
    """`{"error": {…}}`, `{"error": "…"}`, or the object itself at the top (vLLM)."""

    error: Raw = Raw()
    object: Any = None
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None


# How Anthropic says it, which has no codes.
_TOO_LONG: Final = ("prompt is too long", "input length and `max_tokens` exceed context limit")

_REFUSED: Final = frozenset({400, 404, 413, 422, 451})
_AUTH: Final = frozenset({401, 402, 403})
_AGAIN: Final = frozenset({408, 409, 425})


def error_of_status(
    status: int,
    body: bytes,
    *,
    backend: str,
    retry_after_s: float | None = None,
    scrub: Callable[[str], str] = str,
) -> BackendError:
    """What an answer with another status than 200 means."""
    if status in _AUTH:
        return BackendAuth(
            "the upstream does not accept our credential", backend=backend, status=status
        )
    if status == 429 and (_error_object(body) or _ErrorObject()).code == DEADLINE_UNREACHABLE:
        return BackendTooLate(
            "the upstream would begin to answer after the deadline",
            backend=backend,
            status=status,
            retry_after_s=retry_after_s,
        )
    if status == 429:
        return BackendRateLimited(
            "the upstream is limiting our requests",
            backend=backend,
            status=status,
            retry_after_s=retry_after_s,
        )
    if status >= 500 or status in _AGAIN:
        return BackendFailed(
            f"the upstream failed with status {status}",
            backend=backend,
            status=status,
            retry_after_s=retry_after_s,
        )
    if status in _REFUSED:
        error = _error_object(body)
        if error is not None or status == 413:
            return _refused(error or _ErrorObject(), status, backend=backend, scrub=scrub)
    return BackendProtocol(
        f"the upstream answered with status {status} and no error object",
        backend=backend,
        status=status,
    )


def error_in_answer(
    data: bytes, *, backend: str, scrub: Callable[[str], str] = str
) -> BackendError:
    """What an error object inside a 200 means: its code or type stands for the status."""
    error = _error_object(data) or _ErrorObject()
    status = _status_of(error)
    if status in _AUTH or status == 429:
        return error_of_status(status, data, backend=backend)
    if status in _REFUSED:
        return _refused(error, status, backend=backend, scrub=scrub)
    return BackendFailed(
        "the upstream reported an error in its answer",
        backend=backend,
        status=status if status >= 400 else None,
    )


def is_error_body(body: bytes) -> bool:
    """Whether a body is an error object, in any of the shapes servers use."""
    return _error_object(body) is not None


_STATUS_OF_WORD: Final = {
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    "invalid_request": 400,
    "BadRequestError": 400,
    "context_length_exceeded": 400,
    "content_policy_violation": 400,
    "model_not_found": 404,
    "not_found_error": 404,
    "request_too_large": 413,
    "billing_error": 402,
    "overloaded_error": 529,
    "NotFoundError": 404,
}


def _status_of(error: _ErrorObject) -> int:
    for word in (error.code, error.type):
        if isinstance(word, int) and not isinstance(word, bool):
            return word
        if isinstance(word, str):
            if word in _STATUS_OF_WORD:
                return _STATUS_OF_WORD[word]
            if len(word) == 3 and word.isdecimal():
                return int(word)
    return 0


def _refused(
    error: _ErrorObject, status: int, *, backend: str, scrub: Callable[[str], str]
) -> BackendRefused:
    message = error.message
    if not isinstance(message, str) or not message.strip():
        message = "the upstream refuses this request"
    if error.code is None and message.startswith(_TOO_LONG):
        error.code = "context_length_exceeded"
    return BackendRefused(
        scrub(message)[:MESSAGE_CHARS],
        backend=backend,
        status=status,
        error_type=_scrubbed(error.type, scrub) or "invalid_request_error",
        param=_scrubbed(error.param, scrub),
        error_code=_scrubbed(error.code, scrub),
    )


def _scrubbed(value: object, scrub: Callable[[str], str]) -> str | None:
    text = label(value)
    return None if text is None else scrub(text)


def _error_object(body: bytes) -> _ErrorObject | None:
    try:
        outer = msgspec.json.decode(body, type=_ErrorBody)
        inner = bytes(outer.error)
        if inner in _NOTHING:
            if outer.object != "error" and outer.message is None:
                return None
            return _ErrorObject(outer.message, outer.type, outer.param, outer.code)
        if inner.startswith(b'"'):
            return _ErrorObject(msgspec.json.decode(inner, type=str))
        return msgspec.json.decode(inner, type=_ErrorObject)
    except MALFORMED:
        return None


def reason(error: Exception) -> str:
    """What was wrong with JSON, in a few words."""
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return (text[:1].lower() + text[1:])[:FIELD_CHARS]


# --- small values -----------------------------------------------------------------------------


def label(value: object) -> str | None:
    """A foreign name or id, bounded and printable; None when it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        return None
    text = value[:FIELD_CHARS]
    return text if text.isprintable() else "".join(c for c in text if c.isprintable()) or None


def retry_after_s(
    *, retry_after_ms: str | None, retry_after: str | None, now_s: float
) -> float | None:
    """The upstream's hint, milliseconds first as the SDKs read it; None when it makes no sense.
    `retry_after` is seconds or an HTTP date (RFC 9110, 10.2.3)."""
    for text, scale in ((retry_after_ms, 1e-3), (retry_after, 1.0)):
        seconds = _number(text)
        if seconds is not None:
            return _bounded(seconds * scale)
    if retry_after is None:
        return None
    try:
        return _bounded(parsedate_to_datetime(retry_after).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _bounded(seconds: float) -> float | None:
    """None for NaN and what lies in the past; a day at most."""
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
