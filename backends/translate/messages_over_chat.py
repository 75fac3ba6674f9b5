"""A message of Anthropic's API asked of a server that speaks chat completions. Pure.

Reference: https://platform.openai.com/docs/api-reference/chat.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import structs
from typing_extensions import override

from backends import base
from backends.base import ChatRequest, Chunk, Event, Whole
from backends.settings import Dialect
from backends.translate.common import (
    Json,
    Translator,
    Untranslatable,
    anthropic_usage,
    chat_tool,
    compact,
    encode,
    id_of,
    is_object,
)
from backends.translate.shapes import (
    AnsweredMessage,
    Block,
    CallDelta,
    ChatAnswer,
    Delta,
    MessagesAsked,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    Source,
    Thinking,
    Turn,
    given,
)

_read: Final = msgspec.json.Decoder(MessagesAsked).decode
_read_answer: Final = msgspec.json.Decoder(ChatAnswer).decode

_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_CHOICES: Final = {"auto": "auto", "none": "none", "any": "required"}
LOW_THINKING: Final = 4_096  # tokens of budget up to which an effort is called low
HIGH_THINKING: Final = 16_384  # and from which it is called high


class MessagesOverChat(Translator):
    """One message. A stream's content becomes blocks, one open at a time."""

    target = "chat"

    def __init__(self, request: ChatRequest, dialect: Dialect) -> None:
        super().__init__(request, dialect)
        self._begun = False
        self._blocks = 0  # begun
        self._open: str | int | None = None  # kind of the open block; the index of an open call
        self._calls: set[int] = set()  # indices of calls that were begun
        self._reason: str | None = None
        self._content_bytes = 0

    @override
    def body(self) -> bytes:
        asked = _read(self.request.body)
        for name in ("mcp_servers", "container"):
            if given(getattr(asked, name)):
                raise Untranslatable(f"This model has no `{name}`.", param=name)
        messages = [*_system(asked.system), *_messages(asked.messages)]
        user = asked.metadata.user_id if asked.metadata else None
        choice = asked.tool_choice
        return encode(
            compact(
                {
                    "model": self.request.model,
                    "messages": messages,
                    self.dialect.limit_field: asked.max_tokens,
                    "stream": True if self.request.stream else None,
                    "stream_options": {"include_usage": True} if self.request.stream else None,
                    "temperature": asked.temperature,
                    "top_p": asked.top_p,
                    "stop": asked.stop_sequences or None,
                    "tools": [_tool(tool, at) for at, tool in enumerate(asked.tools or ())] or None,
                    "tool_choice": None if choice is None else _choice(choice),
                    "parallel_tool_calls": False
                    if choice is not None and choice.disable_parallel_tool_use
                    else None,
                    "response_format": _format(asked.output_config),
                    "reasoning_effort": _effort(asked.thinking, asked.output_config),
                    "user": user,
                }
            )
        )

    # -- whole

    @override
    def whole(self, whole: Whole, final: base.Final) -> list[Event]:
        answer = _read_answer(whole.data)
        if not answer.choices or answer.choices[0].message is None:
            raise Untranslatable("there is no message")
        choice = answer.choices[0]
        content = list(_content(answer.choices[0].message))
        has_calls = any(block["type"] == "tool_use" for block in content)
        reason = _stop_reason(choice.finish_reason, has_calls=has_calls)
        body = self._message(
            answer, content, reason, anthropic_usage(final.usage, content_bytes=whole.content_bytes)
        )
        ended = structs.replace(final, finish_reasons=(reason,))
        return [Whole(encode(body), whole.content_bytes), ended]

    def _message(
        self, answer: ChatAnswer, content: Sequence[Json], reason: str | None, usage: Json
    ) -> Json:
        return {
            "id": id_of("msg_", answer.id, self.request.request_id),
            "type": "message",
            "role": "assistant",
            "model": answer.model or self.request.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }

    # -- streamed

    @override
    def chunk(self, chunk: Chunk) -> list[Event]:
        answer = _read_answer(chunk.data)
        made: list[Event] = []
        if not self._begun:
            self._begin(answer, made)
        self._content_bytes += chunk.content_bytes
        left = chunk.content_bytes  # counted once, on the first event that carries content
        for choice in answer.choices:
            if choice.index:
                continue
            if choice.delta is not None:
                for event in self._said(choice.delta):
                    is_content = event.event == "content_block_delta"
                    made.append(structs.replace(event, content_bytes=left) if is_content else event)
                    left = 0 if is_content else left
            if choice.finish_reason is not None:
                has_calls = bool(self._calls)
                self._reason = _stop_reason(choice.finish_reason, has_calls=has_calls)
        return made

    @override
    def final(self, final: base.Final) -> list[Event]:
        made: list[Event] = []
        if not self._begun:
            self._begin(ChatAnswer(choices=[]), made)
        made += self._stop()
        usage = anthropic_usage(final.usage, content_bytes=self._content_bytes)
        reason = self._reason or "end_turn"
        delta = {"stop_reason": reason, "stop_sequence": None}
        made.append(_event({"type": "message_delta", "delta": delta, "usage": usage}))
        last = _event({"type": "message_stop"})
        made.append(structs.replace(final, last=last, usage_chunk=None, finish_reasons=(reason,)))
        return made

    def _begin(self, answer: ChatAnswer, made: list[Event]) -> None:
        """The usage of a beginning is not known yet: that of the end holds, as it is cumulative."""
        self._begun = True
        message = self._message(answer, [], None, {"input_tokens": 0, "output_tokens": 0})
        made.append(_event({"type": "message_start", "message": message}))

    def _said(self, delta: Delta) -> Iterator[Chunk]:
        if thought := delta.reasoning_content or delta.reasoning:
            yield from self._block(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.content or delta.refusal:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.tool_calls or ():
            yield from self._called(call)

    def _called(self, call: CallDelta) -> Iterator[Chunk]:
        function = call.function
        if call.index not in self._calls:
            self._calls.add(call.index)
            name = function.name if function is not None else ""
            identity = call.id or f"toolu_{self.request.request_id.replace('-', '')}{call.index}"
            begun = {"type": "tool_use", "id": identity, "name": name, "input": {}}
            yield from self._block(call.index, begun)
        elif self._open != call.index:
            # Blocks follow each other here. No server known interleaves calls; one that did would
            # be cut off with an error rather than have its calls mixed up.
            raise Untranslatable("a call goes on after the next one has begun")
        if function is not None and function.arguments:
            said = {"type": "input_json_delta", "partial_json": function.arguments}
            yield self._delta(said)

    def _block(self, kind: str | int, begun: Json) -> Iterator[Chunk]:
        """Let the open block be of this kind."""
        if self._open == kind:
            return
        yield from self._stop()
        self._open = kind
        self._blocks += 1
        yield _event(
            {"type": "content_block_start", "index": self._blocks - 1, "content_block": begun}
        )

    def _stop(self) -> Iterator[Chunk]:
        if self._open is not None:
            self._open = None
            yield _event({"type": "content_block_stop", "index": self._blocks - 1})

    def _delta(self, delta: Json) -> Chunk:
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})


