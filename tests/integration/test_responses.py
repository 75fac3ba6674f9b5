"""The Responses API with the real client: over a backend that speaks it, and translated for those
that do not; and the store behind `previous_response_id`, one tenant's walls included."""

import json
from datetime import timedelta
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from backends.base import Previous
from gateway.config import ResponseSettings
from gateway.errors import BadRequest, NotFound
from gateway.responses import ResponseStore
from gateway.tenant_tables import TenantBase
from telemetry.database import open_engine
from telemetry.ids import TenantId
from telemetry.record import Outcome
from tests.fakes.clock import FakeClock
from tests.integration.test_surface_clients import CALLS, PIXEL, USAGE, WEATHER, World, fresh, world

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = ["fresh", "world"]  # fixtures of the neighbour

ASK = "How is the weather in Oslo and Rome?"
TOOL: Any = {"type": "function", "strict": False, **WEATHER["function"]}
kinds = pytest.mark.parametrize("kind", ["openai", "anthropic"])
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def respond(world: World, kind: str, *, stream: bool, **ask: Any) -> Any:
    """The response that the client has at the end."""
    ask = {"model": kind, "input": ASK, **ask}
    if not stream:
        return await world.openai.responses.create(**ask)
    final: Any = None
    async for event in await world.openai.responses.create(stream=True, **ask):
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    return final


@kinds
@both
async def test_text(world: World, kind: str, stream: bool) -> None:
    """Text, status and usage are those of the Responses API, and the ledger has the counts."""
    world.says(kind, text="Good evening.", thinking="hm")
    response = await respond(world, kind, stream=stream, instructions="Be short.", user="u-1")
    assert response.output_text == "Good evening."
    assert response.status == "completed"
    assert response.id.startswith("resp_")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.instructions == "Be short."
    read, written, cached = USAGE[kind]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (read, written)
    assert response.usage.input_tokens_details.cached_tokens == cached
    assert await world.tokens() == (read, written)
    record = await world.record()
    assert record.surface == "responses"
    asked = world.asked(kind)
    system = asked["messages"][0]["content"] if kind == "openai" else asked["system"][0]["text"]
    assert system == "Be short."


@kinds
async def test_events(world: World, kind: str) -> None:
    """All events come, in order and numbered, and their parts add up to the response."""
    world.says(kind, text="one two", **CALLS[kind])
    events = [
        event
        async for event in await world.openai.responses.create(
            model=kind, input=ASK, tools=[TOOL], stream=True
        )
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    # How many pieces the arguments come in is the backend's.
    assert [name for at, name in enumerate(names) if names[at - 1 : at] != [name]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *(
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        )
        * 2,
        "response.completed",
    ]
    done: Any = [event for event in events if event.type == "response.output_item.done"]
    final: Any = events[-1]
    assert [event.item.to_dict() for event in done] == [
        item.to_dict() for item in final.response.output
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.response.output_text == "one two"


@kinds
@both
async def test_tools_and_going_on(world: World, kind: str, stream: bool) -> None:
    """Calls are answered with `previous_response_id` alone: the conversation is put together."""
    world.says(kind, text="", **CALLS[kind])
    first = await respond(world, kind, stream=stream, tools=[TOOL], tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"place": "Oslo"}, {"place": "Rome"}]
    world.says(kind, text="Fine in both.")
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
        for call in calls
    ]
    second = await respond(
        world, kind, stream=stream, tools=[TOOL], input=results, previous_response_id=first.id
    )
    assert second.output_text == "Fine in both."
    assert second.previous_response_id == first.id
    roles = [turn["role"] for turn in world.asked(kind)["messages"]]
    assert roles == (
        ["user", "assistant", "tool", "tool"] if kind == "openai" else ["user", "assistant", "user"]
    )
    third = await respond(
        world, kind, stream=stream, input="And in Kiel?", previous_response_id=second.id
    )
    turns = world.asked(kind)["messages"]
    assert len(turns) == len(roles) + 2
    assert "And in Kiel?" in json.dumps(turns[-1])
    assert third.id not in (first.id, second.id)


