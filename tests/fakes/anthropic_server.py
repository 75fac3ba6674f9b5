"""A server with the exact wire of Anthropic's messages API, as its reference describes it.

It is strict where the vendor is: unknown fields, turns that do not alternate, results without their
calls, a missing version header or a foreign credential are refused, in the vendor's words. What it
answers is scripted: `Say` for text, thinking, tool calls, and how it fails.
Reference: https://docs.claude.com/en/api/messages, …/messages-streaming, …/errors.
"""

import asyncio
import json
import re
from collections.abc import MutableMapping
from typing import Any

from msgspec import Struct

FIELDS = {
    *("model", "messages", "max_tokens", "system", "stream", "stop_sequences", "temperature"),
    *("top_p", "top_k", "tools", "tool_choice", "thinking", "output_config", "service_tier"),
    *("metadata", "container", "mcp_servers", "future_field"),
}
COUNT_FIELDS = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"}
USAGE = {
    "input_tokens": 20,
    "cache_creation_input_tokens": 7,
    "cache_read_input_tokens": 100,
    "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 3},
    "output_tokens": 1,
    "service_tier": "standard",
}


class Call(Struct, frozen=True):
    """One tool call that the model makes."""

    name: str
    input: dict[str, Any] = {}


class Say(Struct, frozen=True):
    """What the model answers."""

    text: str = "Hello there."
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    stop_reason: str = ""  # absent: as the calls say
    output_tokens: int = 9
    error: tuple[int, str, str] | None = None  # status, type and message instead of an answer
    cut_after: int | None = None  # events after which the connection is cut
    error_after: int | None = None  # events after which an overloaded error is sent
    slow_s: float = 0.0  # between events


