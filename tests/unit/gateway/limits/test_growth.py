"""A reservation that grows with its stream, and the end that it may come to."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.cutoff import Ending
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
    ending = Ending("chat", 2)
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    done = {"index": 1, "delta": {}, "finish_reason": "stop"}
    ending.saw(json.dumps({**head, "choices": [done]}).encode())
    ending.saw(json.dumps({**head, "choices": [{"index": 0, "delta": {"content": "x"}}]}).encode())
    last = json.loads(ending.final_chunk("insufficient_quota", "why"))
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ended = {"ended_by": "insufficient_quota", "message": "why"}
    assert last == {**head, "choices": [choice], "meterline": ended}
    usage = json.loads(ending.usage_chunk(Usage(in_uncached_text=3, out_text=4)))
    tokens = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage == {**head, "choices": [], "usage": tokens}


def test_the_end_of_a_completion_has_text() -> None:
    """The older surface has no deltas."""
    ending = Ending("completions", 1)
    ending.saw(b'{"id":"c2","choices":[{"index":0,"text":"x","finish_reason":null}]}')
    choice = json.loads(ending.final_chunk("insufficient_quota", "why"))["choices"]
    assert choice == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
