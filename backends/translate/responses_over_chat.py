"""A response of OpenAI's Responses API asked of a server that speaks chat completions. Pure.

References: https://platform.openai.com/docs/api-reference/responses and …/responses-streaming.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Raw, Struct, structs
from typing_extensions import override

from backends import base
from backends.base import ChatRequest, Chunk, Event, Whole
from backends.settings import Dialect
from backends.translate.common import (
    Json,
    Translator,
    Untranslatable,
    chat_tool,
    compact,
    encode,
    id_of,
    responses_usage,
)
from backends.translate.shapes import (
    AnsweredMessage,
    CallDelta,
    ChatAnswer,
    Delta,
    InputItem,
    NamedTool,
    ResponsePart,
    ResponsesAsked,
    ResponseTool,
    TextConfig,
    given,
)
from telemetry.record import Surface

_read: Final = msgspec.json.Decoder(ResponsesAsked).decode
_read_items: Final = msgspec.json.Decoder(list[InputItem]).decode
_read_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_read_echo: Final = msgspec.json.Decoder(dict[str, Any]).decode
_read_answer: Final = msgspec.json.Decoder(ChatAnswer).decode

# What a response repeats of its request, and what it says where the request said nothing.
_ECHO: Final[Json] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def items_of(value: Any) -> list[Any]:
    """The input of a request as items: text is a message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return list(value) if isinstance(value, list) else []


class WithItems(Translator):
    """For a backend that speaks responses but does not know the earlier one: its items are sent
    instead of its id. Everything else passes as it is."""

    target: ClassVar[Surface] = "responses"

    @override
    def body(self) -> bytes:
        fields = _read_fields(self.request.body)
        fields.pop("previous_response_id", None)
        earlier = self.request.previous
        known = [] if earlier is None else msgspec.json.decode(earlier.items)
        items = [item for item in map(_without_id, known) if item is not None]
        items += items_of(msgspec.json.decode(fields["input"]))
        return encode({**fields, "input": items})

    @override
    def chunk(self, chunk: Chunk) -> list[Event]:
        return [chunk]

    @override
    def final(self, final: base.Final) -> list[Event]:
        return [final]

    @override
    def whole(self, whole: Whole, final: base.Final) -> list[Event]:
        return [whole, final]


