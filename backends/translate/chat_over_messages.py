"""A chat completion asked of a server that speaks Anthropic's messages. Pure.

Reference: https://docs.claude.com/en/api/messages and …/messages-streaming.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw, structs
from typing_extensions import override

from backends import base
from backends.base import ChatRequest, Chunk, Event, Whole
from backends.settings import Dialect
from backends.translate.common import (
    Json,
    Translator,
    Untranslatable,
    compact,
    encode,
    id_of,
    is_object,
    openai_usage,
)
from backends.translate.shapes import (
    Block,
    ChatAsked,
    ChatMessage,
    ChatPart,
    ChatTool,
    Message,
    MessageEvent,
    ResponseFormat,
    ToolChoice,
    given,
)

_read: Final = msgspec.json.Decoder(ChatAsked).decode
_read_event: Final = msgspec.json.Decoder(MessageEvent).decode
_read_message: Final = msgspec.json.Decoder(Message).decode

_NO_SCHEMA: Final = Raw(b'{"type":"object","properties":{}}')
_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_CHOICES: Final = {"auto": "auto", "none": "none", "required": "any"}
_TIERS: Final = {"auto": "auto", "default": "standard_only"}


class ChatOverMessages(Translator):
    """One chat. A stream becomes chunks of one choice; blocks of tools become its tool calls."""

    target = "messages"

    def __init__(self, request: ChatRequest, dialect: Dialect) -> None:
        super().__init__(request, dialect)
        self._id = id_of("chatcmpl-", None, request.request_id)
        self._model = request.model
        self._calls = 0  # tool calls begun
        self._has_arguments = False  # of the running call
        self._running: Block | None = None

    @override
    def body(self) -> bytes:
        asked = _read(self.request.body)
        _refuse(asked)
        limit = asked.max_completion_tokens or asked.max_tokens or self.dialect.max_tokens
        system, turns = _turns(asked.messages)
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        user = asked.safety_identifier or asked.user
        config, thinking = _thinking(asked)
        # Above 1 there is nothing; and what thinks takes no temperature.
        temperature = None if asked.temperature is None else min(asked.temperature, 1.0)
        return encode(
            compact(
                {
                    "model": self.request.model,
                    "max_tokens": limit,
                    "system": system or None,
                    "messages": turns,
                    "stream": True if self.request.stream else None,
                    "stop_sequences": stop or None,
                    "temperature": None if thinking is not None else temperature,
                    "top_p": None if thinking is not None else asked.top_p,
                    "top_k": asked.top_k,
                    "tools": [_tool(tool, at) for at, tool in enumerate(asked.tools or ())] or None,
                    "tool_choice": _choice(asked),
                    "thinking": thinking,
                    "output_config": config or None,
                    "service_tier": _TIERS.get(asked.service_tier or ""),
                    "metadata": {"user_id": user} if user else None,
                }
            )
        )

    # -- whole

    @override
    def whole(self, whole: Whole, final: base.Final) -> list[Event]:
        message = _read_message(whole.data)
        calls: list[Json] = []
        text: list[str] = []
        thought: list[str] = []
        for block in message.content:
            if block.type == "text":
                text.append(block.text)
            elif block.type == "thinking":
                thought.append(block.thinking)
            elif block.type == "tool_use":
                calls.append(_call(block, _input(block)))
        answered: Json = {
            "role": "assistant",
            "content": "".join(text) if text or not calls else None,
            "refusal": None,
        }
        if thought:
            answered["reasoning_content"] = "".join(thought)
        if calls:
            answered["tool_calls"] = calls
        body: Json = {
            "id": id_of("chatcmpl-", message.id, self.request.request_id),
            "object": "chat.completion",
            "created": self.request.created_s,
            "model": message.model or self._model,
            "choices": [
                {
                    "index": 0,
                    "message": answered,
                    "logprobs": None,
                    "finish_reason": _reason(message.stop_reason),
                }
            ],
        }
        if final.usage is not None:
            body["usage"] = openai_usage(final.usage)
        ended = structs.replace(final, finish_reasons=(_reason(message.stop_reason),))
        return [Whole(encode(body), whole.content_bytes), ended]

    # -- streamed

    @override
    def chunk(self, chunk: Chunk) -> list[Event]:
        event = _read_event(chunk.data)
        match event.type:
            case "message_start" if event.message is not None:
                self._id = id_of("chatcmpl-", event.message.id, self.request.request_id)
                self._model = event.message.model or self._model
                return [self._chunk({"role": "assistant", "content": ""})]
            case "content_block_start" if event.content_block is not None:
                return self._begun(event.content_block, chunk.content_bytes)
            case "content_block_delta" if event.delta is not None:
                delta = event.delta
                if delta.text:
                    return [self._chunk({"content": delta.text}, chunk.content_bytes)]
                if delta.thinking:
                    said = {"reasoning_content": delta.thinking}
                    return [self._chunk(said, chunk.content_bytes)]
                if delta.partial_json and self._running is not None:
                    self._has_arguments = True
                    return [self._arguments(delta.partial_json, chunk.content_bytes)]
            case "content_block_stop" if self._running is not None:
                block, self._running = self._running, None
                if not self._has_arguments:  # a call without any, or given whole at its start
                    return [self._arguments(_input(block), 0)]
            case "message_delta" if event.delta is not None and event.delta.stop_reason:
                return [self._chunk({}, finish_reason=_reason(event.delta.stop_reason))]
        return []

    @override
    def final(self, final: base.Final) -> list[Event]:
        usage = None
        if final.usage is not None:
            usage = encode(
                {**self._head(), "choices": [], "usage": openai_usage(final.usage)},
            )
        reasons = tuple(map(_reason, final.finish_reasons))
        return [structs.replace(final, usage_chunk=usage, last=None, finish_reasons=reasons)]

    def _begun(self, block: Block, content_bytes: int) -> list[Event]:
        if block.type == "text" and block.text:
            return [self._chunk({"content": block.text}, content_bytes)]
        if block.type == "thinking" and block.thinking:
            return [self._chunk({"reasoning_content": block.thinking}, content_bytes)]
        if block.type != "tool_use":
            return []  # what the vendor's own tools do; their text comes in blocks of text
        self._running, self._has_arguments = block, False
        self._calls += 1
        call = {"index": self._calls - 1, **_call(block, "")}
        return [self._chunk({"tool_calls": [call]}, content_bytes)]

    def _arguments(self, text: str, content_bytes: int) -> Chunk:
        call = {"index": self._calls - 1, "function": {"arguments": text}}
        return self._chunk({"tool_calls": [call]}, content_bytes)

    def _head(self) -> Json:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self.request.created_s,
            "model": self._model,
        }

    def _chunk(
        self, delta: Json, content_bytes: int = 0, finish_reason: str | None = None
    ) -> Chunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return Chunk(encode({**self._head(), "choices": [choice]}), content_bytes)


def _reason(stop_reason: str | None) -> str:
    return _REASONS.get(stop_reason or "", "stop")


def _input(block: Block) -> str:
    return bytes(block.input).decode() if given(block.input) else "{}"


def _call(block: Block, arguments: str) -> Json:
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


# --- the request ------------------------------------------------------------------------------


def _refuse(asked: ChatAsked) -> None:
    if (asked.n or 1) > 1:
        raise Untranslatable("This model gives one choice only: `n` must be 1.", param="n")
    if asked.logprobs:
        raise Untranslatable("This model gives no log probabilities.", param="logprobs")
    if asked.logit_bias:
        raise Untranslatable("This model takes no `logit_bias`.", param="logit_bias")
    if given(asked.functions):
        raise Untranslatable("`functions` is not supported here: use `tools`.", param="functions")
    if asked.modalities and asked.modalities != ["text"]:
        raise Untranslatable("This model answers in text only.", param="modalities")


def _thinking(asked: ChatAsked) -> tuple[Json, Raw | Json | None]:
    """`output_config` and `thinking`. A client may say Anthropic's `thinking` itself."""
    config: Json = {}
    schema = _format(asked.response_format)
    if schema is not None:
        config["format"] = {"type": "json_schema", "schema": schema}
    if given(asked.thinking):
        return config, asked.thinking
    if asked.reasoning_effort in (None, "none", "minimal"):
        return config, None
    config["effort"] = asked.reasoning_effort
    return config, {"type": "adaptive"}


