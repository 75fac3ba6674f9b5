"""The real `openai` and `anthropic` clients against each kind of backend, all crossings: what an
application sees is what its SDK expects, whatever stands behind the gateway.

The backends are strict servers with the wires of both vendors; our engine has the same tests with
its real model in tests/e2e.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from msgspec import Struct
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from telemetry.record import Outcome, RequestRecord
from tests.fakes import anthropic_server, chat_server
from tests.fakes.anthropic_server import AnthropicServer, Call
from tests.fakes.chat_server import ChatServer
from tests.fakes.gateway import ENVIRONMENT, Harness, Server, backend, route, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": WEATHER["function"]["parameters"],
}
ASK: Any = [{"role": "user", "content": "How is the weather in Oslo and Rome?"}]
SAID: Any = {"openai": chat_server.Say, "anthropic": anthropic_server.Say}
CALLS = {
    "openai": {"calls": (("weather", '{"place": "Oslo"}'), ("weather", '{"place": "Rome"}'))},
    "anthropic": {
        "calls": (Call("weather", {"place": "Oslo"}), Call("weather", {"place": "Rome"}))
    },
}


class World(Struct):
    """A gateway, the strict servers behind it, and the clients in front."""

    gateway: Harness
    claude: AnthropicServer
    gpt: ChatServer
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    def says(self, kind: str, **what: Any) -> None:
        server = self.gpt if kind == "openai" else self.claude
        server.say = SAID[kind](**what)

    def asked(self, kind: str) -> dict[str, Any]:
        """The last request that the backend took."""
        return (self.gpt if kind == "openai" else self.claude).asked[-1]

    async def record(self) -> RequestRecord:
        """The record of the last request, once nothing is open."""
        settled = await self.gateway.next_settled(1)
        return settled[-1]

    async def tokens(self) -> tuple[int, int]:
        """Input and output of the last record, as the ledger has them."""
        record = await self.record()
        assert record.outcome is Outcome.OK
        usage = record.attempts[-1].usage
        assert usage is not None
        return usage.input_tokens, usage.output_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One gateway with all kinds behind it: the model's name is its backend's kind."""
    claude, gpt = AnthropicServer(ENVIRONMENT["UPSTREAM_KEY"]), ChatServer()
    async with contextlib.AsyncExitStack() as stack:
        behind_claude = await stack.enter_async_context(Server(claude, grace_s=1))
        behind_gpt = await stack.enter_async_context(Server(gpt, grace_s=1))
        tables = "".join(
            (
                backend("anthropic", f"{behind_claude.base_url}/v1").replace(
                    'kind = "openai"', 'kind = "anthropic"'
                ),
                backend("openai", f"{behind_gpt.base_url}/v1"),
                backend(
                    "native",
                    f"{behind_gpt.base_url}/v1",
                    more='surfaces = ["chat", "responses"]',
                ),
                '[[backends]]\nname = "scripted"\nkind = "scripted"\n'
                'price = { input = "1", output = "2" }\n[backends.script]\noutput_tokens = 4\n',
                *(route(name, name) for name in ("anthropic", "openai", "native", "scripted")),
                route("either", "anthropic", "openai"),
            )
        )
        harness = await stack.enter_async_context(
            running(tmp_path_factory.mktemp("surfaces"), tables=tables)
        )
        base_url = harness.server.base_url
        async with (
            AsyncOpenAI(base_url=f"{base_url}/v1", api_key=harness.key, max_retries=0) as first,
            AsyncAnthropic(base_url=base_url, api_key=harness.key, max_retries=0) as second,
        ):
            yield World(harness, claude, gpt, first, second)
        assert not await harness.broken_laws()


@pytest.fixture(autouse=True)
def fresh(world: World) -> None:
    """Each test begins with servers that say hello."""
    world.says("openai")
    world.says("anthropic")
    world.gateway.forget_failures()


kinds = pytest.mark.parametrize("kind", ["openai", "anthropic"])
USAGE = {"openai": (50, 12, 30), "anthropic": (127, 9, 100)}  # input, output, of it cached


# --- openai's client: chat --------------------------------------------------------------------


