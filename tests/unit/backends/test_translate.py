"""Translation as a pure machine: whatever an upstream says, streamed and whole come to the same,
nothing is lost or counted twice, and what cannot be said is refused."""

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import translate, wire
from backends.base import (
    BackendCannot,
    BackendProtocol,
    BackendRefused,
    ChatRequest,
    Chunk,
    Event,
    Final,
    Timeouts,
    Whole,
)
from backends.readers import MessagesReader, ResponsesReader
from backends.settings import Dialect
from backends.sse import SSEParser
from backends.translate.common import is_object
from backends.translate.messages_over_chat import _stop_reason
from telemetry.record import Surface
from telemetry.usage import Usage, UsageSource, from_anthropic, from_openai, from_responses
from tests.fakes.anthropic_server import AnthropicServer
from tests.fakes.anthropic_server import Call as AnthropicCall
from tests.fakes.anthropic_server import Say as AnthropicSay
from tests.fakes.chat_server import ChatServer
from tests.fakes.chat_server import Say as ChatSay

CHAT = Dialect()
MESSAGES = Dialect(speaks=frozenset({"messages", "count_tokens"}))
HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI},
    "messages": {"model": "m", "max_tokens": 9, "messages": HI},
    "responses": {"model": "m", "input": "hi"},
}

words = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1), max_size=4
)
names = st.text("abc_", min_size=1, max_size=6)
values = st.dictionaries(names, st.text(max_size=5) | st.integers() | st.booleans(), max_size=3)
calls = st.lists(st.tuples(names, values), max_size=3)


class Player:
    """A backend that says what it is told, in its own wire, cut as it is told."""

    name = "player"
    provider = "openai"

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.asked: ChatRequest | None = None

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        self.asked = request
        for event in self.events:
            yield event

    async def is_ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


def request(surface: Surface, body: Any, *, stream: bool = False) -> ChatRequest:
    """A request of this surface."""
    return ChatRequest(
        surface=surface,
        model="there",
        body=body if isinstance(body, bytes) else json.dumps(body).encode(),
        stream=stream,
        timeouts=Timeouts(),
        request_id="01a22f8d-a6af-7134-bdf1-051a810affb7",
        created_s=7,
    )


async def said(player: Player, dialect: Dialect, asked: ChatRequest) -> list[Event]:
    """All that comes of a request."""
    return [event async for event in translate.ask(player, dialect, asked)]


def read(pieces: list[bytes], reader: Any) -> list[Event]:
    """The events of a stream as the backend's reader makes them."""
    parser, made = SSEParser(), []
    for piece in pieces:
        for event in parser.feed(piece):
            if event.data != wire.DONE:
                chunk = reader.chunk(event.data)
                made += [] if chunk is None else [chunk]
    return [*made, reader.final()]


