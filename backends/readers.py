"""Answers of the other APIs, followed as `wire.AnswerReader` follows chat's: Anthropic's messages,
OpenAI's responses, embeddings, and token counts.

Pure, as `wire` is. Invariant: bytes are forwarded as they came; the event that says "all is there"
(`message_stop`, `response.completed`) is never handed on as a chunk, only as `Final.last`, so that
nobody can forward it before the answer is known to be complete.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw, Struct
from typing_extensions import override

from backends import base, wire
from backends.base import BackendError, BackendProtocol, BackendTruncated, Chunk, Whole
from telemetry import usage
from telemetry.record import Surface
from telemetry.usage import AnthropicReport, Usage, UsageSource

_ABSENT: Final = Raw()
_NULL: Final = b"null"


class Reader(Protocol):
    """Follows one answer. `chunk` for each event's data or `whole` for a body, then `final`."""

    is_over: bool  # the terminal event has come: nothing follows it

    def chunk(self, data: bytes) -> Chunk | None: ...

    def whole(self, data: bytes) -> Whole: ...

    def final(self, *, provider_request_id: str | None = None) -> base.Final: ...

    def failure(self, data: bytes) -> BackendError: ...


class _Follower:
    """What the readers of this module share."""

    what = "answer"

    def __init__(
        self,
        *,
        backend: str,
        normalise: wire.Normalise,
        usage_source: UsageSource = UsageSource.REPORTED,
        scrub: Callable[[str], str] = str,
    ) -> None:
        self.is_over = False
        self._backend = backend
        self._normalise = normalise
        self._usage_source = usage_source
        self._scrub = scrub
        self._usage: bytes | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._service_tier: str | None = None
        self._finish_reasons: tuple[str, ...] = ()
        self._last: Chunk | None = None

    def chunk(self, data: bytes) -> Chunk | None:
        """What is only ever whole has no events."""
        raise self._not_understood()

    def failure(self, data: bytes) -> BackendError:
        """What an error event, or an error body under status 200, means."""
        return wire.error_in_answer(data, backend=self._backend, scrub=self._scrub)

    def final(self, *, provider_request_id: str | None = None) -> base.Final:
        """The end: what it took, or BackendTruncated."""
        if not self.is_over:
            raise BackendTruncated(
                "the upstream's answer stopped before its end", backend=self._backend
            )
        return wire.ended(
            self._usage,
            self._normalise,
            self._usage_source,
            backend=self._backend,
            answered_model=self._model,
            provider_request_id=provider_request_id or self._id,
            service_tier=self._service_tier,
            finish_reasons=self._finish_reasons,
            last=self._last,
        )

    def _not_understood(self) -> BackendProtocol:
        return BackendProtocol(
            f"the upstream sent something that is no {self.what}", backend=self._backend
        )


# --- embeddings -------------------------------------------------------------------------------


class _Embeddings(Struct, gc=False):
    data: list[Raw] | None = None
    usage: Raw = _ABSENT
    error: Raw = _ABSENT
    model: Any = None


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


class EmbeddingsReader(_Follower):
    """Vectors: bytes that are not read, and usage."""

    what = "list of embeddings"

    def whole(self, data: bytes) -> Whole:
        try:
            view = _decode_embeddings(data)
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        if view.error is not _ABSENT and bytes(view.error) != _NULL:
            raise self.failure(data)
        if view.data is None:
            raise self._not_understood()
        if view.usage is not _ABSENT and (report := bytes(view.usage)) != _NULL:
            self._usage = report
        self._model = wire.label(view.model)
        self.is_over = True
        return Whole(data, sum(len(memoryview(item)) for item in view.data))


# --- Anthropic's messages ---------------------------------------------------------------------


class _Delta(Struct, gc=False):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    stop_reason: Any = None


class _Block(Struct, gc=False):
    text: Any = None
    thinking: Any = None
    input: Raw = _ABSENT


class _Message(Struct, gc=False):
    id: Any = None
    model: Any = None
    content: list[_Block] | None = None
    stop_reason: Any = None
    usage: Raw = _ABSENT


class _MessageEvent(Struct, gc=False):
    type: str
    delta: _Delta | None = None
    message: _Message | None = None
    content_block: _Block | None = None
    usage: Raw = _ABSENT


class _WholeMessage(_Message, gc=False):
    type: Any = None


class _Tier(Struct, gc=False):
    service_tier: Any = None


_decode_event = msgspec.json.Decoder(_MessageEvent).decode
_decode_message = msgspec.json.Decoder(_WholeMessage).decode
_decode_report = msgspec.json.Decoder(AnthropicReport).decode
_decode_tier = msgspec.json.Decoder(_Tier).decode