@kinds
async def test_chat_whole(world: World, kind: str) -> None:
    """Text, finish reason and usage are OpenAI's, and the ledger has the backend's counts."""
    world.says(
        kind, text="Good evening.", thinking="hm", **({"usage": True} if kind == "openai" else {})
    )
    answer = await world.openai.chat.completions.create(model=kind, messages=ASK)
    assert answer.choices[0].message.content == "Good evening."
    assert answer.choices[0].message.model_extra["reasoning_content"] == "hm"  # type: ignore[index]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    read, written, cached = USAGE[kind]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (read, written)
    assert answer.usage.prompt_tokens_details.cached_tokens == cached
    assert await world.tokens() == (read, written)


@kinds
async def test_chat_streamed(world: World, kind: str) -> None:
    """Chunks add up to the text; the usage chunk comes last, and only to those who asked."""
    world.says(kind, text="one two three")
    for asks in (True, False):
        options: Any = {"stream_options": {"include_usage": True}} if asks else {}
        stream = await world.openai.chat.completions.create(
            model=kind, messages=ASK, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
            "one two three"
        )
        assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert len({chunk.id for chunk in chunks}) == 1
        assert [c.usage.prompt_tokens for c in chunks if c.usage] == ([USAGE[kind][0]] * asks)
        assert await world.tokens() == USAGE[kind][:2]


@kinds
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_chat_tools(world: World, kind: str, stream: bool) -> None:
    """Two parallel calls arrive as two, and their results go back as the backend wants them."""
    world.says(kind, text="Let me look.", **CALLS[kind])
    ask: Any = {"model": kind, "messages": ASK, "tools": [WEATHER], "tool_choice": "required"}
    if stream:
        async with world.openai.chat.completions.stream(**ask) as running_stream:
            answer: Any = await running_stream.get_final_completion()
    else:
        answer = await world.openai.chat.completions.create(**ask)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"place": "Oslo"},
        {"place": "Rome"},
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    world.says(kind, text="Fine in both.")
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls
    ]
    turns = [*ASK, message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})]
    answer = await world.openai.chat.completions.create(
        model=kind, messages=[*turns, *results], tools=[WEATHER], parallel_tool_calls=False
    )
    assert answer.choices[0].message.content == "Fine in both."
    if kind == "anthropic":
        asked = world.asked(kind)
        assert asked["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
        assert [block["type"] for block in asked["messages"][-1]["content"]] == ["tool_result"] * 2


async def test_chat_pictures_system_and_limits_reach_anthropic(world: World) -> None:
    """System prompts, pictures, stops, limits and effort are said in the backend's words."""
    await world.openai.chat.completions.create(
        model="anthropic",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                ],
            },
        ],
        stop=["END"],
        max_completion_tokens=77,
        temperature=1.5,
        user="u-1",
    )
    asked = world.asked("anthropic")
    assert [block["text"] for block in asked["system"]] == ["Be short.", "Be kind."]
    assert [block.get("source") for block in asked["messages"][0]["content"]] == [
        None,
        {"type": "base64", "media_type": "image/png", "data": PIXEL},
        {"type": "url", "url": "https://example.com/a.png"},
    ]
    assert asked["stop_sequences"] == ["END"]
    assert asked["max_tokens"] == 77
    assert asked["temperature"] == 1.0
    assert asked["metadata"] == {"user_id": "u-1"}
    await world.openai.chat.completions.create(
        model="anthropic", messages=ASK, reasoning_effort="high"
    )
    asked = world.asked("anthropic")
    assert asked["max_tokens"] == 4096  # it must be said
    assert asked["output_config"] == {"effort": "high"}
    assert asked["thinking"] == {"type": "adaptive"}


class City(BaseModel):
    """What the model is to fill in."""

    name: str


@kinds
async def test_chat_json_schema(world: World, kind: str) -> None:
    """A schema is the backend's own structured output, and `parse` reads it."""
    world.says(kind, text='{"name": "Oslo"}')
    answer = await world.openai.chat.completions.parse(
        model=kind, messages=ASK, response_format=City
    )
    assert answer.choices[0].message.parsed == City(name="Oslo")
    asked = world.asked(kind)
    if kind == "anthropic":
        assert asked["output_config"]["format"]["schema"]["properties"].keys() == {"name"}
    else:
        assert asked["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=["n", "logprobs", "json_object"],
)
async def test_what_anthropic_cannot_do_is_refused(
    world: World, more: dict[str, Any], param: str
) -> None:
    """What has no words there is a 400 that names the field; another backend of the route takes
    it."""
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.chat.completions.create(model="anthropic", messages=ASK, **more)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == param
    raw = await world.openai.chat.completions.with_raw_response.create(
        model="either", messages=ASK, **more
    )
    assert raw.headers["x-meterline-backend"] == "openai"


