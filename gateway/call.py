"""One request as it arrived, and what it asks for. Knows the wire's fields, not HTTP."""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct, field, structs

from backends.base import Previous
from gateway import soundness
from gateway.auth import Credential, read_credential
from gateway.errors import BadRequest, GatewayError
from gateway.wire import (
    Body,
    ChatBody,
    CompletionBody,
    CountBody,
    EmbeddingsBody,
    MessagesBody,
    ResponsesBody,
)
from telemetry.ids import RequestId
from telemetry.record import Surface

_DECODERS: dict[Surface, msgspec.json.Decoder[Any]] = {
    "chat": msgspec.json.Decoder(ChatBody),
    "completions": msgspec.json.Decoder(CompletionBody),
    "embeddings": msgspec.json.Decoder(EmbeddingsBody),
    "responses": msgspec.json.Decoder(ResponsesBody),
    "messages": msgspec.json.Decoder(MessagesBody),
    "count_tokens": msgspec.json.Decoder(CountBody),
}
_VALIDATION = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)

_JSON_SCHEMA = b'"json_schema"'
_JSON_OBJECT = b'"json_object"'
_NOTHING: frozenset[str] = frozenset()
_EMBEDDINGS: frozenset[str] = frozenset({"embeddings"})

# A token of English text is about four bytes. Only a first estimate: settled with the truth.
BYTES_PER_TOKEN = 4


async def _nobody() -> bool:
    return False


class Presence:
    """Whether the client is still there. Set by the edge, read at settlement.

    `ask_to_stop` is the pipeline's: it tells whoever generates that nobody reads on. True: the
    answer will end by itself and say what it took; False: it must be cut off."""

    __slots__ = ("ask_to_stop", "gone")

    def __init__(self) -> None:
        self.gone = False
        self.ask_to_stop: Callable[[], Awaitable[bool]] = _nobody


class Asked(Struct, frozen=True, kw_only=True):
    """What the body asks for."""

    model: str
    stream: bool
    include_usage: bool  # the client wants the usage event at the end of its stream
    choices: int
    output_limit: int | None  # tokens, all choices together, if the client set a limit
    input_estimate: int  # tokens
    needs: frozenset[str] = frozenset()  # what not every model can do (`gateway.config.Need`)
    text_bytes: int = 0  # of the body, media left out
    images: int = 0  # and other media parts
    user: str | None = None  # the end user, as the client names them
    previous: str | None = None  # id of the response that this one goes on from
    stores: bool = False  # the answer is to be kept for such an id

    def going_on_from(self, previous: Previous | None) -> "Asked":
        """With the earlier conversation, which is read again."""
        if previous is None:
            return self
        return structs.replace(
            self,
            text_bytes=self.text_bytes + previous.size,
            input_estimate=self.input_estimate + previous.size // BYTES_PER_TOKEN,
        )


