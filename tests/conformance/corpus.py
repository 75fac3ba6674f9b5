"""The cases. Each is what an upstream plays for one request, and which of two things the client may
see: the whole answer, or that there is none. Nothing here knows the gateway under test.

`COMPLETE`: however it is framed, split or decorated, the client gets all of it and a proper end.
`BROKEN`: the client can tell: an error status, an error event or a connection that breaks; never an
answer that looks whole. `EITHER`: both are right, a lie is not.
"""

import gzip
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from tests.fakes.upstream import (
    CUT,
    END,
    HALF_CLOSE,
    RESET,
    STALL,
    USAGE,
    USAGE_CHUNK,
    Pause,
    Step,
    delta,
    event,
    head,
    piece,
)

TEXT = "Grüße, 世界 🚢!"
WORDS = ("Grü", "ße, ", "世界", " 🚢", "!")
TRAP = "/trap"  # a redirect that is followed arrives here


class Must(Enum):
    COMPLETE = "complete"
    BROKEN = "broken"
    EITHER = "either"


class Case(Struct, frozen=True, kw_only=True):
    """One way to answer."""

    name: str
    stream: bool
    steps: Sequence[Step]
    must: Must
    choices: int = 1
    tools: bool = False

    @property
    def id(self) -> str:
        return f"{'streamed' if self.stream else 'whole'}: {self.name}"


# --- streams ------------------------------------------------------------------------------------


def chunks(finish: str = "stop", index: int = 0) -> list[dict[str, Any]]:
    """The events of one choice."""
    first = delta("", index=index)
    first["choices"][0]["delta"]["role"] = "assistant"
    return [
        first,
        *(delta(word, index=index) for word in WORDS),
        delta(None, finish=finish, index=index),
    ]


def sse(values: Sequence[Any], *, done: bool = True) -> list[bytes]:
    return [*map(event, values), *([event(b"[DONE]")] if done else [])]


def stream(*parts: bytes, more: Sequence[Step] = (END,)) -> tuple[Step, ...]:
    return (head(), *map(piece, parts), *more)


GOOD = sse([*chunks(), USAGE_CHUNK])
FLAT = b"".join(GOOD)
BEGUN = GOOD[:3]  # the role and two words