async def test_what_cannot_be_translated_goes_elsewhere(world: World) -> None:
    """A detail that only translation finds makes the next backend answer, and no circuit open."""
    files: Any = [{"type": "file", "file": {"file_id": "file-1"}}]
    turns: list[Any] = [{"role": "user", "content": files}]
    for _ in range(6):
        raw = await world.openai.chat.completions.with_raw_response.create(
            model="either", messages=turns
        )
        assert raw.headers["x-meterline-backend"] == "openai"
        assert raw.headers["x-meterline-attempts"] == "2"
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.chat.completions.create(model="anthropic", messages=turns)
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        ((529, "overloaded_error", "Overloaded"), openai.InternalServerError, "upstream_failed"),
        ((401, "authentication_error", "bad"), openai.InternalServerError, "upstream_auth"),
        ((429, "rate_limit_error", "slow"), openai.RateLimitError, "upstream_rate_limited"),
        (
            (400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
            openai.BadRequestError,
            "context_length_exceeded",
        ),
    ],
    ids=["overloaded", "auth", "limit", "context"],
)
async def test_errors_of_anthropic_are_openais(
    world: World, stream: bool, error: Any, raised: Any, code: str
) -> None:
    """An error of the backend has OpenAI's shape and the code that frameworks key on."""
    world.says("anthropic", error=error)
    with pytest.raises(raised) as caught:
        await world.openai.chat.completions.create(model="anthropic", messages=ASK, stream=stream)
    assert caught.value.code == code


@kinds
async def test_a_cut_chat_is_an_error_to_the_client(world: World, kind: str) -> None:
    """A stream that the backend cut raises, whatever its API, and settles as truncated."""
    world.says(kind, text="one two three four", cut_after=5)
    stream = await world.openai.chat.completions.create(model=kind, messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="could not answer"):
        async for _ in stream:
            pass
    assert (await world.record()).outcome is Outcome.TRUNCATED


async def test_sync_client(world: World) -> None:
    """The synchronous client works as the asynchronous one, whole and streamed."""

    def ask() -> str:
        with OpenAI(
            base_url=f"{world.gateway.server.base_url}/v1", api_key=world.gateway.key, max_retries=0
        ) as client:
            whole = client.chat.completions.create(model="anthropic", messages=ASK)
            chunks = client.chat.completions.create(model="anthropic", messages=ASK, stream=True)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert whole.choices[0].message.content == text
            return text

    assert await asyncio.to_thread(ask) == "Hello there."


# --- openai's client: completions, embeddings, what scripted does -----------------------------


async def test_completions_go_only_where_they_are_known(world: World) -> None:
    """Text completions work where the backend has them, and are refused in words elsewhere."""
    answer = await world.openai.completions.create(model="scripted", prompt="a b")
    assert answer.choices[0].text == "the quick brown fox"
    with pytest.raises(openai.BadRequestError, match="completions"):
        await world.openai.completions.create(model="anthropic", prompt="a b")