class Call(Struct, frozen=True, kw_only=True):
    """One request: the client's bytes, and what its headers say."""

    request_id: RequestId
    surface: Surface
    body: bytes
    headers: Iterable[tuple[bytes, bytes]]  # as ASGI gives them, names in lower case
    presence: Presence
    traceparent: str | None = None
    client_request_id: str | None = None
    vendor_headers: tuple[tuple[bytes, bytes], ...] = ()  # the client's, that may go upstream
    fault: GatewayError | None = None  # why the body could not be taken
    answer_headers: dict[str, str] = field(default_factory=dict)  # what stages add to any answer

    def credential(self) -> Credential:
        """The key it came with. Raises Unauthenticated."""
        return read_credential(self.headers)

    def parse(self) -> Asked:
        """Check the body and read the view. Raises BadRequest with the path of the field."""
        if self.fault is not None:
            raise self.fault
        soundness.check(self.body)  # of fields that nobody reads too: they go upstream
        try:
            view: Body = _DECODERS[self.surface].decode(self.body)
        except msgspec.ValidationError as error:
            raise _wrong_field(error) from None
        except (msgspec.DecodeError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise BadRequest(
                f"The request body is not valid JSON: {reason}.", code="invalid_json"
            ) from None
        if isinstance(view, ChatBody | CompletionBody):
            return self._asked_of_chat(view)
        if isinstance(view, EmbeddingsBody):
            return self._asked(view, needs=_EMBEDDINGS, output_limit=0, user=_user(view))
        if isinstance(view, ResponsesBody):
            return self._asked_of_responses(view)
        return self._asked_of_messages(view)

    def _asked(
        self,
        view: Body,
        *,
        needs: frozenset[str],
        output_limit: int | None,
        user: str | None,
        stream: bool | None = None,
        media: tuple[int, int] = (0, 0),
        previous: str | None = None,
        stores: bool = False,
    ) -> Asked:
        images, media_bytes = media
        return Asked(
            model=view.model,
            stream=bool(stream),
            include_usage=False,
            choices=1,
            output_limit=output_limit,
            input_estimate=len(self.body) // BYTES_PER_TOKEN,
            needs=needs,
            text_bytes=len(self.body) - media_bytes,
            images=images,
            user=user,
            previous=previous,
            stores=stores,
        )

    def _asked_of_chat(self, view: ChatBody | CompletionBody) -> Asked:
        limit = view.max_tokens
        if isinstance(view, ChatBody) and view.max_completion_tokens is not None:
            limit = view.max_completion_tokens
        choices = view.n or 1
        options = view.stream_options
        images, media_bytes = _media(view) if isinstance(view, ChatBody) else (0, 0)
        return Asked(
            model=view.model,
            stream=bool(view.stream),
            include_usage=bool(options and options.include_usage),
            choices=choices,
            output_limit=None if limit is None else limit * choices,
            input_estimate=len(self.body) // BYTES_PER_TOKEN,
            needs=_needs(view),
            text_bytes=len(self.body) - media_bytes,
            images=images,
            user=view.safety_identifier or view.user,
        )

    def _asked_of_messages(self, view: CountBody) -> Asked:
        needs = ["tools"] if view.tools else []
        if view.output_config and not _is_null(view.output_config.get("format")):
            needs.append("json_schema")
        media = [0, 0]
        for turn in view.messages:
            _add_media(turn.content, media)
        return self._asked(
            view,
            needs=frozenset(needs),
            output_limit=view.max_tokens if isinstance(view, MessagesBody) else 0,
            user=view.metadata.user_id
            if isinstance(view, MessagesBody) and view.metadata
            else None,
            stream=isinstance(view, MessagesBody) and view.stream,
            media=(media[0], media[1]),
        )

    def _asked_of_responses(self, view: ResponsesBody) -> Asked:
        needs = ["tools"] if view.tools else []
        if view.top_logprobs:
            needs.append("logprobs")
        written = view.text and view.text.format
        if written and bytes(written.get("type", b"")) == _JSON_SCHEMA:
            needs.append("json_schema")
        media = [0, 0]
        if not isinstance(view.input, str):
            for item in view.input:
                _add_media(_parts(item.get("content")), media)
                _add_media(_parts(item.get("output")), media)
        _refuse_foreign_state(view)
        return self._asked(
            view,
            needs=frozenset(needs),
            output_limit=view.max_output_tokens,
            user=_user(view),
            stream=view.stream,
            media=(media[0], media[1]),
            previous=view.previous_response_id,
            stores=view.store is not False,
        )


def _user(view: EmbeddingsBody | ResponsesBody) -> str | None:
    return view.safety_identifier or view.user


def _is_null(value: Raw | None) -> bool:
    return value is None or bytes(value) == b"null"


def _refuse_foreign_state(view: ResponsesBody) -> None:
    """What a backend keeps under an id of its own belongs to its account, which all tenants share,
    and what it does in the background is not counted: neither is asked for."""
    if view.background:
        raise BadRequest(
            "`background` is not supported: an answer is made while its request waits.",
            param="background",
            code="unsupported_parameter",
        )
    if view.conversation is not None:
        raise BadRequest(
            "`conversation` is not supported: send the turns, or `previous_response_id`.",
            param="conversation",
            code="unsupported_parameter",
        )
    if isinstance(view.input, str):
        return
    for place, item in enumerate(view.input):
        if bytes(item.get("type", b"")) == b'"item_reference"':
            raise BadRequest(
                "`item_reference` is not supported: send the item itself.",
                param=f"input[{place}]",
                code="unsupported_parameter",
            )


def _needs(view: ChatBody | CompletionBody) -> frozenset[str]:
    needs = [] if isinstance(view, ChatBody) else ["completions"]
    if (view.n or 1) > 1:
        needs.append("n")
    if view.logprobs:
        needs.append("logprobs")
    if isinstance(view, ChatBody):
        if view.tools:
            needs.append("tools")
        if view.response_format:
            written = bytes(view.response_format.get("type", b""))
            if written in (_JSON_SCHEMA, _JSON_OBJECT):
                needs.append("json_schema" if written == _JSON_SCHEMA else "json_object")
    return frozenset(needs) if needs else _NOTHING


def _media(view: ChatBody) -> tuple[int, int]:
    """How many parts are not text, and how many bytes of the body they take."""
    count = size = 0
    for message in view.messages:
        if isinstance(message.content, list):
            for part in message.content:
                if "text" not in part:
                    count += 1
                    size += sum(len(memoryview(value)) for value in part.values())
    return count, size


_MEDIA: frozenset[bytes] = frozenset(
    f'"{kind}"'.encode() for kind in ("image", "document", "input_image", "input_file")
)


def _add_media(content: str | list[dict[str, Raw]] | None, found: list[int]) -> None:
    """Add to `found` how many parts hold media, and the bytes of these. A tool's result may hold
    parts of its own."""
    if not isinstance(content, list):
        return
    for part in content:
        kind = bytes(part.get("type", b""))
        if kind in _MEDIA:
            found[0] += 1
            found[1] += sum(len(memoryview(value)) for value in part.values())
        elif kind == b'"tool_result"':
            _add_media(_parts(part.get("content")), found)


_decode_parts = msgspec.json.Decoder(list[dict[str, Raw]]).decode


def _parts(content: Raw | None) -> list[dict[str, Raw]] | None:
    """A list of parts that is not decoded yet; None for text, and for what is no such list."""
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return None
    try:
        return _decode_parts(content)
    except msgspec.MsgspecError:
        return None


def _wrong_field(error: msgspec.ValidationError) -> BadRequest:
    """`$.messages[0].role` becomes the param `messages[0].role`, as the real API writes it."""
    match = _VALIDATION.match(str(error))
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    missing = re.match(r"Object missing required field `([^`]*)`", what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(
            f"Missing required parameter: '{path}'.",
            param=path,
            code="missing_required_parameter",
        )
    where = f" for '{path}'" if path else ""
    return BadRequest(
        f"Invalid value{where}: {what[:1].lower()}{what[1:]}.",
        param=path or None,
        code="array_above_max_length"
        if "`array` of length <=" in what
        else "invalid_value"
        if "`int` >=" in what or "`int` <=" in what
        else "invalid_type",
    )