class MessagesReader(_Follower):
    """A message, whole or as `message_start` … `message_stop`. Usage in a stream is cumulative."""

    what = "message"
    _report: AnthropicReport | None = None

    @override
    def chunk(self, data: bytes) -> Chunk | None:
        try:
            event = _decode_event(data)
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        delta, kind = event.delta, event.type
        if kind == "content_block_delta" and delta is not None:
            size = wire.text_bytes(delta.text or delta.thinking or delta.partial_json)
            return Chunk(data, size, kind)
        if kind == "error":
            raise self.failure(data)
        if kind == "message_stop":
            self._last = Chunk(data, 0, kind)
            self.is_over = bool(self._finish_reasons)
            return None
        if event.message is not None:
            self._seen(event.message)
        if event.usage is not _ABSENT:
            self._counted(event.usage)
        if delta is not None and (reason := wire.label(delta.stop_reason)) is not None:
            self._finish_reasons = (reason,)
        return Chunk(data, _block_bytes(event.content_block), kind)

    def whole(self, data: bytes) -> Whole:
        try:
            message = _decode_message(data)
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        if message.type == "error":
            raise self.failure(data)
        if message.content is None:
            raise self._not_understood()
        self._seen(message)
        if (reason := wire.label(message.stop_reason)) is not None:
            self._finish_reasons = (reason,)
            self.is_over = True
        return Whole(data, sum(map(_block_bytes, message.content)))

    @override
    def final(self, *, provider_request_id: str | None = None) -> base.Final:
        if self._report is not None:
            self._usage = msgspec.json.encode(self._report)
        return super().final(provider_request_id=provider_request_id)

    def _seen(self, message: _Message) -> None:
        self._id = wire.label(message.id)
        self._model = wire.label(message.model)
        if message.usage is not _ABSENT:
            self._counted(message.usage)

    def _counted(self, report: Raw) -> None:
        try:
            self._report = usage.latest(self._report, _decode_report(report))
            tier = wire.label(_decode_tier(report).service_tier)
        except wire.MALFORMED:
            return  # no usage that can be counted, or null
        self._service_tier = tier or self._service_tier


def _block_bytes(block: _Block | None) -> int:
    if block is None:
        return 0
    size = wire.text_bytes(block.text or block.thinking)
    if block.input is not _ABSENT and (called := bytes(block.input)) != b"{}":
        size += len(called)
    return size


class CountReader(_Follower):
    """`{"input_tokens": N}`. Counting is free, and says so."""

    what = "token count"

    def whole(self, data: bytes) -> Whole:
        try:
            count = msgspec.json.decode(data, type=dict[str, Any]).get("input_tokens")
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        if not isinstance(count, int):
            raise self._not_understood()
        self.is_over = True
        return Whole(data, len(data))

    @override
    def final(self, *, provider_request_id: str | None = None) -> base.Final:
        ended = super().final(provider_request_id=provider_request_id)
        return msgspec.structs.replace(ended, usage=Usage(), usage_source=UsageSource.REPORTED)


# --- OpenAI's responses -----------------------------------------------------------------------


class _Fault(Struct, gc=False):
    code: Any = None
    message: Any = None


class _Incomplete(Struct, gc=False):
    reason: Any = None


class _Part(Struct, gc=False):
    text: Any = None
    refusal: Any = None


class _Item(Struct, gc=False):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    arguments: Any = None
    input: Any = None


class _Response(Struct, gc=False):
    id: Any = None
    model: Any = None
    status: Any = None
    service_tier: Any = None
    output: list[_Item] | None = None
    error: _Fault | None = None
    incomplete_details: _Incomplete | None = None
    usage: Raw = _ABSENT


class _ResponseEvent(Struct, gc=False):
    type: str
    delta: Any = None
    response: _Response | None = None


_decode_response_event = msgspec.json.Decoder(_ResponseEvent).decode
_decode_response = msgspec.json.Decoder(_Response).decode
_ENDS: Final = frozenset({"response.completed", "response.incomplete"})


class ResponsesReader(_Follower):
    """A response, whole or as `response.created` … `response.completed`."""

    what = "response"

    @override
    def chunk(self, data: bytes) -> Chunk | None:
        try:
            event = _decode_response_event(data)
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        kind, response = event.type, event.response
        if kind.endswith(".delta"):
            return Chunk(data, wire.text_bytes(event.delta), kind)
        if kind == "error":
            raise self.failure(data)
        if response is not None:
            self._seen(response)
            if kind in _ENDS:
                self._last = Chunk(data, 0, kind)
                self.is_over = True
                return None
        return Chunk(data, 0, kind)

    def whole(self, data: bytes) -> Whole:
        try:
            response = _decode_response(data)
        except wire.MALFORMED as error:
            raise self._not_understood() from error
        if response.output is None:
            if response.error is not None:
                raise self.failure(data)
            raise self._not_understood()
        self._seen(response)
        self.is_over = response.status in ("completed", "incomplete")
        return Whole(data, sum(map(_item_bytes, response.output)))

    def _seen(self, response: _Response) -> None:
        if response.status == "failed":
            raise self.failure(msgspec.json.encode({"error": response.error or _Fault()}))
        self._id = wire.label(response.id)
        self._model = wire.label(response.model)
        self._service_tier = wire.label(response.service_tier) or self._service_tier
        if response.status in ("completed", "incomplete"):
            why = response.incomplete_details
            reason = None if why is None else wire.label(why.reason)
            self._finish_reasons = (reason or str(response.status),)
        if response.usage is not _ABSENT and (report := bytes(response.usage)) != _NULL:
            self._usage = report


def _item_bytes(item: _Item) -> int:
    size = wire.text_bytes(item.arguments) + wire.text_bytes(item.input)
    for part in (*(item.content or ()), *(item.summary or ())):
        size += wire.text_bytes(part.text) + wire.text_bytes(part.refusal)
    return size


_READERS: Final[dict[Surface, type[_Follower]]] = {
    "embeddings": EmbeddingsReader,
    "messages": MessagesReader,
    "count_tokens": CountReader,
    "responses": ResponsesReader,
}
_CUTS: Final[dict[Surface, wire.Normalise]] = {
    "messages": usage.from_anthropic,
    "responses": usage.from_responses,
}


def reader_of(
    surface: Surface,
    *,
    backend: str,
    normalise: wire.Normalise,
    usage_source: UsageSource,
    scrub: Callable[[str], str],
) -> Reader:
    """The reader of one answer on this surface."""
    kind: Any = _READERS.get(surface, wire.AnswerReader)
    reader: Reader = kind(
        backend=backend,
        normalise=_CUTS.get(surface, normalise),
        usage_source=usage_source,
        scrub=scrub,
    )
    return reader