def cut_at(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def played(
    api: str, text: str, thought: str, made: Any, places: list[int]
) -> tuple[Player, Player]:
    """A backend that streams this answer, and one that says it whole."""
    if api == "chat":
        server = ChatServer()
        server.say = ChatSay(
            text=text, thinking=thought, calls=tuple((name, json.dumps(v)) for name, v in made)
        )
        chunks = b"".join(server._chunk(*one) for one in server._chunks())
        whole = json.dumps(server._whole({})).encode()

        def reader() -> Any:
            return wire.AnswerReader(backend="player", normalise=from_openai)
    else:
        claude = AnthropicServer("k")
        claude.say = AnthropicSay(
            text=text, thinking=thought, calls=tuple(AnthropicCall(name, v) for name, v in made)
        )
        chunks = b"".join(
            f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()
            for name, fields in claude.events({"model": "m"})
        )
        whole = json.dumps(claude._message({"model": "m"})).encode()

        def reader() -> Any:
            return MessagesReader(backend="player", normalise=from_anthropic)

    following = reader()
    body: list[Event] = [following.whole(whole), following.final()]
    return Player(read(cut_at(chunks, places), reader())), Player(body)


def put_together(surface: str, events: list[Event]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thought, text and calls of an answer, streamed or whole, as a client reads them."""
    thought, text, made = "", "", {}
    for event in events:
        if not isinstance(event, Chunk | Whole):
            continue
        data = json.loads(event.data)
        if surface == "chat":
            for choice in data["choices"]:
                part = choice.get("delta") or choice.get("message") or {}
                thought += part.get("reasoning_content") or ""
                text += part.get("content") or ""
                for at, call in enumerate(part.get("tool_calls") or ()):
                    known = made.setdefault(call.get("index", at), ["", ""])
                    known[0] += call["function"].get("name", "")
                    known[1] += call["function"]["arguments"]
        elif surface == "messages":
            for at, block in enumerate(data.get("content") or ()):
                thought += block.get("thinking", "")
                text += block.get("text", "")
                if block["type"] == "tool_use":
                    made[at] = [block["name"], json.dumps(block["input"])]
            if data["type"] == "content_block_start" and "name" in data["content_block"]:
                made[data["index"]] = [data["content_block"]["name"], ""]
            delta = data.get("delta") or {}
            thought += delta.get("thinking", "")
            text += delta.get("text", "")
            if "partial_json" in delta:
                made[data["index"]][1] += delta["partial_json"]
        else:
            for item in data.get("output") or ():
                for part in item.get("content") or ():
                    thought += part["text"] if part["type"] == "reasoning_text" else ""
                    text += part["text"] if part["type"] == "output_text" else ""
                if item["type"] == "function_call":
                    made[len(made)] = [item["name"], item["arguments"]]
            kind = data.get("type", "")
            thought += data["delta"] if kind == "response.reasoning_text.delta" else ""
            text += data["delta"] if kind == "response.output_text.delta" else ""
            if kind == "response.function_call_arguments.done":
                made[data["output_index"]] = [data["name"], data["arguments"]]
    return (
        thought,
        text,
        [(name, json.loads(raw or "{}")) for _, (name, raw) in sorted(made.items())],
    )


WAYS = [
    ("chat", "messages"),
    ("messages", "chat"),
    ("responses", "chat"),
    ("responses", "messages"),
]


@pytest.mark.parametrize(("surface", "api"), WAYS, ids=["-over-".join(way) for way in WAYS])
@settings(max_examples=40, deadline=None)
@given(text=words, thought=words, made=calls, places=st.lists(st.integers(0, 5000), max_size=9))
async def test_streamed_and_whole_come_to_the_same(
    surface: Surface, api: str, text: list[str], thought: list[str], made: Any, places: list[int]
) -> None:
    """Text, thought, calls, usage and bytes of content are what the backend said, however the
    network cut it, streamed and whole."""
    said_text = " ".join(text)
    # The chat server says a thought in words.
    said_thought = "".join(thought) if api == "chat" else " ".join(thought)
    if not said_text and not made:
        said_text = "x"
    streaming, whole = played(api, said_text, " ".join(thought), made, places)
    dialect = CHAT if api == "chat" else MESSAGES
    streamed = await said(streaming, dialect, request(surface, BODIES[surface], stream=True))
    answered = await said(whole, dialect, request(surface, BODIES[surface]))
    got = put_together(surface, streamed)
    assert got == (said_thought, said_text, made)
    assert put_together(surface, answered)[1:] == got[1:]
    for events in (streamed, answered):
        assert isinstance(events[-1], Final)
        assert [type(event) for event in events].count(Final) == 1
    assert isinstance(streamed[-1], Final)
    assert isinstance(answered[-1], Final)
    assert streamed[-1].usage == answered[-1].usage
    assert streamed[-1].finish_reasons == answered[-1].finish_reasons
    counted = [e.content_bytes for e in streaming.events if isinstance(e, Chunk)]
    assert sum(e.content_bytes for e in streamed if isinstance(e, Chunk)) == sum(counted)


@given(text=words, made=calls)
@settings(max_examples=30, deadline=None)
async def test_responses_events_are_read_back_by_our_own_reader(text: Any, made: Any) -> None:
    """What the translator makes is what a backend that speaks it makes: its reader finds the end,
    the usage and the same bytes of content."""
    streaming, _ = played("chat", " ".join(text) or "x", "", made, [])
    events = await said(streaming, CHAT, request("responses", BODIES["responses"], stream=True))
    reader = ResponsesReader(backend="b", normalise=from_responses)
    final = events.pop()
    assert isinstance(final, Final)
    assert final.last is not None
    size = 0
    for event in events:
        assert isinstance(event, Chunk)
        chunk = reader.chunk(event.data)
        assert chunk is not None
        assert chunk.event == event.event
        size += chunk.content_bytes
    assert reader.chunk(final.last.data) is None
    assert reader.final().usage == final.usage
    assert size == sum(e.content_bytes for e in events if isinstance(e, Chunk))


@given(text=words, made=calls)
@settings(max_examples=30, deadline=None)
async def test_messages_events_are_read_back_by_our_own_reader(text: Any, made: Any) -> None:
    """The same for messages; and blocks follow each other, each begun, ended and numbered."""
    streaming, _ = played("chat", " ".join(text) or "x", "", made, [])
    events = await said(streaming, CHAT, request("messages", BODIES["messages"], stream=True))
    reader = MessagesReader(backend="b", normalise=from_anthropic)
    open_block, begun = None, 0
    for event in events[:-1]:
        assert isinstance(event, Chunk)
        assert reader.chunk(event.data) is not None
        data = json.loads(event.data)
        if event.event == "content_block_start":
            assert open_block is None
            assert data["index"] == begun
            open_block, begun = begun, begun + 1
        elif event.event.startswith("content_block"):
            assert data["index"] == open_block
            open_block = None if event.event == "content_block_stop" else open_block
    assert open_block is None
    final = events[-1]
    assert isinstance(final, Final)
    assert final.last is not None
    assert reader.chunk(final.last.data) is None
    ended = reader.final()
    assert ended.usage is not None
    assert final.usage is not None
    assert ended.usage.total_tokens == final.usage.total_tokens
    assert ended.usage.in_cached_read == final.usage.in_cached_read


USAGES = st.builds(
    Usage,
    **{name: st.integers(0, 10**6) for name in ("in_uncached_text", "in_cached_read")},
    in_cache_write_5m=st.integers(0, 1000),
    out_text=st.integers(0, 10**6),
    out_reasoning=st.integers(0, 1000),
)


@given(usage=USAGES)
@settings(deadline=None)
async def test_usage_survives_the_crossing(usage: Usage) -> None:
    """A usage told in another API's terms, and cut again, is the same usage."""
    final = Final(usage=usage, usage_source=UsageSource.REPORTED, finish_reasons=("end_turn",))
    player = Player([Chunk(b'{"type":"ping"}', 0, "ping"), final])
    (*_, ended) = await said(player, MESSAGES, request("chat", BODIES["chat"], stream=True))
    assert isinstance(ended, Final)
    assert ended.usage_chunk is not None
    cut = from_openai(msgspec.json.encode(json.loads(ended.usage_chunk)["usage"]))
    assert cut is not None
    assert cut.usage == usage


# --- what is refused, and what is nonsense ----------------------------------------------------

DEEP = b'{"x":' * 1000 + b"1" + b"}" * 1000
REFUSED: dict[str, tuple[Surface, Dialect, Any, str | None]] = {
    "n": ("chat", MESSAGES, {"n": 2}, "n"),
    "functions": ("chat", MESSAGES, {"functions": [{"name": "f"}]}, "functions"),
    "logit bias": ("chat", MESSAGES, {"logit_bias": {"1": 2}}, "logit_bias"),
    "audio": ("chat", MESSAGES, {"modalities": ["text", "audio"]}, "modalities"),
    "json_object": (
        *("chat", MESSAGES),
        *({"response_format": {"type": "json_object"}}, "response_format"),
    ),
    "custom tool": ("chat", MESSAGES, {"tools": [{"type": "custom"}]}, "tools[0].type"),
    "role": ("chat", MESSAGES, {"messages": [{"role": "alien"}]}, "messages[0].role"),
    "audio part": (
        *("chat", MESSAGES),
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    "data URL": (
        *("chat", MESSAGES),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ]
        },
        "messages[0].content[0]",
    ),
    "arguments": (
        *("chat", MESSAGES),
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "server tool": (
        *("messages", CHAT),
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
    ),
    "mcp": ("messages", CHAT, {"mcp_servers": [{}]}, "mcp_servers"),
    "search result": (
        *("messages", CHAT),
        {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
        "messages[0].content[0]",
    ),
    "item": ("responses", CHAT, {"input": [{"type": "computer_call"}]}, "input[0].type"),
    "file id": (
        *("responses", CHAT),
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0]",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
async def test_what_cannot_be_said_is_refused(name: str) -> None:
    """The field is named, nothing is sent, and another backend may be asked."""
    surface, dialect, change, param = REFUSED[name]
    player = Player([])
    with pytest.raises(BackendCannot) as caught:
        await said(player, dialect, request(surface, {**BODIES[surface], **change}))
    assert caught.value.param == param
    assert caught.value.retryable
    assert player.asked is None


@pytest.mark.parametrize(
    ("surface", "dialect", "body"),
    [
        ("chat", MESSAGES, b'{"messages":[{"role":7}]}'),
        ("chat", MESSAGES, b'{"messages":[],"tools":[%s]}' % DEEP),
        ("messages", CHAT, b'{"messages":[{"role":"user","content":[{"type":1}]}],"max_tokens":1}'),
        ("responses", CHAT, b'{"input":[{"type":"message","content":{}}]}'),
        ("responses", MESSAGES, b'{"input":"x","text":{"format":1}}'),
    ],
    ids=["type", "deep", "block", "content", "format"],
)
async def test_malformed_fields_are_the_clients(
    surface: Surface, dialect: Dialect, body: bytes
) -> None:
    """What the view of the edge does not read, but translation must, is a 400 as well."""
    with pytest.raises(BackendRefused) as caught:
        await said(Player([]), dialect, request(surface, body))
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"delta":{"content":7}}]}',
        b'{"choices":7}',
        b"[]",
        b'{"choices":[{"delta":{"tool_calls":[{"index":0},{"index":1},{"index":0}]}}]}',
    ],
    ids=["content", "choices", "list", "interleaved"],
)
async def test_nonsense_of_a_backend_is_a_protocol_error(data: bytes) -> None:
    """What cannot be translated ends the stream with an error, never with a guess."""
    for surface in ("messages", "responses"):
        with pytest.raises(BackendProtocol):
            await said(
                Player([Chunk(data, 1), Final()]),
                CHAT,
                request(surface, BODIES[surface], stream=True),
            )