def _format(wanted: ResponseFormat | None) -> Raw | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.json_schema and given(wanted.json_schema.schema):
        return wanted.json_schema.schema
    raise Untranslatable(
        f"This model has no response_format '{wanted.type[:40]}': give a `json_schema`.",
        param="response_format",
    )


def _tool(tool: ChatTool, place: int) -> Json:
    function = tool.function
    if tool.type != "function" or function is None:
        raise Untranslatable(
            f"This model takes tools of type 'function' only, not '{tool.type[:40]}'.",
            param=f"tools[{place}].type",
        )
    schema = function.parameters
    is_empty = not given(schema) or bytes(schema) == b"{}"
    made: Json = compact(
        {
            "name": function.name,
            "description": function.description,
            "input_schema": _NO_SCHEMA if is_empty else schema,
            "strict": True if function.strict else None,
        }
    )
    if given(tool.cache_control):
        made["cache_control"] = tool.cache_control
    return made


def _choice(asked: ChatAsked) -> Json | None:
    wanted = asked.tool_choice
    made: Json | None = None
    if isinstance(wanted, str):
        if wanted not in _CHOICES:
            raise Untranslatable("Unknown `tool_choice`.", param="tool_choice")
        made = {"type": _CHOICES[wanted]}
    elif isinstance(wanted, ToolChoice):
        if wanted.type != "function" or wanted.function is None:
            raise Untranslatable(
                f"This model has no tool_choice '{wanted.type[:40]}'.", param="tool_choice"
            )
        made = {"type": "tool", "name": wanted.function.name}
    if asked.parallel_tool_calls is False and asked.tools:
        made = made or {"type": "auto"}
        if made["type"] != "none":
            made["disable_parallel_tool_use"] = True
    return made


