"""The well-formed end of a stream that we end: its last events, as the model would have written
them, for each family of clients.

Pure: the events of the stream so far go in, those that end it come out. Must not know why. A client
that knows nothing of us sees an answer that reached its length, which it did; the field `meterline`
says more to those who look.
"""

from typing import Any, Final, Protocol

import msgspec
from msgspec import structs

from backends.base import Chunk
from backends.base import Final as End
from backends.translate.common import anthropic_usage, responses_usage
from telemetry.record import Surface
from telemetry.usage import Usage

Json = dict[str, Any]

HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")
FINISHED: Final = b'"finish_reason":"'
LENGTH: Final = "length"
MAX_TOKENS: Final = "max_tokens"
MAX_OUTPUT_TOKENS: Final = "max_output_tokens"
_read: Final = msgspec.json.decode
_encode: Final = msgspec.json.encode


class Ending(Protocol):
    """Shown every event of a stream; makes the last ones."""

    def saw(self, chunk: Chunk) -> None: ...

    def closing(self, code: str, message: str) -> list[Chunk]:
        """What ends the content, before its usage is known. `code` and `message` say why."""
        ...

    def ended(self, final: End) -> tuple[list[Chunk], End]:
        """What tells the usage, and the end as these clients read it."""
        ...


def ending_of(surface: Surface, choices: int) -> Ending:
    """For a stream of this surface."""
    match surface:
        case "messages":
            return MessagesEnding()
        case "responses":
            return ResponsesEnding()
        case _:
            return ChatEnding(surface, choices)


class ChatEnding:
    """Chat and completions: one chunk with `finish_reason` "length" for each open choice."""

    def __init__(self, surface: Surface, choices: int) -> None:
        self._surface = surface
        self._open = set(range(choices))
        self._last = b"{}"

    def saw(self, chunk: Chunk) -> None:
        self._last = chunk.data
        if len(self._open) > 1 and FINISHED in chunk.data.replace(b" ", b""):
            for choice in _read(chunk.data).get("choices", ()):
                if choice.get("finish_reason") is not None:
                    self._open.discard(choice.get("index", 0))

    def closing(self, code: str, message: str) -> list[Chunk]:
        choices = [self._choice(index) for index in sorted(self._open)]
        ended = {"ended_by": code, "message": message}
        return [Chunk(_encode({**self._head(), "choices": choices, "meterline": ended}))]

    def ended(self, final: End) -> tuple[list[Chunk], End]:
        chunk = final.usage_chunk
        if chunk is None and final.usage is not None:
            chunk = self._usage_chunk(final.usage)
        return [], structs.replace(final, usage_chunk=chunk, finish_reasons=(LENGTH,))

    def _usage_chunk(self, usage: Usage) -> bytes:
        tokens = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }
        return _encode({**self._head(), "choices": [], "usage": tokens})

    def _choice(self, index: int) -> Json:
        rest: Json = {"delta": {}} if self._surface == "chat" else {"text": ""}
        return {"index": index, **rest, "logprobs": None, "finish_reason": LENGTH}

    def _head(self) -> Json:
        last = _read(self._last)
        return {name: last[name] for name in HEAD if name in last}


