"""A server with the wire of OpenAI's chat completions that calls tools, thinks and refuses.

It is strict where the vendor is: a field of another API, or the result of a call that was not made,
is refused. What it answers is scripted. With `speaks_responses` it has `/v1/responses` itself.
Reference: https://platform.openai.com/docs/api-reference/chat and …/responses.
"""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from msgspec import Struct

FIELDS = {
    *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("temperature", "top_p", "stop", "n", "tools", "tool_choice", "parallel_tool_calls"),
    *("response_format", "reasoning_effort", "user", "seed", "logprobs", "top_logprobs"),
    *("verbosity", "safety_identifier", "prompt_cache_key", "service_tier", "future_field"),
}
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 12,
    "total_tokens": 62,
    "prompt_tokens_details": {"cached_tokens": 30},
    "completion_tokens_details": {"reasoning_tokens": 5},
}


class Say(Struct, frozen=True):
    """What the model answers."""

    text: str = "Hello there."
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    finish_reason: str = ""  # absent: as the calls say
    usage: bool = True
    error: tuple[int, str, str] | None = None  # status, code and message instead of an answer
    cut_after: int | None = None  # chunks after which the connection is cut
    slow_s: float = 0.0  # between chunks


class ChatServer:
    """The ASGI app. `asked` holds the requests that were accepted."""

    def __init__(self) -> None:
        self.say = Say()
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.sent = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked, path = json.loads(body), scope["path"]
        problem = _problem(path, asked) or self.say.error
        if problem is not None:
            status, code, text = problem
            error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
            await _json(send, status, {"error": error})
            return
        self.asked.append(asked)
        self.paths.append(path)
        if path == "/v1/responses":
            await self._respond(send, asked)
        elif asked.get("stream"):
            await self._stream(send, [self._chunk(*one) for one in self._chunks()], done=True)
        else:
            await _json(send, 200, self._whole(asked))

    def _reason(self) -> str:
        return self.say.finish_reason or ("tool_calls" if self.say.calls else "stop")

    def _whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        say = self.say
        message: dict[str, Any] = {"role": "assistant", "content": say.text or None}
        if say.thinking:
            message["reasoning_content"] = say.thinking
        if say.calls:
            message["tool_calls"] = [_call(at, *call) for at, call in enumerate(say.calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._reason()}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1}
        answer |= {"model": "gpt-x-2026", "choices": [choice]}
        return answer | ({"usage": USAGE} if say.usage else {})

    def _chunks(self) -> list[tuple[dict[str, Any] | None, str | None]]:
        say = self.say
        made: list[tuple[dict[str, Any] | None, str | None]] = [
            ({"role": "assistant", "content": ""}, None)
        ]
        made += [({"reasoning_content": word}, None) for word in say.thinking.split()]
        words = say.text.split(" ") if say.text else []
        made += [({"content": f" {word}" if at else word}, None) for at, word in enumerate(words)]
        for at, (name, arguments) in enumerate(say.calls):
            begun = {**_call(at, name, ""), "index": at}
            made.append(({"tool_calls": [begun]}, None))
            for piece in (arguments[:3], arguments[3:]):
                part = {"index": at, "function": {"arguments": piece}}
                made.append(({"tool_calls": [part]}, None))
        made.append(({}, self._reason()))
        if say.usage:
            made.append((None, None))
        return made

    def _chunk(self, delta: dict[str, Any] | None, reason: str | None) -> bytes:
        chunk: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}
        chunk |= {"created": 1, "model": "gpt-x-2026", "choices": []}
        if delta is None:
            chunk["usage"] = USAGE
        else:
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    async def _respond(self, send: Any, asked: dict[str, Any]) -> None:
        """The Responses API, as far as passing it through can be seen."""
        usage = {"input_tokens": 50, "output_tokens": 12, "total_tokens": 62}
        usage |= {"input_tokens_details": {"cached_tokens": 30}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 5}}
        part = {"type": "output_text", "text": self.say.text, "annotations": []}
        item = {"id": "msg_native", "type": "message", "role": "assistant", "status": "completed"}
        response = {"id": f"resp_native{len(self.asked)}", "object": "response", "created_at": 1}
        response |= {"model": "gpt-x-2026", "status": "completed", "output": []}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        response |= {"future_field": 1.10}
        done = {**response, "output": [{**item, "content": [part]}], "usage": usage}
        if not asked.get("stream"):
            await _json(send, 200, done)
            return
        where = {"item_id": "msg_native", "output_index": 0, "content_index": 0}
        begun = {**response, "status": "in_progress"}
        delta = {**where, "delta": self.say.text, "logprobs": []}
        events = [("response.created", {"response": begun})]
        events += [("response.output_item.added", {"output_index": 0, "item": item})]
        events += [("response.output_text.delta", delta)]
        events += [("response.completed", {"response": done})]
        pieces = []
        for number, (name, fields) in enumerate(events):
            data = json.dumps({"type": name, "sequence_number": number, **fields})
            pieces.append(f"event: {name}\ndata: {data}\n\n".encode())
        await self._stream(send, pieces, done=False)

    async def _stream(self, send: Any, pieces: list[bytes], *, done: bool) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, piece in enumerate([*pieces, b"data: [DONE]\n\n"] if done else pieces):
            if place == self.say.cut_after:
                return  # the server drops the connection
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.sent += 1
            await asyncio.sleep(self.say.slow_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _call(place: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{place}", "type": "function", "function": function}


def _problem(path: str, asked: dict[str, Any]) -> tuple[int, str, str] | None:
    if path == "/v1/responses":
        return None
    if path != "/v1/chat/completions":
        return 404, "not_found", "no such path"
    for name in asked:
        if name not in FIELDS:
            return 400, "unknown_parameter", f"Unrecognized request argument: {name}"
    called: set[str] = set()
    for place, message in enumerate(asked["messages"]):
        role = message["role"]
        if role not in ("system", "developer", "user", "assistant", "tool"):
            return 400, "invalid_value", f"messages[{place}].role"
        if role == "tool":
            if message["tool_call_id"] not in called:
                return 400, "invalid_value", f"messages[{place}]: no such call"
            called.discard(message["tool_call_id"])
        elif called:
            return 400, "invalid_value", f"messages[{place}]: calls without results"
        if role == "assistant":
            called = {call["id"] for call in message.get("tool_calls") or ()}
    return None


async def _json(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"req-openai-1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