def _without_id(item: Any) -> Any:
    """Ids and thoughts mean something only to the account that made them."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "reasoning":
        return None
    return {name: value for name, value in item.items() if name not in ("id", "status")}


class _Open(Struct):
    """The output item that is being written."""

    kind: str  # message | reasoning | function_call
    item: Json
    text: list[str]
    index: int
    part: Json | None = None


class ResponsesOverChat(Translator):
    """One response. A stream's content becomes output items, one open at a time."""

    target = "chat"

    def __init__(self, request: ChatRequest, dialect: Dialect) -> None:
        super().__init__(request, dialect)
        self._id = id_of("resp_", None, request.request_id)
        self._tail = self._id.removeprefix("resp_")
        self._model = request.model
        self._echo: Json = {}
        self._sequence = 0
        self._output: list[Json] = []  # complete items
        self._open: _Open | None = None
        self._calls: set[int] = set()
        self._call: int | None = None
        self._finish_reason: str | None = None
        self._begun = False

    @override
    def body(self) -> bytes:
        asked = _read(self.request.body)
        if given(asked.prompt):
            raise Untranslatable("This model has no stored prompts.", param="prompt")
        if asked.top_logprobs:
            raise Untranslatable("This model gives no log probabilities.", param="top_logprobs")
        self._echo = _echo(_read_echo(self.request.body))
        messages: list[Json] = []
        if asked.instructions:
            messages.append({"role": "system", "content": asked.instructions})
        items: list[InputItem] = []
        if self.request.previous is not None:
            items += _read_items(self.request.previous.items)
        if isinstance(asked.input, str):
            items.append(InputItem(role="user", content=asked.input))
        else:
            items += asked.input
        _add_messages(items, messages)
        text = asked.text or TextConfig()
        return encode(
            compact(
                {
                    "model": self.request.model,
                    "messages": messages,
                    self.dialect.limit_field: asked.max_output_tokens,
                    "stream": True if self.request.stream else None,
                    "stream_options": {"include_usage": True} if self.request.stream else None,
                    "temperature": asked.temperature,
                    "top_p": asked.top_p,
                    "tools": [_tool(tool, at) for at, tool in enumerate(asked.tools or ())] or None,
                    "tool_choice": _choice(asked.tool_choice),
                    "parallel_tool_calls": asked.parallel_tool_calls if asked.tools else None,
                    "response_format": _format(text),
                    "verbosity": text.verbosity,
                    "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
                    "user": asked.user,
                    "safety_identifier": asked.safety_identifier,
                    "prompt_cache_key": asked.prompt_cache_key,
                    "service_tier": asked.service_tier,
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
        self._model = answer.model or self._model
        self._finish_reason = choice.finish_reason
        self._output = list(self._items(answer.choices[0].message))
        body = self._response(self._status, final)
        return [Whole(encode(body), whole.content_bytes), self._ended(final)]

    def _items(self, message: AnsweredMessage) -> Iterator[Json]:
        if thought := message.reasoning_content or message.reasoning:
            item = self._item("reasoning", 0)
            yield {**item, "content": [{"type": "reasoning_text", "text": thought}]}
        text = message.content
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        parts: list[Json] = []
        if text:
            parts.append(_text_part(text))
        if message.refusal:
            parts.append({"type": "refusal", "refusal": message.refusal})
        if parts:
            yield {**self._item("message", 1), "content": parts, "status": self._status}
        for place, call in enumerate(message.tool_calls or ()):
            if call.function is None:
                raise Untranslatable("a call of an unknown type")
            item = self._item("function_call", 2 + place, call.id, call.function.name)
            yield {**item, "arguments": call.function.arguments, "status": "completed"}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason in _INCOMPLETE else "completed"

    def _ended(self, final: base.Final, last: Chunk | None = None) -> base.Final:
        reason = _INCOMPLETE.get(self._finish_reason or "", "completed")
        return structs.replace(final, last=last, usage_chunk=None, finish_reasons=(reason,))

    def _response(self, status: str, final: base.Final | None) -> Json:
        reason = _INCOMPLETE.get(self._finish_reason or "")
        usage = None if final is None or final.usage is None else responses_usage(final.usage)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.request.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "model": self._model,
            "output": self._output,
            **self._echo,
            "usage": usage,
        }

    # -- streamed

    @override
    def chunk(self, chunk: Chunk) -> list[Event]:
        answer = _read_answer(chunk.data)
        made: list[Event] = []
        if not self._begun:
            self._begin(answer, made)
        left = chunk.content_bytes  # counted once, on the first event that carries content
        for choice in answer.choices:
            if choice.index:
                continue
            if choice.delta is not None:
                for event in self._said(choice.delta):
                    is_content = event.event.endswith(".delta")
                    made.append(structs.replace(event, content_bytes=left) if is_content else event)
                    left = 0 if is_content else left
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
        return made

    @override
    def final(self, final: base.Final) -> list[Event]:
        made: list[Event] = []
        if not self._begun:
            self._begin(ChatAnswer(choices=[]), made)
        made += self._close()
        response = self._response(self._status, final)
        last = self._event(f"response.{self._status}", {"response": response})
        made.append(self._ended(final, last))
        return made

    def _begin(self, answer: ChatAnswer, made: list[Event]) -> None:
        self._begun = True
        self._model = answer.model or self._model
        response = self._response("in_progress", None)
        made.append(self._event("response.created", {"response": response}))
        made.append(self._event("response.in_progress", {"response": response}))

    def _said(self, delta: Delta) -> Iterator[Chunk]:
        if thought := delta.reasoning_content or delta.reasoning:
            yield from self._let("reasoning", "reasoning_text")
            yield self._delta("response.reasoning_text.delta", thought)
        if delta.content:
            yield from self._let("message", "output_text")
            yield self._delta("response.output_text.delta", delta.content, logprobs=[])
        if delta.refusal:
            yield from self._let("message", "refusal")
            yield self._delta("response.refusal.delta", delta.refusal)
        for call in delta.tool_calls or ():
            yield from self._called(call)

    def _called(self, call: CallDelta) -> Iterator[Chunk]:
        function = call.function
        if call.index not in self._calls:
            self._calls.add(call.index)
            yield from self._close()
            self._call = call.index
            name = function.name if function is not None else ""
            item = self._item("function_call", len(self._output), call.id, name)
            yield self._add("function_call", item)
        elif self._open is None or self._open.kind != "function_call" or self._call != call.index:
            # Items follow each other here. No server known interleaves calls; one that did would be
            # cut off with an error rather than have its calls mixed up.
            raise Untranslatable("a call goes on after the next one has begun")
        if function is not None and function.arguments:
            yield self._delta("response.function_call_arguments.delta", function.arguments)

    def _let(self, kind: str, part: str) -> Iterator[Chunk]:
        """Let the open item be of this kind, and its open part of that."""
        if self._open is not None and self._open.kind == kind:
            if self._open.part is not None and self._open.part["type"] == part:
                return
            yield from self._close_part(self._open)
        else:
            yield from self._close()
            yield self._add(kind, self._item(kind, len(self._output)))
        opened = self._open
        assert opened is not None
        opened.part = {**_empty(part)}
        opened.text = []
        added = "response.content_part.added"
        yield self._event(added, {**self._where(opened), "part": opened.part})

    def _item(self, kind: str, place: int, call_id: str | None = None, name: str = "") -> Json:
        match kind:
            case "message":
                return {
                    "id": f"msg_{self._tail}{place}",
                    "type": "message",
                    "status": "in_progress",
                    "role": "assistant",
                    "content": [],
                }
            case "reasoning":
                return {
                    "id": f"rs_{self._tail}{place}",
                    "type": "reasoning",
                    "summary": [],
                    "content": [],
                }
        return {
            "id": f"fc_{self._tail}{place}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id or f"call_{self._tail}{place}",
            "name": name,
            "arguments": "",
        }

    def _add(self, kind: str, item: Json) -> Chunk:
        self._open = _Open(kind, item, [], len(self._output))
        added = "response.output_item.added"
        return self._event(added, {"output_index": self._open.index, "item": item})

    def _where(self, opened: _Open) -> Json:
        where: Json = {"item_id": opened.item["id"], "output_index": opened.index}
        if opened.kind != "function_call":
            where["content_index"] = len(opened.item["content"])
        return where

    def _delta(self, event: str, delta: str, **more: Any) -> Chunk:
        opened = self._open
        assert opened is not None
        opened.text.append(delta)
        return self._event(event, {**self._where(opened), "delta": delta, **more})

    def _close_part(self, opened: _Open) -> Iterator[Chunk]:
        if opened.part is None:
            return
        text, where, kind = "".join(opened.text), self._where(opened), opened.part["type"]
        field = "refusal" if kind == "refusal" else "text"
        part = {**opened.part, field: text}
        more: Json = {"logprobs": []} if kind == "output_text" else {}
        yield self._event(f"response.{kind}.done", {**where, field: text, **more})
        yield self._event("response.content_part.done", {**where, "part": part})
        opened.item["content"] = [*opened.item["content"], part]
        opened.part = None

    def _close(self) -> Iterator[Chunk]:
        """End the open item."""
        opened = self._open
        if opened is None:
            return
        yield from self._close_part(opened)
        self._open = None
        item = opened.item
        if opened.kind == "function_call":
            item["arguments"] = "".join(opened.text)
            fields = {"name": item["name"], "arguments": item["arguments"]}
            done = "response.function_call_arguments.done"
            yield self._event(done, {**self._where(opened), **fields})
        if "status" in item:
            is_last = self._finish_reason is not None
            item["status"] = self._status if is_last else "completed"
        self._output.append(item)
        done = "response.output_item.done"
        yield self._event(done, {"output_index": opened.index, "item": item})

    def _event(self, kind: str, fields: Json) -> Chunk:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return Chunk(encode({"type": kind, "sequence_number": sequence, **fields}), 0, kind)


def _empty(part: str) -> Json:
    if part == "output_text":
        return _text_part("")
    return {"type": part, "refusal" if part == "refusal" else "text": ""}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _echo(asked: Json) -> Json:
    echo = {name: asked.get(name, default) for name, default in _ECHO.items()}
    for name, value in echo.items():
        if value is None:
            echo[name] = _ECHO[name]
    tools: list[Json] = asked.get("tools") or []
    echo["tools"] = [{"parameters": None, "strict": None, **tool} for tool in tools]
    return echo


# --- the request ------------------------------------------------------------------------------


def _format(text: TextConfig) -> Json | None:
    wanted = text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = compact(
        {
            "name": wanted.name,
            "description": wanted.description,
            "schema": wanted.schema if given(wanted.schema) else None,
            "strict": wanted.strict,
        }
    )
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: ResponseTool, place: int) -> Json:
    if tool.type != "function":
        raise Untranslatable(
            f"This model does not have the tool '{tool.type[:40]}'.", param=f"tools[{place}].type"
        )
    return chat_tool(tool.name, tool.description, tool.parameters, strict=tool.strict)


def _choice(choice: str | NamedTool | None) -> str | Json | None:
    if not isinstance(choice, NamedTool):
        return choice
    if choice.type != "function":
        raise Untranslatable(
            f"This model has no tool_choice '{choice.type[:40]}'.", param="tool_choice.type"
        )
    return {"type": "function", "function": {"name": choice.name}}


def _add_messages(items: list[InputItem], messages: list[Json]) -> None:
    """Items as messages. Calls join the assistant's message that they belong to."""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        match item.type:
            case "message":
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _content(item.content, where)})
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = _text(item.output, where)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case "reasoning":
                pass  # it is the vendor's own form, and cannot be read back by another
            case _:
                raise Untranslatable(
                    f"This model takes no item of type '{item.type[:40]}'.", param=f"{where}.type"
                )


def _text(output: str | list[ResponsePart] | None, where: str) -> str:
    if not isinstance(output, list):
        return output or ""
    for place, part in enumerate(output):
        if part.type not in ("input_text", "output_text", "text"):
            raise Untranslatable(
                f"This model takes no result of type '{part.type[:40]}'.",
                param=f"{where}.output[{place}].type",
            )
    return "\n".join(part.text for part in output)


def _content(content: str | list[ResponsePart] | None, where: str) -> str | list[Json]:
    if not isinstance(content, list):
        return content or ""
    parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _part(part: ResponsePart, where: str) -> Json:
    match part.type:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part.text}
        case "refusal":
            return {"type": "text", "text": part.refusal}
        case "input_image" if part.image_url:
            return {
                "type": "image_url",
                "image_url": compact({"url": part.image_url, "detail": part.detail}),
            }
        case "input_file" if part.file_data:
            name = part.filename or "file"
            return {"type": "file", "file": {"filename": name, "file_data": part.file_data}}
    raise Untranslatable(
        f"This model takes no content of type '{part.type[:40]}' in this form.", param=where
    )