def _turns(messages: list[ChatMessage]) -> tuple[list[Json], list[Json]]:
    """System blocks, and turns. Messages of one side in a row are one turn, so that the results of
    parallel calls stand together, before what the user says next."""
    system: list[Json] = []
    turns: list[Json] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        match message.role:
            case "system" | "developer":
                system += _blocks(message, where)
                continue
            case "user":
                role, blocks = "user", list(_blocks(message, where))
            case "assistant":
                role, blocks = "assistant", list(_answered(message, where))
            case "tool":
                role, blocks = "user", [_result(message, where)]
            case _:
                raise Untranslatable(
                    f"This model has no role '{message.role[:40]}'.", param=f"{where}.role"
                )
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _blocks(message: ChatMessage, where: str) -> Iterator[Json]:
    content = message.content
    if isinstance(content, str):
        if content:
            yield {"type": "text", "text": content}
        return
    for place, part in enumerate(content or ()):
        block = _block(part, f"{where}.content[{place}]")
        if given(part.cache_control):
            block["cache_control"] = part.cache_control
        yield block


def _block(part: ChatPart, where: str) -> Json:
    match part.type:
        case "text":
            return {"type": "text", "text": part.text}
        case "refusal":
            return {"type": "text", "text": part.refusal}
        case "image_url" if part.image_url is not None:
            return {"type": "image", "source": _source(part.image_url.url, where)}
        case "file" if part.file is not None and part.file.file_data:
            made: Json = {"type": "document", "source": _source(part.file.file_data, where)}
            if part.file.filename:
                made["title"] = part.file.filename
            return made
    raise Untranslatable(
        f"This model takes no content of type '{part.type[:40]}' in this form.", param=where
    )


def _source(url: str, where: str) -> Json:
    if url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    head, comma, data = url.partition(",")
    media, semicolon, coding = head.removeprefix("data:").rpartition(";")
    if not head.startswith("data:") or not comma or not semicolon or coding != "base64":
        raise Untranslatable("Give an https URL, or a data URL in base64.", param=where)
    return {"type": "base64", "media_type": media.partition(";")[0], "data": data}


def _answered(message: ChatMessage, where: str) -> Iterator[Json]:
    if given(message.function_call):
        raise Untranslatable(
            "`function_call` is not supported here: use `tool_calls`.",
            param=f"{where}.function_call",
        )
    yield from _blocks(message, where)
    if message.refusal:
        yield {"type": "text", "text": message.refusal}
    for place, call in enumerate(message.tool_calls or ()):
        if call.function is None:
            raise Untranslatable(
                f"This model has no calls of type '{call.type[:40]}'.",
                param=f"{where}.tool_calls[{place}].type",
            )
        arguments = call.function.arguments or "{}"
        if not is_object(arguments):
            raise Untranslatable(
                "The arguments are not a JSON object.",
                param=f"{where}.tool_calls[{place}].function.arguments",
            )
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.function.name,
            "input": Raw(arguments.encode()),
        }


def _result(message: ChatMessage, where: str) -> Json:
    return {
        "type": "tool_result",
        "tool_use_id": message.tool_call_id or "",
        "content": list(_blocks(message, where)),
    }