class City(BaseModel):
    """What the model is to fill in."""

    name: str


@kinds
async def test_schemas_pictures_and_limits(world: World, kind: str) -> None:
    """A schema, a picture, an effort and a limit are said in the backend's words."""
    world.says(
        kind, text='{"name": "Oslo"}', **{} if kind == "openai" else {"stop_reason": "max_tokens"}
    )
    if kind == "openai":
        world.says(kind, text='{"name": "Oslo"}', finish_reason="length")
    response = await world.openai.responses.parse(
        model=kind,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Where?"},
                    {
                        "type": "input_image",
                        "image_url": f"data:image/png;base64,{PIXEL}",
                        "detail": "auto",
                    },
                ],
            }
        ],
        text_format=City,
        max_output_tokens=50,
        reasoning={"effort": "low"},
    )
    assert response.output_parsed == City(name="Oslo")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    asked = world.asked(kind)
    assert asked["max_tokens"] == 50
    assert PIXEL in json.dumps(asked["messages"])
    if kind == "openai":
        assert asked["response_format"]["json_schema"]["name"] == "City"
        assert asked["reasoning_effort"] == "low"
    else:
        assert asked["output_config"]["effort"] == "low"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=["background", "conversation", "reference", "unknown", "tool", "prompt", "limit"],
)
async def test_refused(world: World, more: dict[str, Any], param: str) -> None:
    """What cannot be answered, or would reach into an account that all tenants share, is a 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        await respond(world, "openai", stream=False, **more)
    assert caught.value.param == param


@both
async def test_native_backends_get_it_as_it_is(world: World, stream: bool) -> None:
    """A backend that speaks it gets the client's bytes and its answer is not touched; an earlier
    response goes by its id, and to another backend as the conversation."""
    body = {"model": "native", "input": "hi", "future_field": {"b": 1.10}, "stream": stream}
    answer = await world.gateway.client.post("/v1/responses", json=body, headers=world.gateway.auth)
    assert world.asked("openai") == body
    assert world.gpt.paths[-1] == "/v1/responses"
    assert b'"future_field": 1.1' in answer.content
    assert await world.tokens() == (50, 12)
    first = f"resp_native{len(world.gpt.asked)}"
    assert first in answer.text
    second = await respond(world, "native", stream=stream, input="more", previous_response_id=first)
    assert world.asked("openai")["previous_response_id"] == first
    await respond(world, "openai", stream=stream, input="on", previous_response_id=second.id)
    turns = world.asked("openai")["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 + ["user"]
    elsewhere = await respond(world, "anthropic", stream=stream)
    await respond(world, "native", stream=stream, previous_response_id=elsewhere.id)
    asked = world.asked("openai")
    assert "previous_response_id" not in asked
    assert [item.get("role") for item in asked["input"]] == ["user", "assistant", "user"]
    assert not any("id" in item for item in asked["input"])


async def test_a_cut_response_is_an_error_event(world: World) -> None:
    """A cut stream ends with a numbered error event and never with `response.completed`; nothing
    of it is stored."""
    for kind, after in (("openai", 4), ("anthropic", 5), ("native", 3)):
        world.says("openai" if kind == "native" else kind, text="one two three", cut_after=after)
        events = [
            event
            async for event in await world.openai.responses.create(
                model=kind, input=ASK, stream=True
            )
        ]
        names = [event.type for event in events]
        assert names[-1] == "error"
        assert "response.completed" not in names
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))
        assert (await world.record()).outcome is Outcome.TRUNCATED
        with pytest.raises(openai.NotFoundError):
            await world.openai.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]


# --- the store --------------------------------------------------------------------------------


@both
async def test_stored_responses_are_one_tenants(world: World, stream: bool) -> None:
    """What is stored can be read and deleted by its tenant; for others it does not exist, not even
    to go on from; `store: false` leaves nothing."""
    kept = await respond(world, "openai", stream=stream)
    native = await respond(world, "native", stream=stream)
    unkept = await respond(world, "openai", stream=stream, store=False)
    assert unkept.store is False
    read = await world.openai.responses.retrieve(kept.id)
    assert read.to_dict() == kept.to_dict()
    tenants = world.gateway.service.tenants
    other = await tenants.create_tenant(f"other-{stream}".lower(), {}, actor="test")
    key = (await tenants.create_key(other.id, name="k", actor="test")).secret.reveal()
    base_url = f"{world.gateway.server.base_url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as stranger:
        for response in (kept, native):
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.delete(response.id)
            for model in ("openai", "native"):
                with pytest.raises(openai.BadRequestError) as caught:
                    await stranger.responses.create(
                        model=model, input="more", previous_response_id=response.id
                    )
                assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        await world.openai.responses.retrieve(unkept.id)
    await world.openai.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        await world.openai.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError):
        await respond(world, "openai", stream=stream, previous_response_id=kept.id)


ONE, TWO = TenantId("one"), TenantId("two")


async def test_the_store_forgets_by_age_and_by_size(database_url: str) -> None:
    """Each tenant has its own room, the oldest goes first, and nothing outlives its time."""
    engine, clock = open_engine(database_url), FakeClock()
    async with engine.begin() as db:
        await db.run_sync(TenantBase.metadata.create_all)
    store = ResponseStore(engine, clock, lambda: ResponseSettings(keep_days=1, tenant_mb=1))

    async def keep(tenant: TenantId, name: str, size: int) -> None:
        text = "x" * size
        answered = json.dumps({"id": name, "output": [{"type": "message", "content": text}]})
        await store.keep(
            tenant, body=b'{"input":"hi"}', previous=None, backend=None, response=answered.encode()
        )
        clock.advance(1)

    for name in ("a", "b", "c"):
        await keep(ONE, name, 200_000)  # stored twice: as answered, and as conversation
    await keep(TWO, "a", 200_000)
    with pytest.raises(NotFound):
        await store.read(ONE, "a")
    assert json.loads((await store.recall(ONE, "b")).items)[0]["content"] == "hi"
    assert await store.read(ONE, "c")
    assert await store.read(TWO, "a")
    await keep(ONE, "vast", 600_000)  # more than the whole room: not kept, and pushes nothing out
    with pytest.raises(BadRequest):
        await store.recall(ONE, "vast")
    assert await store.read(ONE, "b")
    for wrong in ("", "b\0", "x" * 1000, "b' OR 1=1"):
        with pytest.raises(NotFound):
            await store.read(ONE, wrong)
    clock.advance(timedelta(days=1).total_seconds())
    with pytest.raises(NotFound):
        await store.read(TWO, "a")
    earlier = Previous(None, b'[{"type": "message", "role": "user", "content": "first"}]')
    await store.keep(
        ONE,
        body=b'{"input":[{"role":"user","content":"second"}]}',
        previous=earlier,
        backend="b",
        response=b'{"id":"d","output":[]}',
    )
    recalled = await store.recall(ONE, "d")
    assert recalled.backend == "b"
    assert [item["content"] for item in json.loads(recalled.items)] == ["first", "second"]
    await engine.dispose()


async def test_a_database_that_is_gone_costs_no_answer() -> None:
    """What cannot be stored is counted; the client has its answer."""
    engine = open_engine("sqlite:////nonexistent/meterline.db")
    store = ResponseStore(engine, FakeClock(), ResponseSettings)
    await store.keep(
        ONE, body=b'{"input":"hi"}', previous=None, backend=None, response=b'{"id":"a","output":[]}'
    )
    assert store.failures == 1
    for answer in (b"{}", b'{"id":"a","output":7}'):  # of a backend that is none
        await store.keep(ONE, body=b'{"input":"hi"}', previous=None, backend=None, response=answer)
    assert store.failures == 3
    await engine.dispose()
