"""How each family of clients is spoken to: events, errors and ends in the form that its SDK reads.

Bytes only; must not know sockets. Invariant: `last` is the one place from which an end can come
that looks complete, and it is asked for only after the answer was settled as complete.

OpenAI's chat, completions and embeddings: https://platform.openai.com/docs/api-reference.
Anthropic's messages: https://docs.claude.com/en/api/messages-streaming and …/errors.
"""

from typing import Any, Final

import msgspec
from typing_extensions import override

from backends.base import Chunk
from backends.base import Final as End
from gateway.api import problems
from gateway.errors import (
    BodyTooLarge,
    Forbidden,
    GatewayError,
    ModelUnknown,
    NotFound,
    Unauthenticated,
)
from telemetry.record import Surface

_encode: Final = msgspec.json.encode
_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Voice:
    """Chat, completions and embeddings: unnamed events, and `[DONE]` at the end."""

    ping: bytes = b": ping\n\n"  # a comment: anything else is an event to the SDK

    def event(self, chunk: Chunk) -> bytes:
        return b"data: " + chunk.data + b"\n\n"

    def last(self, end: End | None) -> bytes:
        """What says that the stream is complete."""
        return b"data: [DONE]\n\n"

    def response(self, last: Chunk) -> bytes:
        """What is to be kept of an answer that ends with this event."""
        return last.data

    def error(self, error: GatewayError, request_id: str, sent: int) -> bytes:
        """The end of a stream that broke, after `sent` events."""
        return b"data: " + problems.body(error) + b"\n\n"

    def problem(self, error: GatewayError, request_id: str) -> bytes:
        """The body of an error answer."""
        return problems.body(error)

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """What these clients expect beside the headers of every answer."""
        return []


class _Named(Voice):
    """Events with names; the last one of the answer says that it is complete."""

    @override
    def event(self, chunk: Chunk) -> bytes:
        return _named(chunk.event, chunk.data)

    @override
    def last(self, end: End | None) -> bytes:
        return b"" if end is None or end.last is None else self.event(end.last)


class Responses(_Named):
    """The Responses API: named events with rising numbers; the last one holds the response."""

    @override
    def response(self, last: Chunk) -> bytes:
        return bytes(_read_fields(last.data)["response"])

    @override
    def error(self, error: GatewayError, request_id: str, sent: int) -> bytes:
        fields = {
            "type": "error",
            "sequence_number": sent,
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }
        return _named("error", _encode(fields))


class Messages(_Named):
    """Anthropic's messages: its own pings, errors and ids."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    @override
    def error(self, error: GatewayError, request_id: str, sent: int) -> bytes:
        return _named("error", self.problem(error, request_id))

    @override
    def problem(self, error: GatewayError, request_id: str) -> bytes:
        problem: dict[str, Any] = {"type": _type_of(error), "message": error.message}
        return _encode({"type": "error", "error": problem, "request_id": request_id})

    @override
    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        return [(b"request-id", request_id.encode())]


def _named(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _type_of(error: GatewayError) -> str:
    match error:
        case Unauthenticated():
            return "authentication_error"
        case Forbidden():
            return "permission_error"
        case ModelUnknown() | NotFound():
            return "not_found_error"
        case BodyTooLarge():
            return "request_too_large"
    if error.status == 429:
        return "rate_limit_error"
    if error.status in (503, 529):
        return "overloaded_error"
    return "invalid_request_error" if error.status < 500 else "api_error"


_OPENAI: Final = Voice()
_MESSAGES: Final = Messages()
_VOICES: Final[dict[Surface, Voice]] = {
    "messages": _MESSAGES,
    "count_tokens": _MESSAGES,
    "responses": Responses(),
}


def voice_of(surface: Surface) -> Voice:
    return _VOICES.get(surface, _OPENAI)
