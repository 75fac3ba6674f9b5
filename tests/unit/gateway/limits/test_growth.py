"""A reservation that grows with its stream, and the end that it may come to."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backends.base import Chunk
from backends.base import Final as End
from gateway.cutoff import Ending, ending_of
from gateway.limits.growth import Growth
from telemetry.ids import new_request_id
from telemetry.ledger.estimate import output_tokens
from telemetry.record import Attempt, RequestRecord
from telemetry.usage import Usage


def stream(provider: str = "openai") -> tuple[RequestRecord, Attempt]:
    """A stream that has begun."""
    attempt = Attempt(
        attempt_no=1, reason="primary", backend="b", provider=provider, model="m",
        span_id="0" * 16, started_ns=0,
    )  # fmt: skip
    record = RequestRecord(
        request_id=new_request_id(0), node="n", surface="chat", opened_ns=0, deadline_ns=1,
        trace_id="0" * 32, span_id="0" * 16, stream=True, attempts=[attempt],
    )  # fmt: skip
    return record, attempt


@given(
    held=st.integers(1, 3000),
    room=st.integers(0, 5000),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=400),
    provider=st.sampled_from(["openai", "meterline.engine"]),
)
async def test_a_stream_passes_what_is_held_by_one_event_at_most(
    held: int, room: int, sizes: list[int], provider: str
) -> None:
    """Whatever the events' sizes and the budget's room: before each event that goes on, what was
    generated is held; and a stream is ended only when less than eight tokens more fit."""
    record, attempt = stream(provider)
    left = room

    async def ask(_: Attempt, tokens: int) -> bool:
        nonlocal left
        if tokens > left:
            return False
        left -= tokens
        return True

    growth = Growth(held, ask)
    for size in sizes:
        assert output_tokens(record, attempt) < growth.held
        record.chunks += 1
        record.content_bytes += size
        if growth.is_due(record) and not await growth.covers(record, attempt):
            assert left < 8
            assert output_tokens(record, attempt) >= growth.held
            break
    assert growth.held == held + room - left


async def test_a_refused_stream_asks_again_and_goes_on() -> None:
    """Room that appears before what is held is used up is taken."""
    record, attempt = stream()
    answers = [False, True]

    async def ask(_: Attempt, __: int) -> bool:
        return answers.pop(0)

    growth = Growth(400, ask)
    record.chunks, record.content_bytes = 399, 1_500
    assert await growth.covers(record, attempt)
    record.chunks = 400
    assert growth.is_due(record)
    assert await growth.covers(record, attempt)
    assert answers == []
    assert growth.held == 600


def test_the_end_of_a_chat_is_as_a_model_writes_it() -> None:
    """Same id, model and time; a reason for each choice that had none; usage apart."""
    ending = ending_of("chat", 2)
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    done = {"index": 1, "delta": {}, "finish_reason": "stop"}
    for choice in (done, {"index": 0, "delta": {"content": "x"}}):
        ending.saw(Chunk(json.dumps({**head, "choices": [choice]}).encode()))
    (closing,) = ending.closing("insufficient_quota", "why")
    last = json.loads(closing.data)
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ended = {"ended_by": "insufficient_quota", "message": "why"}
    assert last == {**head, "choices": [choice], "meterline": ended}
    told, final = ending.ended(End(usage=Usage(in_uncached_text=3, out_text=4)))
    assert (told, final.finish_reasons, final.last) == ([], ("length",), None)
    assert final.usage_chunk is not None
    usage = json.loads(final.usage_chunk)
    tokens = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage == {**head, "choices": [], "usage": tokens}


def test_the_end_of_a_completion_has_text() -> None:
    """The older surface has no deltas."""
    ending = ending_of("completions", 1)
    ending.saw(Chunk(b'{"id":"c2","choices":[{"index":0,"text":"x","finish_reason":null}]}'))
    (closing,) = ending.closing("insufficient_quota", "why")
    choice = json.loads(closing.data)["choices"]
    assert choice == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]


def show(ending: Ending, *events: dict[str, Any]) -> None:
    """Events with names, as a backend sends them."""
    for event in events:
        ending.saw(Chunk(json.dumps(event).encode(), 4, event["type"]))


def test_the_end_of_a_message_stops_its_open_blocks() -> None:
    """A block that was stopped is not stopped again; the reason is max_tokens, usage is told, and
    message_stop is the last word."""
    ending = ending_of("messages", 1)
    show(
        ending,
        {"type": "message_start", "message": {"id": "m1"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use"}},
    )
    (stop,) = ending.closing("insufficient_quota", "why")
    assert (stop.event, json.loads(stop.data)["index"]) == ("content_block_stop", 1)
    (delta,), final = ending.ended(End(usage=Usage(in_uncached_text=3, out_text=4)))
    told = json.loads(delta.data)
    assert told["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (3, 4)
    assert told["meterline"]["ended_by"] == "insufficient_quota"
    assert final.last is not None
    assert json.loads(final.last.data) == {"type": "message_stop"}
    assert final.finish_reasons == ("max_tokens",)


def test_the_end_of_a_response_closes_what_is_open() -> None:
    """The open part and item get their done events with the text so far, numbers go on rising, and
    the response is incomplete with all its items."""
    ending = ending_of("responses", 1)
    done = {"id": "r0", "type": "reasoning", "summary": []}
    item = {"id": "i1", "type": "message", "status": "in_progress", "role": "assistant"}
    part = {"type": "output_text", "text": "", "annotations": []}
    at = {"item_id": "i1", "output_index": 1, "content_index": 0}
    delta = "response.output_text.delta"
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": done},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**item, "content": []},
        },
        {"type": "response.content_part.added", **at, "part": part},
        {"type": delta, **at, "delta": "Hel"},
        {"type": delta, **at, "delta": "lo"},
    ]
    show(ending, *({**event, "sequence_number": n} for n, event in enumerate(events)))
    closing = [json.loads(chunk.data) for chunk in ending.closing("insufficient_quota", "why")]
    assert [(event["type"], event["sequence_number"]) for event in closing] == [
        ("response.output_text.done", 7),
        ("response.content_part.done", 8),
        ("response.output_item.done", 9),
    ]
    assert closing[0] == {
        "type": "response.output_text.done",
        "sequence_number": 7,
        "output_index": 1,
        "item_id": "i1",
        "content_index": 0,
        "text": "Hello",
        "logprobs": [],
    }
    ended = {**item, "status": "incomplete", "content": [{**part, "text": "Hello"}]}
    told, final = ending.ended(End(usage=Usage(in_uncached_text=3, out_text=4)))
    assert (told, final.finish_reasons) == ([], ("max_output_tokens",))
    assert final.last is not None
    last = json.loads(final.last.data)
    assert (last["type"], last["sequence_number"]) == ("response.incomplete", 10)
    response = last["response"]
    assert (response["id"], response["status"]) == ("resp_1", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"] == [done, ended]
    assert response["usage"]["total_tokens"] == 7


def test_a_call_that_was_begun_ends_with_the_arguments_so_far() -> None:
    """Whoever reads the item sees that it is incomplete, and calls nothing."""
    ending = ending_of("responses", 1)
    call = {"id": "f1", "type": "function_call", "status": "in_progress", "name": "look"}
    show(
        ending,
        {"type": "response.output_item.added", "output_index": 0, "item": call},
        {
            "type": "response.function_call_arguments.delta",
            "item_id": "f1",
            "output_index": 0,
            "delta": '{"q',
        },
    )
    arguments, item = (json.loads(c.data) for c in ending.closing("insufficient_quota", "why"))
    assert (arguments["type"], arguments["arguments"]) == (
        "response.function_call_arguments.done",
        '{"q',
    )
    assert (item["item"]["status"], item["item"]["arguments"]) == ("incomplete", '{"q')