class MessagesEnding:
    """Anthropic's messages: open blocks are stopped, `stop_reason` is "max_tokens"."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._content_bytes = 0
        self._why: Json = {}

    def saw(self, chunk: Chunk) -> None:
        self._content_bytes += chunk.content_bytes
        if chunk.event == "content_block_start":
            self._open.append(_read(chunk.data)["index"])
        elif chunk.event == "content_block_stop":
            index = _read(chunk.data)["index"]
            if index in self._open:
                self._open.remove(index)

    def closing(self, code: str, message: str) -> list[Chunk]:
        self._why = {"ended_by": code, "message": message}
        stops = [_event({"type": "content_block_stop", "index": index}) for index in self._open]
        self._open = []
        return stops

    def ended(self, final: End) -> tuple[list[Chunk], End]:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": MAX_TOKENS, "stop_sequence": None},
            "usage": anthropic_usage(final.usage, content_bytes=self._content_bytes),
            "meterline": self._why,
        }
        last = _event({"type": "message_stop"})
        end = structs.replace(final, last=last, usage_chunk=None, finish_reasons=(MAX_TOKENS,))
        return [_event(delta)], end


class ResponsesEnding:
    """The Responses API: open items are closed as they are, and the response is incomplete."""

    def __init__(self) -> None:
        self._response: Json = {}
        self._items: dict[int, Json] = {}
        self._open: dict[int, _OpenItem] = {}
        self._sequence = -1
        self._why: Json = {}

    def saw(self, chunk: Chunk) -> None:
        event = _read(chunk.data)
        self._sequence = event.get("sequence_number", self._sequence + 1)
        kind, index = event["type"], event.get("output_index")
        if kind in ("response.created", "response.in_progress"):
            self._response = event["response"]
        elif kind == "response.output_item.added":
            self._open[index] = _OpenItem(event["item"])
        elif kind == "response.output_item.done":
            self._open.pop(index, None)
            self._items[index] = event["item"]
        elif index in self._open:
            self._open[index].saw(kind, event)

    def closing(self, code: str, message: str) -> list[Chunk]:
        self._why = {"ended_by": code, "message": message}
        made = []
        for index, opened in sorted(self._open.items()):
            for kind, fields in opened.close():
                made.append(self._event(kind, {"output_index": index, **fields}))
            self._items[index] = opened.item
        self._open = {}
        return made

    def ended(self, final: End) -> tuple[list[Chunk], End]:
        response = {
            **self._response,
            "status": "incomplete",
            "incomplete_details": {"reason": MAX_OUTPUT_TOKENS},
            "output": [item for _, item in sorted(self._items.items())],
            "usage": None if final.usage is None else responses_usage(final.usage),
        }
        fields = {"response": response, "meterline": self._why}
        last = self._event("response.incomplete", fields)
        reasons = (MAX_OUTPUT_TOKENS,)
        return [], structs.replace(final, last=last, usage_chunk=None, finish_reasons=reasons)

    def _event(self, kind: str, fields: Json) -> Chunk:
        self._sequence += 1
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        return Chunk(_encode(data), 0, kind)


class _OpenItem:
    """An item of a response that was begun: what was said of it, and the events that end it."""

    def __init__(self, item: Json) -> None:
        self.item = item
        self._part: Json | None = None
        self._place = 0  # of the part in the item
        self._text: list[str] = []

    def saw(self, kind: str, event: Json) -> None:
        match kind:
            case "response.content_part.added":
                self._part, self._place, self._text = event["part"], event["content_index"], []
            case "response.content_part.done":
                self.item["content"] = [*self.item.get("content", ()), event["part"]]
                self._part = None
            case _ if kind.endswith(".delta"):
                self._text.append(event["delta"])

    def close(self) -> list[tuple[str, Json]]:
        """The events, and the item as it ends."""
        made: list[tuple[str, Json]] = []
        where: Json = {"item_id": self.item["id"]}
        text = "".join(self._text)
        if self._part is not None:
            kind = self._part["type"]
            field = "refusal" if kind == "refusal" else "text"
            part = {**self._part, field: text}
            where["content_index"] = self._place
            more: Json = {"logprobs": []} if kind == "output_text" else {}
            made.append((f"response.{kind}.done", {**where, field: text, **more}))
            made.append(("response.content_part.done", {**where, "part": part}))
            self.item["content"] = [*self.item.get("content", ()), part]
        elif self.item["type"] == "function_call":
            self.item["arguments"] = text
            said = {**where, "name": self.item["name"], "arguments": text}
            made.append(("response.function_call_arguments.done", said))
        if "status" in self.item:
            self.item["status"] = "incomplete"
        made.append(("response.output_item.done", {"item": self.item}))
        return made


def _event(fields: Json) -> Chunk:
    return Chunk(_encode(fields), 0, fields["type"])
