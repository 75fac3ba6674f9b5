"""Requests to backends, and what came of them."""

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from msgspec import structs

from backends.base import Backend, ChatRequest, Chunk, Event, Final, Timeouts, Whole


def asking(
    *, stream: bool = True, timeouts: Timeouts | None = None, body: Any = None, **changes: Any
) -> ChatRequest:
    """A chat request for model `m`; `body` adds top-level fields."""
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "say hello to me"}],
        "stream": stream,
        **(body or {}),
    }
    request = ChatRequest(
        surface="chat",
        model="m",
        body=json.dumps(fields, separators=(",", ":")).encode(),
        stream=stream,
        timeouts=timeouts or Timeouts(first_token_s=5, inter_token_s=5, total_s=10),
        request_id="req-1",
    )
    return structs.replace(request, **changes)


async def ask(backend: Backend, request: ChatRequest) -> list[Event]:
    """All events of one attempt."""
    return [event async for event in backend.chat(request)]


def begin(backend: Backend, request: ChatRequest) -> AsyncGenerator[Event, None]:
    """The attempt's iterator, which the test closes itself."""
    return cast("AsyncGenerator[Event, None]", backend.chat(request))


def text_of(events: list[Event]) -> str:
    """The generated text of the first choice, whole or streamed, chat or completions."""
    text = ""
    for event in events:
        if isinstance(event, Chunk | Whole):
            for choice in json.loads(event.data)["choices"]:
                if choice["index"] == 0:
                    holder = choice.get("message") or choice.get("delta") or choice
                    text += holder.get("content") or holder.get("text") or ""
    return text


def final_of(events: list[Event]) -> Final:
    """The end; asserts that there is exactly one, and that it is last."""
    assert [isinstance(event, Final) for event in events].count(True) == 1
    final = events[-1]
    assert isinstance(final, Final)
    return final