def _event(fields: Json) -> Chunk:
    return Chunk(encode(fields), 0, fields["type"])


def _stop_reason(finish_reason: str | None, *, has_calls: bool) -> str:
    """A call that was forced by name ends with "stop" in OpenAI's words, not in Anthropic's."""
    reason = _REASONS.get(finish_reason or "", "end_turn")
    return "tool_use" if has_calls and reason == "end_turn" else reason


def _content(message: AnsweredMessage) -> Iterator[Json]:
    if thought := message.reasoning_content or message.reasoning:
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    text = message.content or message.refusal
    if isinstance(text, list):
        text = "".join(part.text for part in text)
    if text:
        yield {"type": "text", "text": text}
    for call in message.tool_calls or ():
        function = call.function
        if function is None or not is_object(function.arguments or "{}"):
            raise Untranslatable("the arguments of a call are no JSON object")
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": function.name,
            "input": msgspec.Raw((function.arguments or "{}").encode()),
        }


# --- the request ------------------------------------------------------------------------------


def _effort(thinking: Thinking | None, config: OutputConfig | None) -> str | None:
    if config is not None and config.effort is not None:
        return "high" if config.effort in ("xhigh", "max") else config.effort
    if thinking is None or thinking.type == "disabled" or thinking.budget_tokens is None:
        return None
    if thinking.budget_tokens <= LOW_THINKING:
        return "low"
    return "high" if thinking.budget_tokens >= HIGH_THINKING else "medium"


