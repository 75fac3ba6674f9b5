"""The fields of both APIs that the translators read. What is not named here is either a hint that
another API cannot take, or is refused by name (docs/reference/surfaces.md lists both)."""

from typing import Any, Final

from msgspec import Raw, Struct

ABSENT: Final = Raw()


def given(value: Raw) -> bool:
    """Whether a field is there, and not null."""
    return value is not ABSENT and bytes(value) != b"null"


# --- chat -------------------------------------------------------------------------------------


class ImageUrl(Struct, frozen=True):
    url: str
    detail: str | None = None


class File(Struct, frozen=True):
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class ChatPart(Struct, frozen=True):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: ImageUrl | None = None
    file: File | None = None
    cache_control: Raw = ABSENT  # Anthropic's, passed on where it is understood


class Function(Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    id: str = ""
    type: str = "function"
    function: Function | None = None


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[ChatPart] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Raw = ABSENT


class FunctionTool(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class ChatTool(Struct, frozen=True):
    type: str
    function: FunctionTool | None = None
    cache_control: Raw = ABSENT


class JsonSchema(Struct, frozen=True):
    schema: Raw = ABSENT


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchema | None = None


class ChosenFunction(Struct, frozen=True):
    name: str = ""


class ToolChoice(Struct, frozen=True):
    type: str
    function: ChosenFunction | None = None


class ChatAsked(Struct, frozen=True):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Raw = ABSENT
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    modalities: list[str] | None = None
    top_k: int | None = None  # Anthropic's, as extra fields of a chat
    thinking: Raw = ABSENT


class Delta(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list["CallDelta"] | None = None


class CallDelta(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: Function | None = None


class AnsweredMessage(Struct, frozen=True):
    content: str | list[ChatPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Struct, frozen=True):
    index: int = 0
    delta: Delta | None = None
    message: AnsweredMessage | None = None
    finish_reason: str | None = None
    logprobs: Raw = ABSENT


class ChatAnswer(Struct, frozen=True):
    """A whole answer, or a chunk of one."""

    choices: list[Choice]
    id: str | None = None
    model: str | None = None
    created: int | None = None
    service_tier: str | None = None


# --- messages ---------------------------------------------------------------------------------


class Source(Struct, frozen=True):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: Any = None


class Block(Struct, frozen=True):
    type: str
    text: str = ""
    thinking: str = ""
    source: Source | None = None
    title: str | None = None
    id: str = ""
    name: str = ""
    input: Raw = ABSENT
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class Turn(Struct, frozen=True):
    role: str
    content: str | list[Block]


class MessageTool(Struct, frozen=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: bool | None = None


class MessageToolChoice(Struct, frozen=True):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Metadata(Struct, frozen=True):
    user_id: str | None = None


class Thinking(Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


class OutputFormat(Struct, frozen=True):
    type: str
    schema: Raw = ABSENT


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesAsked(Struct, frozen=True):
    messages: list[Turn]
    max_tokens: int
    system: str | list[Block] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    metadata: Metadata | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Raw = ABSENT
    container: Raw = ABSENT


class BlockDelta(Struct, frozen=True):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class Message(Struct, frozen=True):
    content: list[Block]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None


class MessageEvent(Struct, frozen=True):
    type: str
    index: int = 0
    message: Message | None = None
    content_block: Block | None = None
    delta: BlockDelta | None = None


# --- responses --------------------------------------------------------------------------------


class ResponsePart(Struct, frozen=True):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


class InputItem(Struct, frozen=True):
    type: str = "message"
    role: str = ""
    content: str | list[ResponsePart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[ResponsePart] | None = None


class ResponseTool(Struct, frozen=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class NamedTool(Struct, frozen=True):
    type: str
    name: str = ""


class TextFormat(Struct, frozen=True):
    type: str
    name: str = "output"
    schema: Raw = ABSENT
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True):
    effort: str | None = None


class ResponsesAsked(Struct, frozen=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    prompt: Raw = ABSENT
    top_logprobs: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
