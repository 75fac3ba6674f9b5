"""What we read of a request body, exactly as it is on the wire.

A view, not a copy: the client's bytes go upstream as they came, so a field that is not named here
survives untouched. A field that is named is checked for its type, so that a wrong one is a 400
with its path before anything is spent.
Reference: https://platform.openai.com/docs/api-reference/chat and …/completions.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

MAX_MESSAGES = 8192  # four times what the real API takes

Json = Any
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class Message(Struct, frozen=True):
    """One message; its content is text or a list of parts, and is passed on unread."""

    role: str
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Raw]] | None = None
    tool_call_id: str | None = None


class Sampling(Struct, frozen=True, kw_only=True):
    """Fields that both surfaces share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None


class ChatBody(Sampling, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Raw]] | None = None
    response_format: dict[str, Raw] | None = None


class CompletionBody(Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`. A prompt is text, a list of texts, token ids, or lists of ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class EmbeddingsBody(Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. Input is text, token ids, or a list of either."""

    model: str
    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=100_000)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None
    safety_identifier: str | None = None


class Turn(Struct, frozen=True):
    """One message of the messages API; its content is passed on unread."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Raw]]


class Metadata(Struct, frozen=True):
    user_id: str | None = None


class CountBody(Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`.
    Reference: https://docs.claude.com/en/api/messages-count-tokens."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[dict[str, Raw]] | None = None
    tools: list[dict[str, Raw]] | None = None
    output_config: dict[str, Raw] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`POST /v1/messages`. Reference: https://docs.claude.com/en/api/messages."""

    max_tokens: Positive
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None


class TextOptions(Struct, frozen=True):
    format: dict[str, Raw] | None = None


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`.
    Reference: https://platform.openai.com/docs/api-reference/responses."""

    model: str
    input: str | Annotated[list[dict[str, Raw]], Meta(min_length=1)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Json = None
    tools: list[dict[str, Raw]] | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    safety_identifier: str | None = None


Body = ChatBody | CompletionBody | EmbeddingsBody | MessagesBody | CountBody | ResponsesBody


class Model(Struct, frozen=True, kw_only=True):
    """One entry of `GET /v1/models`."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "meterline"


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model]
    object: str = "list"


class AnthropicModel(Struct, frozen=True, kw_only=True):
    """One entry of the list as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: str
    type: str = "model"


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class Problem(Struct, frozen=True, kw_only=True):
    """The inside of every error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """Every error of every route: openai-python reads `body.error`."""

    error: Problem