def _format(config: OutputConfig | None) -> Json | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema" or not given(config.format.schema):
        raise Untranslatable(
            f"This model has no output format '{config.format.type[:40]}'.",
            param="output_config.format",
        )
    schema = {"name": "output", "schema": config.format.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: MessageTool, place: int) -> Json:
    if tool.type not in (None, "custom"):
        raise Untranslatable(
            f"This model does not have the tool '{tool.type[:40]}'.", param=f"tools[{place}].type"
        )
    return chat_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict)


def _choice(choice: MessageToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise Untranslatable("Unknown `tool_choice`.", param="tool_choice.type")
    return _CHOICES[choice.type]


def _system(system: str | list[Block] | None) -> Iterator[Json]:
    if isinstance(system, list):
        system = "\n\n".join(block.text for block in system if block.text)
    if system:
        yield {"role": "system", "content": system}


def _messages(turns: list[Turn]) -> Iterator[Json]:
    for place, turn in enumerate(turns):
        where = f"messages[{place}]"
        if turn.role == "assistant":
            yield _assistant(turn, where)
        elif isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "system":
            yield from _system(turn.content)
        else:
            yield from _user(turn.content, where)


def _user(blocks: list[Block], where: str) -> Iterator[Json]:
    """Results of calls are messages of their own, and come first: what else was said follows, with
    the pictures that a result held, which cannot stand in one."""
    parts: list[Json] = []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        if block.type == "tool_result":
            text, pictures = _result(block, here)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            parts += pictures
        else:
            parts.append(_part(block, here))
    if parts and all(part["type"] == "text" for part in parts) and len(parts) == 1:
        yield {"role": "user", "content": parts[0]["text"]}
    elif parts:
        yield {"role": "user", "content": parts}


def _result(block: Block, where: str) -> tuple[str, list[Json]]:
    if not isinstance(block.content, list):
        return block.content or "", []
    parts = [_part(one, f"{where}.content[{at}]") for at, one in enumerate(block.content)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts), [part for part in parts if part["type"] != "text"]


def _part(block: Block, where: str) -> Json:
    match block.type:
        case "text":
            return {"type": "text", "text": block.text}
        case "image" if block.source is not None:
            return {"type": "image_url", "image_url": {"url": _url(block.source, where)}}
        case "document" if block.source is not None:
            if block.source.type == "text":
                return {"type": "text", "text": block.source.data}
            if block.source.type == "base64":
                name = block.title or "document.pdf"
                given = {"filename": name, "file_data": _url(block.source, where)}
                return {"type": "file", "file": given}
    raise Untranslatable(
        f"This model takes no content of type '{block.type[:40]}' in this form.", param=where
    )


def _url(source: Source, where: str) -> str:
    if source.type == "url":
        return source.url
    if source.type == "base64":
        return f"data:{source.media_type};base64,{source.data}"
    raise Untranslatable(f"This model takes no source '{source.type[:40]}'.", param=where)


def _assistant(turn: Turn, where: str) -> Json:
    """What it thought is not sent back: it is signed for the model that thought it."""
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    text: list[str] = []
    calls: list[Json] = []
    for place, block in enumerate(turn.content):
        match block.type:
            case "text":
                text.append(block.text)
            case "tool_use":
                arguments = bytes(block.input) if given(block.input) else b"{}"
                function = {"name": block.name, "arguments": arguments.decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass
            case _:
                raise Untranslatable(
                    f"This model takes no content of type '{block.type[:40]}'.",
                    param=f"{where}.content[{place}]",
                )
    made: Json = {"role": "assistant", "content": "".join(text) if text or not calls else None}
    if calls:
        made["tool_calls"] = calls
    return made
