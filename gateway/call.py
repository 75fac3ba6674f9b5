"""One request as it arrived, and what it asks for. Knows the wire's fields, not HTTP."""

import re
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from msgspec import Struct, field

from gateway.auth import Credential, read_credential
from gateway.errors import BadRequest, GatewayError
from gateway.wire import ChatBody, CompletionBody
from telemetry.ids import RequestId
from telemetry.record import Surface

_DECODERS: dict[Surface, msgspec.json.Decoder[ChatBody] | msgspec.json.Decoder[CompletionBody]] = {
    "chat": msgspec.json.Decoder(ChatBody),
    "completions": msgspec.json.Decoder(CompletionBody),
}
_VALIDATION = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)

_JSON_SCHEMA = b'"json_schema"'
_NOTHING: frozenset[str] = frozenset()

# A token of English text is about four bytes. Only a first estimate: settled with the truth.
BYTES_PER_TOKEN = 4
ALLOW_DEGRADE = b"x-meterline-allow-degrade"


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


class Call(Struct, frozen=True, kw_only=True):
    """One request: the client's bytes, and what its headers say."""

    request_id: RequestId
    surface: Surface
    body: bytes
    headers: Iterable[tuple[bytes, bytes]]  # as ASGI gives them, names in lower case
    presence: Presence
    traceparent: str | None = None
    client_request_id: str | None = None
    fault: GatewayError | None = None  # why the body could not be taken
    answer_headers: dict[str, str] = field(default_factory=dict)  # what stages add to any answer

    def credential(self) -> Credential:
        """The key it came with. Raises Unauthenticated."""
        return read_credential(self.headers)

    def may_degrade(self) -> bool:
        """Whether the client takes less than it asked for rather than nothing."""
        return not any(
            name == ALLOW_DEGRADE and value.strip().lower() == b"false"
            for name, value in self.headers
        )

    def parse(self) -> Asked:
        """Check the body and read the view. Raises BadRequest with the path of the field."""
        if self.fault is not None:
            raise self.fault
        try:
            self.body.decode()  # a field that nobody reads must be UTF-8 too: it goes upstream
        except UnicodeDecodeError as error:
            raise BadRequest(
                f"The request body is not valid UTF-8 (byte {error.start}).", code="invalid_json"
            ) from None
        try:
            view = _DECODERS[self.surface].decode(self.body)
        except msgspec.ValidationError as error:
            raise _wrong_field(error) from None
        except (msgspec.DecodeError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise BadRequest(
                f"The request body is not valid JSON: {reason}.", code="invalid_json"
            ) from None
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


def _needs(view: ChatBody | CompletionBody) -> frozenset[str]:
    needs = []
    if (view.n or 1) > 1:
        needs.append("n")
    if view.logprobs:
        needs.append("logprobs")
    if isinstance(view, ChatBody):
        if view.tools:
            needs.append("tools")
        if view.response_format and bytes(view.response_format.get("type", b"")) == _JSON_SCHEMA:
            needs.append("json_schema")
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
        code="invalid_value" if "`int` >=" in what or "`int` <=" in what else "invalid_type",
    )
