"""What the translators share: their shape, usage in each API's terms, small values. Pure."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Raw

from backends import base
from backends.base import ChatRequest, Chunk, Event, Whole
from backends.settings import Dialect
from backends.translate.shapes import given
from telemetry.record import Surface
from telemetry.usage import Usage

encode: Final = msgspec.json.encode
Json = dict[str, Any]
BYTES_PER_TOKEN: Final = 4


class Untranslatable(Exception):
    """The other API has no way to say this. `param` is the field of the client's request."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Translator(ABC):
    """One request's translator, used once: `body`, then `chunk`s and `final`, or `whole`."""

    target: ClassVar[Surface]  # what the request becomes

    def __init__(self, request: ChatRequest, dialect: Dialect) -> None:
        self.request = request
        self.dialect = dialect

    @abstractmethod
    def body(self) -> bytes:
        """The request for the backend. Raises Untranslatable, or what decoding raises."""

    @abstractmethod
    def chunk(self, chunk: Chunk) -> list[Event]:
        """The client's events for one of the backend's."""

    @abstractmethod
    def final(self, final: base.Final) -> list[Event]:
        """The events that end a stream, the last one a Final."""

    @abstractmethod
    def whole(self, whole: Whole, final: base.Final) -> list[Event]:
        """A whole answer and its end."""


def compact(fields: Json) -> Json:
    """Without what was not given."""
    return {name: value for name, value in fields.items() if value is not None}


def chat_tool(
    name: str | None, description: str | None, parameters: Raw, *, strict: bool | None
) -> Json:
    """A function as chat declares it."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters if given(parameters) else None,
        "strict": strict,
    }
    return {"type": "function", "function": compact(function)}


def id_of(prefix: str, upstream: str | None, request_id: str) -> str:
    """An id with the prefix that clients of an API know, from the upstream's."""
    tail = (upstream or request_id).rpartition("_")[2]
    for known in ("chatcmpl-", "cmpl-"):
        tail = tail.removeprefix(known)
    return prefix + (tail or request_id).replace("-", "")


def is_object(text: str | bytes) -> bool:
    """Whether it is a JSON object, as the arguments of a call must be."""
    try:
        msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def openai_usage(usage: Usage) -> Json:
    """As chat reports it: what was read from a cache, and thought, is inside the totals."""
    inside: Json = {"cached_tokens": usage.in_cached_read}
    written = usage.in_cache_write_5m + usage.in_cache_write_1h
    if written:
        inside["cache_write_tokens"] = written
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": inside,
        "completion_tokens_details": {"reasoning_tokens": usage.out_reasoning},
    }


def responses_usage(usage: Usage) -> Json:
    written = usage.in_cache_write_5m + usage.in_cache_write_1h
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.in_cached_read,
            "cache_write_tokens": written,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.out_reasoning},
        "total_tokens": usage.total_tokens,
    }


def anthropic_usage(usage: Usage | None, *, content_bytes: int) -> Json:
    """As Anthropic reports it: what went to and came from a cache is beside input_tokens. The wire
    has no way to say "not reported": then it is estimated from what was sent."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": -(-content_bytes // BYTES_PER_TOKEN)}
    written = usage.in_cache_write_5m + usage.in_cache_write_1h
    return {
        "input_tokens": usage.input_tokens - usage.in_cached_read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.in_cached_read,
        "output_tokens": usage.output_tokens,
    }