class AnthropicServer:
    """The ASGI app. `asked` holds the requests that were accepted, `headers` those of the last."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.say = Say()
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.sent = 0  # events, of all answers

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        problem = self._problem(scope["path"], body)
        if problem is not None:
            await self._fail(send, *problem)
            return
        asked = json.loads(body)
        self.asked.append(asked)
        if scope["path"].endswith("/count_tokens"):
            await _json(send, 200, {"input_tokens": 14})
        elif self.say.error is not None:
            await self._fail(send, *self.say.error)
        elif asked.get("stream"):
            await self._stream(send, asked)
        else:
            await _json(send, 200, self._message(asked))

    def _problem(self, path: str, body: bytes) -> tuple[int, str, str] | None:
        if path not in ("/v1/messages", "/v1/messages/count_tokens"):
            return 404, "not_found_error", "Not found"
        if self.headers.get("x-api-key") != self.key or "authorization" in self.headers:
            return 401, "authentication_error", "invalid x-api-key"
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.headers.get("anthropic-version", "")):
            return 400, "invalid_request_error", "anthropic-version: header is required"
        asked = json.loads(body)
        counts = path.endswith("count_tokens")
        for name in asked:
            if name not in (COUNT_FIELDS if counts else FIELDS):
                message = f"{name}: Extra inputs are not permitted"
                return 400, "invalid_request_error", message
        if not counts and not isinstance(asked.get("max_tokens"), int):
            return 400, "invalid_request_error", "max_tokens: Field required"
        wrong = _wrong_turns(asked["messages"]) or _wrong_tools(asked)
        return None if wrong is None else (400, "invalid_request_error", wrong)

    async def _fail(self, send: Any, status: int, kind: str, message: str) -> None:
        error = {"type": kind, "message": message}
        await _json(send, status, {"type": "error", "error": error, "request_id": "req_1"})

    def _content(self) -> list[dict[str, Any]]:
        say, content = self.say, []
        if say.thinking:
            content.append({"type": "thinking", "thinking": say.thinking, "signature": "sig"})
        if say.text:
            content.append({"type": "text", "text": say.text})
        for place, call in enumerate(say.calls):
            block = {"type": "tool_use", "id": f"toolu_{place}", "name": call.name}
            content.append({**block, "input": call.input})
        return content

    def _reason(self) -> str:
        return self.say.stop_reason or ("tool_use" if self.say.calls else "end_turn")

    def _message(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_01abc",
            "type": "message",
            "role": "assistant",
            "model": asked["model"],
            "content": self._content(),
            "stop_reason": self._reason(),
            "stop_sequence": None,
            "usage": {**USAGE, "output_tokens": self.say.output_tokens},
        }

    def events(self, asked: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The stream of the answer, event by event."""
        message = {**self._message(asked), "content": [], "stop_reason": None, "usage": USAGE}
        events: list[tuple[str, dict[str, Any]]] = [
            ("message_start", {"message": message}),
            ("ping", {}),
        ]
        for index, block in enumerate(self._content()):
            at = {"index": index}
            events.append(("content_block_start", {**at, "content_block": _begun(block)}))
            events += [("content_block_delta", {**at, "delta": delta}) for delta in _deltas(block)]
            events.append(("content_block_stop", at))
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        usage = {"output_tokens": self.say.output_tokens}
        events.append(("message_delta", {"delta": delta, "usage": usage}))
        events.append(("message_stop", {}))
        return events

    async def _stream(self, send: Any, asked: dict[str, Any]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, (name, fields) in enumerate(self.events(asked)):
            if place == self.say.cut_after:
                return  # the server drops the connection
            if place == self.say.error_after:
                overloaded = {"type": "overloaded_error", "message": "Overloaded"}
                name, fields = "error", {"error": overloaded}
            data = json.dumps({"type": name, **fields})
            body = f"event: {name}\ndata: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self.sent += 1
            if name == "error":
                break
            await asyncio.sleep(self.say.slow_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _begun(block: dict[str, Any]) -> dict[str, Any]:
    empty = {"text": "", "thinking": "", "signature": "", "input": {}}
    return {name: empty.get(name, value) for name, value in block.items()}


def _deltas(block: dict[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "text":
        words = block["text"].split(" ")
        pieces = [word if at == 0 else f" {word}" for at, word in enumerate(words)]
        return [{"type": "text_delta", "text": piece} for piece in pieces]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return [thought, {"type": "signature_delta", "signature": "sig"}]
    text = json.dumps(block["input"]) if block["input"] else ""
    half = len(text) // 2
    pieces = ["", text[:half], text[half:]] if text else [""]
    return [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def _wrong_turns(turns: list[dict[str, Any]]) -> str | None:
    """The vendor's rules of a conversation, in its words."""
    if not turns or turns[0]["role"] != "user":
        return "messages: first message must use the 'user' role"
    called: set[str] = set()
    for place, turn in enumerate(turns):
        if turn["role"] not in ("user", "assistant"):
            return f"messages.{place}.role: unexpected"
        if place and turns[place - 1]["role"] == turn["role"]:
            return "messages: roles must alternate"
        blocks = turn["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not blocks:
            return f"messages.{place}.content: must not be empty"
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if results != called:
            return f"messages.{place}: tool_use ids and tool_result blocks differ"
        for block in blocks:
            if block["type"] == "text" and not block["text"]:
                return f"messages.{place}: text content blocks must be non-empty"
            if block["type"] == "image" and block["source"]["type"] not in ("base64", "url"):
                return f"messages.{place}: unknown image source"
        called = {block["id"] for block in blocks if block["type"] == "tool_use"}
    return None


def _wrong_tools(asked: dict[str, Any]) -> str | None:
    for tool in asked.get("tools") or ():
        if tool["input_schema"].get("type") != "object":
            return "tools.0.custom.input_schema.type: Field required"
    choice = asked.get("tool_choice")
    if choice is not None and choice["type"] not in ("auto", "any", "tool", "none"):
        return "tool_choice: unexpected"
    return None


async def _json(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json"), (b"request-id", b"req_1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
