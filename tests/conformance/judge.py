"""Ask a gateway for one case, and say what its client got. Reads as clients do, and strictly."""

import asyncio
import json
import re
from typing import Any

import httpx
from msgspec import Struct

from tests.conformance.corpus import TEXT, TOOL_ARGUMENTS, TRAP, Case, Must
from tests.fakes.upstream import Received, Step, Upstream

PATIENCE_S = 15.0
_MARK = re.compile(rb"conformance:(\d+):")
_LINE = re.compile(r"\r\n|\r|\n")


class CorpusUpstream(Upstream):
    """Plays the case whose number is in the request's text."""

    def __init__(self, cases: list[Case], port: int = 0) -> None:
        super().__init__(())
        self.cases = cases
        self.port = port
        self.trapped = 0

    def plays(self, received: Received) -> list[Step]:
        if received.path.endswith(TRAP):
            self.trapped += 1
            return [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]
        mark = _MARK.search(received.body)
        if mark is None:  # a health check of whatever is under test
            return [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"]
        return list(self.cases[int(mark[1])].steps)


class Verdict(Struct, frozen=True):
    """`saw`: what the client made of it, in a word; `why`: what is wrong, if anything is."""

    ok: bool
    saw: str
    why: str = ""


class Seen(Struct, kw_only=True):
    """One answer as a client has it."""

    status: int = 0
    is_done: bool = False
    is_error: bool = False
    is_lost: bool = False  # the connection broke
    text: dict[int, str] = {}
    finish: dict[int, str] = {}
    tools: dict[int, dict[str, str]] = {}
    problem: str = ""  # what no client can read


async def ask(client: httpx.AsyncClient, case: Case, number: int, model: str) -> Seen:
    """The answer to this case."""
    body: dict[str, Any] = {
        "model": model,
        "stream": case.stream,
        "messages": [{"role": "user", "content": f"conformance:{number}: {case.name}"}],
    }
    if case.choices > 1:
        body["n"] = case.choices
    if case.stream:
        body["stream_options"] = {"include_usage": True}
    if case.tools:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": "weather", "parameters": schema}
        body["tools"] = [{"type": "function", "function": function}]
    seen = Seen(text={}, finish={}, tools={})
    raw = b""
    try:
        async with client.stream("POST", "chat/completions", json=body) as answer:
            seen.status = answer.status_code
            media = answer.headers.get("content-type", "")
            async for part in answer.aiter_bytes():
                raw += part
    except httpx.TimeoutException:
        seen.problem = "never ended"
        return seen
    except httpx.HTTPError:
        seen.is_lost = True
        media = "text/event-stream" if case.stream else ""
    if seen.status != 200:
        _read_error(raw, seen)
    elif case.stream and media.startswith("text/event-stream"):
        _read_events(raw, seen)
    elif case.stream:
        seen.problem = f"200 with {media or 'no content-type'}"
    elif not seen.is_lost:
        _read_whole(raw, seen)
    return seen


def _read_error(raw: bytes, seen: Seen) -> None:
    seen.is_error = seen.status >= 400
    try:
        error = json.loads(raw)["error"]
        if not isinstance(error["message"], str):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        if not seen.is_lost:
            seen.problem = f"{seen.status} without an error object"


def _read_whole(raw: bytes, seen: Seen) -> None:
    try:
        value = json.loads(raw)
    except ValueError:
        seen.problem = "200 with what is not JSON"
        return
    if isinstance(value, dict) and value.get("error"):
        seen.problem = "200 with an error"
        return
    try:
        for choice in value["choices"]:
            message, index = choice["message"], choice["index"]
            seen.text[index] = message.get("content") or ""
            seen.finish[index] = choice["finish_reason"]
            for place, call in enumerate(message.get("tool_calls") or ()):
                seen.tools[place] = {"id": call["id"], **call["function"]}
    except (KeyError, TypeError):
        seen.problem = "200 with what is no completion"
    seen.is_done = True


def _read_events(raw: bytes, seen: Seen) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        seen.problem = "not UTF-8"
        return
    data: list[str] = []
    for line in _LINE.split(text.removeprefix("\ufeff")):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            _read_event("\n".join(data), seen)
            data = []


def _read_event(data: str, seen: Seen) -> None:
    if data == "[DONE]":
        seen.is_done = True
        return
    if seen.is_done:
        seen.problem = "events after [DONE]"
    try:
        value = json.loads(data)
    except ValueError:
        seen.problem = "an event that is not JSON"
        return
    if value.get("error"):
        seen.is_error = True
        return
    for choice in value.get("choices") or ():
        index, part = choice.get("index", 0), choice.get("delta") or {}
        seen.text[index] = seen.text.get(index, "") + (part.get("content") or "")
        if choice.get("finish_reason"):
            seen.finish[index] = choice["finish_reason"]
        for call in part.get("tool_calls") or ():
            known = seen.tools.setdefault(call["index"], {"arguments": ""})
            function = call.get("function") or {}
            known["arguments"] += function.get("arguments") or ""
            if call.get("id"):
                known["id"] = call["id"]
            if function.get("name"):
                known["name"] = function["name"]


def judge(case: Case, seen: Seen) -> Verdict:
    """Whether that is what the case allows."""
    if seen.problem:
        return Verdict(False, "unreadable", seen.problem)
    if seen.is_error or seen.is_lost:
        saw = f"error {seen.status}" if seen.status != 200 else "error in the stream"
        saw = "connection lost" if seen.is_lost and not seen.is_error else saw
        if seen.is_done:
            return Verdict(False, saw, "an error, and then [DONE]")
        return Verdict(case.must is not Must.COMPLETE, saw)
    missing = _why_not_whole(case, seen)
    if missing:
        return Verdict(False, "looks whole", missing)
    return Verdict(case.must is not Must.BROKEN, "complete", "it was not")


def _why_not_whole(case: Case, seen: Seen) -> str:
    """What is missing of the answer that was sent; empty: nothing."""
    if not seen.is_done:
        return "ends without an error and without [DONE]"
    wanted = dict.fromkeys(range(case.choices), TEXT)
    reason = "stop"
    if case.tools:
        wanted, reason = {0: ""}, "tool_calls"
        calls = [seen.tools.get(n, {}) for n in range(2)]
        if tuple(call.get("arguments") for call in calls) != TOOL_ARGUMENTS:
            return f"tool calls are {seen.tools}"
        if [(call.get("id"), call.get("name")) for call in calls] != [
            (f"call_{n}", "weather") for n in range(2)
        ]:
            return f"tool calls are {seen.tools}"
    if seen.text != wanted:
        return f"text is {seen.text}"
    if seen.finish != dict.fromkeys(wanted, reason):
        return f"finish reasons are {seen.finish}"
    return ""


async def run(
    client: httpx.AsyncClient, upstream: CorpusUpstream, number: int, model: str
) -> Verdict:
    """One case, from the question to the verdict."""
    case, trapped = upstream.cases[number], upstream.trapped
    try:
        async with asyncio.timeout(PATIENCE_S):
            seen = await ask(client, case, number, model)
    except TimeoutError:
        return Verdict(False, "nothing", f"no end within {PATIENCE_S:g} s")
    if upstream.trapped > trapped:
        return Verdict(False, "redirected", "the redirect was followed")
    return judge(case, seen)


__all__ = ["CorpusUpstream", "Verdict", "judge", "run"]