async def test_embeddings(world: World) -> None:
    """Vectors in both encodings are the same, follow the text alone, and are billed as input."""
    texts = ["a b c", "d"]
    packed = await world.openai.embeddings.create(model="scripted", input=texts)
    plain = await world.openai.embeddings.create(
        model="scripted", input=texts, encoding_format="float"
    )
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert plain.data[0].embedding != plain.data[1].embedding
    assert plain.usage.prompt_tokens == 4
    assert await world.tokens() == (4, 0)
    record = await world.record()
    assert record.surface == "embeddings"
    assert record.cost == Decimal("0.000004")
    raw = await world.openai.embeddings.with_raw_response.create(
        model="scripted", input=[[1, 2], [3]], dimensions=5, encoding_format="float"
    )
    assert [len(one.embedding) for one in raw.parse().data] == [5, 5]
    assert raw.headers["x-meterline-cost-usd"] == "0.000003"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
    ids=["empty", "no texts", "number", "dimensions", "encoding"],
)
async def test_embeddings_are_checked(world: World, more: dict[str, Any], param: str) -> None:
    """A wrong field is a 400 with its name, before anything is spent."""
    answer = await world.gateway.client.post(
        "/v1/embeddings", json={"model": "scripted", **more}, headers=world.gateway.auth
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not (await world.record()).attempts


async def test_embeddings_are_refused_where_there_are_none(world: World) -> None:
    """A model whose backend has no embeddings says so."""
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.embeddings.create(model="anthropic", input="x")
    assert caught.value.code == "unsupported_parameter"


# --- anthropic's client -----------------------------------------------------------------------


@kinds
async def test_message_whole(world: World, kind: str) -> None:
    """Content blocks, stop reason and usage are Anthropic's, on both kinds of backend."""
    world.says(kind, text="Good evening.", thinking="hm")
    answer = await world.anthropic.messages.create(
        model=kind, max_tokens=100, messages=ASK, system="Be short.", stop_sequences=["END"]
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Good evening."  # type: ignore[union-attr]
    assert answer.stop_reason == "end_turn"
    assert answer.id.startswith("msg_")
    read, written, cached = USAGE[kind]
    assert answer.usage.cache_read_input_tokens == cached
    assert answer.usage.output_tokens == written
    whole = answer.usage.input_tokens + cached + (answer.usage.cache_creation_input_tokens or 0)
    assert whole == read
    assert await world.tokens() == (read, written)
    if kind == "openai":
        asked = world.asked(kind)
        assert asked["messages"][0] == {"role": "system", "content": "Be short."}
        assert asked["max_tokens"] == 100
        assert asked["stop"] == ["END"]


@kinds
async def test_message_streamed(world: World, kind: str) -> None:
    """The client's own accumulator builds the same message from the events."""
    world.says(kind, text="one two three", thinking="hm")
    ask: Any = {"model": kind, "max_tokens": 100, "messages": ASK}
    async with world.anthropic.messages.stream(**ask) as stream:
        names = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    whole = await world.anthropic.messages.create(**ask)
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert await world.tokens() == USAGE[kind][:2]


@kinds
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_message_tools(world: World, kind: str, stream: bool) -> None:
    """Two parallel calls are two blocks, and their results go back as the backend wants them."""
    world.says(kind, text="Let me look.", **CALLS[kind])
    ask: Any = {"model": kind, "max_tokens": 100, "messages": ASK, "tools": [TOOL]}
    if stream:
        async with world.anthropic.messages.stream(**ask) as running_stream:
            answer: Any = await running_stream.get_final_message()
    else:
        answer = await world.anthropic.messages.create(**ask)
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"place": "Oslo"}, {"place": "Rome"}]
    world.says(kind, text="Fine in both.")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "fine"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "fine"}],
        },
        {"type": "text", "text": "Well?"},
    ]
    turns: list[Any] = [*ASK, {"role": "assistant", "content": answer.content}]
    answer = await world.anthropic.messages.create(
        model=kind,
        max_tokens=100,
        messages=[*turns, {"role": "user", "content": results}],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert answer.content[0].text == "Fine in both."
    if kind == "openai":
        asked = world.asked(kind)
        assert [turn["role"] for turn in asked["messages"]] == [
            *("user", "assistant", "tool", "tool", "user")
        ]
        assert asked["tool_choice"] == "required"
        assert asked["parallel_tool_calls"] is False


async def test_messages_pass_byte_for_byte(world: World) -> None:
    """To a backend that speaks it nothing is changed but the model's name, in no direction; the
    client's version and beta headers go along, and nothing else of it."""
    body = (
        b'{"model":"anthropic","max_tokens":7,"future_field":{"b":1.10,"a":12345678901234567890},'
        b'"messages":[{"role":"user","content":"hi"}]}'
    )
    headers = {"x-api-key": world.gateway.key, "anthropic-version": "2023-06-01"}
    headers |= {"anthropic-beta": "future-1", "x-stainless-lang": "python", "cookie": "a=b"}
    answer = await world.gateway.client.post("/v1/messages", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.content == json.dumps(world.claude._message(world.asked("anthropic"))).encode()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert world.asked("anthropic") == json.loads(body)
    sent = world.claude.headers
    assert sent["anthropic-beta"] == "future-1"
    assert not {"cookie", "x-stainless-lang", "authorization"} & set(sent)
    assert world.gateway.key not in str(sent)


async def test_pictures_and_schemas_reach_chat(world: World) -> None:
    """Pictures, documents as text, and schemas are said in the backend's words."""
    await world.anthropic.messages.create(
        model="openai",
        max_tokens=10,
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://example.com/a"}},
                    {"type": "text", "text": "What is it?"},
                ],
            }
        ],
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        thinking={"type": "enabled", "budget_tokens": 20_000},
    )
    asked = world.asked("openai")
    assert [
        part.get("image_url", part.get("text")) for part in asked["messages"][0]["content"]
    ] == [
        {"url": f"data:image/png;base64,{PIXEL}"},
        {"url": "https://example.com/a"},
        "What is it?",
    ]
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked["reasoning_effort"] == "high"