async def test_what_is_spoken_passes_untouched() -> None:
    """A backend that speaks the surface gets the very request object: no byte is read."""
    player = Player([Whole(b"{}"), Final()])
    asked = request("chat", b"\xff not even JSON")
    assert await said(player, CHAT, asked) == player.events
    assert player.asked is asked


async def test_the_dialect_names_the_limit() -> None:
    """OpenAI wants `max_completion_tokens`; many servers know only `max_tokens`."""
    for field in ("max_tokens", "max_completion_tokens"):
        player = Player([Chunk(b'{"choices":[]}'), Final()])
        dialect = Dialect(limit_field=field)  # type: ignore[arg-type]  # the loop's own names
        await said(player, dialect, request("messages", BODIES["messages"], stream=True))
        assert player.asked is not None
        assert json.loads(player.asked.body)[field] == 9


async def test_a_backend_that_speaks_nothing_of_it_says_so() -> None:
    """An embedding is nothing that a chat could be translated into."""
    with pytest.raises(BackendCannot, match="embeddings"):
        await said(Player([]), MESSAGES, request("embeddings", {"model": "m", "input": "x"}))


def test_objects() -> None:
    """Arguments must be an object, not only JSON."""
    assert is_object('{"a": 1.10}')
    assert not any(map(is_object, ("", "[]", "7", '"x"', "{", b"\xff")))


def test_completeness() -> None:
    """Neither reader takes a stream for complete before its last event."""
    reader = MessagesReader(backend="b", normalise=from_anthropic)
    reader.chunk(b'{"type":"message_stop"}')
    assert not reader.is_over  # without a stop reason it is none
    for kind in (MessagesReader, ResponsesReader):
        following = kind(backend="b", normalise=from_anthropic)
        with pytest.raises(Exception, match="before its end"):
            following.final()


def test_a_call_that_was_forced_by_name_ends_as_a_call() -> None:
    """OpenAI's finish_reason is then "stop"; to Anthropic's clients it is a tool_use."""
    assert _stop_reason("stop", has_calls=True) == "tool_use"
    assert _stop_reason("stop", has_calls=False) == "end_turn"
    assert _stop_reason("length", has_calls=True) == "max_tokens"