def _with(values: Sequence[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [{**value, **fields} for value in values]


def _tool(index: int, **function: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"index": index, "function": function}
    if "name" in function:
        call |= {"id": f"call_{index}", "type": "function"}
    value = delta(None)
    value["choices"][0]["delta"] = {"tool_calls": [call]}
    return value


TOOL_ARGUMENTS = ('{"city": "Köln"}', '{"city": "東京"}')
TOOLS = [
    delta(""),
    _tool(0, name="weather", arguments=""),
    _tool(0, arguments='{"city": '),
    _tool(1, name="weather", arguments=""),
    _tool(1, arguments='{"city": "東'),
    _tool(0, arguments='"Köln"}'),
    _tool(1, arguments='京"}'),
    delta(None, finish="tool_calls"),
    USAGE_CHUNK,
]
TWO = [pair for both in zip(chunks(), chunks(index=1), strict=True) for pair in both]
_MULTILINE = b"".join(
    b"data: " + json.dumps(value, indent=1).encode().replace(b"\n", b"\ndata: ") + b"\n\n"
    for value in [*chunks(), USAGE_CHUNK]
) + event(b"[DONE]")


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}


_STREAMED: dict[str, tuple[Must, Sequence[Step]]] = {
    "as it should be": (Must.COMPLETE, stream(*GOOD)),
    "one write": (Must.COMPLETE, (head() + piece(FLAT) + END,)),
    "byte by byte": (Must.COMPLETE, stream(*(bytes([byte]) for byte in FLAT))),
    "split inside characters": (
        Must.COMPLETE,
        stream(*(FLAT[start : start + 7] for start in range(0, len(FLAT), 7))),
    ),
    "split before each line end": (
        Must.COMPLETE,
        stream(*FLAT.replace(b"\n", b"\xff\n").split(b"\xff")),
    ),
    "CRLF": (Must.COMPLETE, stream(FLAT.replace(b"\n", b"\r\n"))),
    "CRLF, split between": (
        Must.COMPLETE,
        stream(*FLAT.replace(b"\n", b"\r\xff\n").split(b"\xff")),
    ),
    "CR": (Must.COMPLETE, stream(FLAT.replace(b"\n", b"\r"))),
    "comments": (Must.COMPLETE, stream(*(b": ping\n\n" + part for part in GOOD))),
    "no space after the colon": (Must.COMPLETE, stream(FLAT.replace(b"data: ", b"data:"))),
    "event, id and retry lines": (
        Must.COMPLETE,
        stream(*(b"event: message\nid: 7\nretry: 10\n" + part for part in GOOD)),
    ),
    "data of several lines": (Must.COMPLETE, stream(_MULTILINE)),
    "byte order mark": (Must.COMPLETE, stream(b"\xef\xbb\xbf" + FLAT)),
    "empty lines": (Must.COMPLETE, stream(*(b"\n\n" + part for part in GOOD))),
    "escaped text": (
        Must.COMPLETE,
        stream(*sse([json.dumps(v).encode() for v in [*chunks(), USAGE_CHUNK]])),
    ),
    "unknown fields": (
        Must.COMPLETE,
        stream(*sse([*_with(chunks(), x_new={"a": [1.10, None]}), USAGE_CHUNK])),
    ),
    "cumulative usage": (
        Must.COMPLETE,
        stream(*sse([{**v, "usage": _usage(n)} for n, v in enumerate([*chunks(), USAGE_CHUNK])])),
    ),
    "null usage": (Must.COMPLETE, stream(*sse([*_with(chunks(), usage=None), USAGE_CHUNK]))),
    "usage in the last chunk": (
        Must.COMPLETE,
        stream(*sse([*chunks()[:-1], {**chunks()[-1], "usage": USAGE}])),
    ),
    "missing usage": (Must.COMPLETE, stream(*sse(chunks()))),
    "empty choices first": (
        Must.COMPLETE,
        stream(*sse([{**delta(""), "choices": []}, *chunks(), USAGE_CHUNK])),
    ),
    "two choices": (Must.COMPLETE, stream(*sse([*TWO, USAGE_CHUNK]))),
    "parallel tool calls": (Must.COMPLETE, stream(*sse(TOOLS))),
    "without [DONE]": (Must.COMPLETE, stream(*GOOD[:-1])),
    "open after [DONE]": (Must.COMPLETE, stream(*GOOD, more=(STALL,))),
    "slow drip": (
        Must.COMPLETE,
        (head(), *(step for part in GOOD for step in (piece(part), Pause(0.05))), END),
    ),
    "without a length, then closed": (
        Must.COMPLETE,
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + FLAT, CUT),
    ),
    "gzip that nobody asked for": (
        Must.EITHER,
        (head(200, content_encoding="gzip"), piece(gzip.compress(FLAT)), END),
    ),
    "cut": (Must.BROKEN, stream(*BEGUN, more=(CUT,))),
    "cut inside an event": (Must.BROKEN, stream(*BEGUN, GOOD[3][:-20], more=(CUT,))),
    "half-closed": (Must.BROKEN, stream(*BEGUN, more=(HALF_CLOSE,))),
    "reset": (Must.BROKEN, stream(*BEGUN, more=(RESET,))),
    "ends properly, without a finish": (Must.BROKEN, stream(*BEGUN)),
    "[DONE] without a finish": (Must.BROKEN, stream(*BEGUN, event(b"[DONE]"))),
    "one of two choices unfinished": (
        Must.BROKEN,
        stream(*sse([v for v in TWO if v["choices"][0] != TWO[-1]["choices"][0]])),
    ),
    "closed without a length or an end": (
        Must.BROKEN,
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(BEGUN), CUT),
    ),
    "no event at all": (Must.BROKEN, stream()),
    "late error": (
        Must.BROKEN,
        stream(*BEGUN, event({"error": {"message": "boom", "type": "server_error"}})),
    ),
    "late error, then [DONE]": (
        Must.BROKEN,
        stream(*BEGUN, event({"error": {"message": "boom"}}), event(b"[DONE]")),
    ),
    "error at once": (Must.BROKEN, stream(event({"error": {"message": "boom"}}))),
    "garbage": (Must.BROKEN, stream(*BEGUN, b"data: {garbage\n\n")),
    "garbage in the framing": (Must.BROKEN, stream(*BEGUN, more=(b"zz\r\nno\r\n", CUT))),
    "an event without end": (Must.BROKEN, stream(*BEGUN, *[b"data: " + b"x" * 65_536] * 200)),
    "stall before the first event": (Must.BROKEN, stream(more=(STALL,))),
    "stall in the middle": (Must.BROKEN, stream(*BEGUN, more=(STALL,))),
    "comments for ever": (Must.BROKEN, stream(more=[piece(b": ping\n\n"), Pause(0.05)] * 200)),
}

# --- whole answers ------------------------------------------------------------------------------


def answer(**fields: Any) -> dict[str, Any]:
    """A whole completion."""
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }
    return {**value, **fields}


BODY = json.dumps(answer(), ensure_ascii=False).encode()


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def whole(data: bytes, status: int = 200, media: str = "application/json") -> tuple[Step, ...]:
    return (head(status, media), piece(data), END)


def measured(data: bytes, length: int | None = None, *more: Step) -> tuple[Step, ...]:
    size = len(data) if length is None else length
    lines = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
    )
    return (lines + data, *more)


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