async def test_count_tokens(world: World) -> None:
    """The vendor's own count where there is one, elsewhere an estimate; neither costs anything."""
    for model, count in (("anthropic", 14), ("openai", 24)):
        counted = await world.anthropic.messages.count_tokens(model=model, messages=ASK)
        assert counted.input_tokens == count
        record = await world.record()
        assert record.surface == "count_tokens"
        assert record.cost == 0


@pytest.mark.parametrize(
    ("change", "raised", "kind"),
    [
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"key": "sk-ml-nothing"}, anthropic.AuthenticationError, "authentication_error"),
    ],
    ids=["model", "field", "key"],
)
async def test_our_errors_are_anthropics(
    world: World, change: dict[str, Any], raised: Any, kind: str
) -> None:
    """What the gateway refuses has the shape, type and id that the client reads."""
    client = world.anthropic
    if "key" in change:
        client = client.with_options(api_key=change.pop("key"))
    ask: Any = {"model": "openai", "max_tokens": 9, "messages": ASK, **change}
    with pytest.raises(raised) as caught:
        await client.messages.create(**ask)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == caught.value.response.headers["request-id"]


@kinds
async def test_a_backends_error_is_anthropics(world: World, kind: str) -> None:
    """A backend that fails is an error the client retries, in its shape."""
    code = "overloaded_error" if kind == "anthropic" else "server_error"
    world.says(kind, error=(529 if kind == "anthropic" else 500, code, "busy"))
    with pytest.raises(anthropic.InternalServerError) as caught:
        await world.anthropic.messages.create(model=kind, max_tokens=9, messages=ASK)
    body: Any = caught.value.body
    assert body["error"]["type"] == "api_error"
    assert caught.value.response.headers["x-should-retry"] == "true"


@kinds
async def test_a_cut_message_is_an_error_event(world: World, kind: str) -> None:
    """A cut stream ends with an error event and never with `message_stop`."""
    world.says(kind, text="one two three four", cut_after=5)
    async with world.gateway.client.stream(
        "POST",
        "/v1/messages",
        json={"model": kind, "max_tokens": 9, "messages": ASK, "stream": True},
        headers={"x-api-key": world.gateway.key},
    ) as answer:
        text = (await answer.aread()).decode()
    last = text.removesuffix("\n\n").rpartition("\n\n")[2].split("\n")
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "api_error"
    assert "message_stop" not in text
    assert (await world.record()).outcome is Outcome.TRUNCATED
    with pytest.raises(anthropic.APIStatusError):
        async with world.anthropic.messages.stream(
            model=kind, max_tokens=9, messages=ASK
        ) as stream:
            await stream.get_final_message()


async def test_models_are_listed_in_each_clients_form(world: World) -> None:
    """Both clients read the same list, and a model's entry, in their own form."""
    names = [model.id async for model in world.openai.models.list()]
    assert names == [model.id async for model in world.anthropic.models.list()]
    assert (await world.anthropic.models.retrieve("scripted")).id == "scripted"


async def test_scripted_speaks_messages(world: World) -> None:
    """The scripted backend answers Anthropic's client too, so that a demo needs no vendor."""
    async with world.anthropic.messages.stream(
        model="scripted", max_tokens=2, messages=ASK
    ) as stream:
        message = await stream.get_final_message()
    assert message.content[0].text == "the quick"  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens"
    assert await world.tokens() == (8, 2)