_TWO_CHOICES = answer()
_TWO_CHOICES["choices"] = [{**_TWO_CHOICES["choices"][0], "index": n} for n in range(2)]
_TOOL_ANSWER = answer()
_TOOL_ANSWER["choices"] = [
    {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": f"call_{n}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": arguments},
                }
                for n, arguments in enumerate(TOOL_ARGUMENTS)
            ],
        },
    }
]
_ERROR = _encoded({"error": {"message": "boom", "type": "server_error", "code": "x"}})

_WHOLE: dict[str, tuple[Must, Sequence[Step]]] = {
    "as it should be": (Must.COMPLETE, measured(BODY)),
    "chunked": (Must.COMPLETE, whole(BODY)),
    "byte by byte": (
        Must.COMPLETE,
        (head(200, "application/json"), *(piece(bytes([byte])) for byte in BODY), END),
    ),
    "split head": (
        Must.COMPLETE,
        (*(bytes([byte]) for byte in JSON_HEAD), b"content-length: %d\r\n\r\n" % len(BODY), BODY),
    ),
    "escaped text": (Must.COMPLETE, whole(_encoded(answer()))),
    "indented": (Must.COMPLETE, whole(json.dumps(answer(), indent=4).encode())),
    "unknown fields": (Must.COMPLETE, whole(_encoded(answer(x_new={"a": [1.10, None]})))),
    "null usage": (Must.COMPLETE, whole(_encoded(answer(usage=None)))),
    "missing usage": (
        Must.COMPLETE,
        whole(_encoded({k: v for k, v in answer().items() if k != "usage"})),
    ),
    "two choices": (Must.COMPLETE, whole(_encoded(_TWO_CHOICES))),
    "parallel tool calls": (Must.COMPLETE, whole(_encoded(_TOOL_ANSWER))),
    "slow drip": (
        Must.COMPLETE,
        (
            head(200, "application/json"),
            *(s for n in range(0, len(BODY), 40) for s in (piece(BODY[n : n + 40]), Pause(0.02))),
            END,
        ),
    ),
    "until it closes": (
        Must.COMPLETE,
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + BODY, CUT),
    ),
    "gzip that nobody asked for": (
        Must.EITHER,
        (
            head(200, "application/json", content_encoding="gzip"),
            piece(gzip.compress(BODY)),
            END,
        ),
    ),
    "cut": (Must.BROKEN, (head(200, "application/json"), piece(BODY[:50]), CUT)),
    "shorter than its length": (Must.BROKEN, measured(BODY[:-9], len(BODY), CUT)),
    "half of it, until it closes": (
        Must.BROKEN,
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + BODY[:90], CUT),
    ),
    "half-closed": (
        Must.BROKEN,
        (head(200, "application/json"), piece(BODY[:50]), HALF_CLOSE),
    ),
    "reset": (Must.BROKEN, (head(200, "application/json"), piece(BODY[:50]), RESET)),
    "closes at once": (Must.BROKEN, (CUT,)),
    "resets at once": (Must.BROKEN, (RESET,)),
    "stall before the head": (Must.BROKEN, (STALL,)),
    "stall in the body": (Must.BROKEN, (head(200, "application/json"), piece(BODY[:50]), STALL)),
    "garbage": (Must.BROKEN, whole(b"garbage")),
    "nothing": (Must.BROKEN, whole(b"")),
    "HTML": (Must.BROKEN, whole(b"<html>Welcome</html>", 200, "text/html")),
    "200 with an error": (Must.BROKEN, whole(_ERROR)),
    "no choices": (Must.BROKEN, whole(_encoded(answer(choices=[])))),
    "500": (Must.BROKEN, whole(_ERROR, 500)),
    "500 without a body": (Must.BROKEN, whole(b"", 500)),
    "503 in HTML": (Must.BROKEN, whole(b"<html>busy</html>", 503, "text/html")),
    "not HTTP": (Must.BROKEN, (b"220 smtp.example ESMTP\r\n", CUT)),
}
_BOTH: dict[str, tuple[Must, Sequence[Step]]] = {
    "redirect": (Must.BROKEN, (head(302, "text/plain", location=TRAP), END)),
    "redirect that keeps the method": (
        Must.BROKEN,
        (head(307, "text/plain", location=TRAP), END),
    ),
    "huge headers": (Must.BROKEN, (head(200, "application/json", x_filler="y" * 400_000), END)),
}


def _cases() -> list[Case]:
    found: list[Case] = []
    for is_stream, table in ((True, {**_STREAMED, **_BOTH}), (False, {**_WHOLE, **_BOTH})):
        for name, (must, steps) in table.items():
            found.append(
                Case(
                    name=name,
                    stream=is_stream,
                    steps=steps,
                    must=must,
                    choices=2 if "two choices" in name else 1,
                    tools="tool calls" in name,
                )
            )
    return found


CASES = _cases()
