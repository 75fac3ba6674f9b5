"""The scripted backend in process: what it plays, and its books."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from backends.base import (
    BackendAuth,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTimeout,
    BackendTruncated,
    Chunk,
    Final,
    Timeouts,
    Whole,
)
from backends.scripted import Books, Scripted, read_books
from backends.settings import BackendSettings, Script
from telemetry.usage import Usage, UsageSource
from telemetry.usage import from_openai as normalise
from tests.fakes.clock import FakeClock
from tests.fakes.requests import ask, asking, begin, final_of, text_of


def scripted(**script: Any) -> Scripted:
    """A backend that plays this script."""
    settings = BackendSettings(name="demo", kind="scripted", script=Script(**script))
    return Scripted(settings, normalise=normalise, clock=FakeClock())


async def test_a_stream_has_one_token_per_content_chunk() -> None:
    """Role, tokens, reason, then the end with usage; the books agree."""
    backend = scripted(output_tokens=4, text="one two three")
    events = await ask(backend, asking())
    contents = [event for event in events if isinstance(event, Chunk) and event.content_bytes]
    assert text_of(events) == "one two three one"
    assert len(contents) == 4
    final = final_of(events)
    assert final.usage == Usage(in_uncached_text=4, out_text=4)
    assert final.finish_reasons == ("stop",)
    assert final.provider_request_id == "chatcmpl-req-1"
    assert backend.books.served == {"req-1": 4}
    assert backend.books.entries["req-1"].finished == 1
    await backend.aclose()


async def test_whole_and_streamed_say_the_same() -> None:
    """Text, usage, reasons and model do not depend on the way."""
    backend = scripted(output_tokens=5)
    streamed, whole = await ask(backend, asking()), await ask(backend, asking(stream=False))
    assert text_of(streamed) == text_of(whole)
    one, two = final_of(streamed), final_of(whole)
    assert (one.usage, one.finish_reasons, one.answered_model) == (
        two.usage,
        two.finish_reasons,
        two.answered_model,
    )
    await backend.aclose()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_completions(stream: bool) -> None:
    """The older surface, with `prompt` and `text`."""
    backend = scripted(output_tokens=2, text="a b")
    body = json.dumps({"model": "m", "prompt": "p q r", "stream": stream}).encode()
    request = structs.replace(asking(stream=stream), surface="completions", body=body)
    events = await ask(backend, request)
    assert text_of(events) == "a b"
    assert final_of(events).usage == Usage(in_uncached_text=3, out_text=2)
    await backend.aclose()


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_ends_with_length(limit: str) -> None:
    """Both spellings of the limit are honoured."""
    backend = scripted(output_tokens=9)
    final = final_of(await ask(backend, asking(body={limit: 3})))
    assert final.finish_reasons == ("length",)
    assert final.usage is not None and final.usage.out_text == 3
    await backend.aclose()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_several_choices(stream: bool) -> None:
    """n choices cost n times the tokens, and each has its reason."""
    backend = scripted(output_tokens=3)
    events = await ask(backend, asking(stream=stream, body={"n": 2}))
    final = final_of(events)
    assert final.finish_reasons == ("stop", "stop")
    assert final.usage is not None and final.usage.out_text == 6
    assert backend.books.served == {"req-1": 6}
    await backend.aclose()


async def test_usage_is_shown_only_as_asked() -> None:
    """Every chunk carries `usage: null` and the last one usage, as the real API does."""
    backend = scripted(output_tokens=1)
    events = await ask(backend, asking())
    assert all(
        json.loads(event.data)["usage"] is None for event in events if isinstance(event, Chunk)
    )
    final = final_of(events)
    assert final.usage_chunk is not None
    assert json.loads(final.usage_chunk)["choices"] == []
    await backend.aclose()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_server_without_usage(stream: bool) -> None:
    """`report_usage = false` gives a complete answer and no figures."""
    backend = scripted(report_usage=False)
    final = final_of(await ask(backend, asking(stream=stream)))
    assert (final.usage, final.usage_source) == (None, UsageSource.NONE)
    await backend.aclose()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        ("refuse", BackendRefused),
        ("500", BackendFailed),
        ("429", BackendRateLimited),
        ("401", BackendAuth),
        ("stall", BackendTimeout),
        ("cut", BackendTruncated),
        ("garbage", BackendProtocol),
        ("error_event", BackendFailed),
        ("error_200", BackendFailed),
    ],
)
async def test_failures(fail: str, kind: type[BackendError], stream: bool) -> None:
    """Each scripted failure arrives as the error that a real one would."""
    backend = scripted(fail=fail, fail_after=1)
    timeouts = Timeouts(first_token_s=1, inter_token_s=0.1, total_s=0.3)
    with pytest.raises(kind) as caught:
        await ask(backend, asking(stream=stream, timeouts=timeouts))
    assert type(caught.value) is kind
    await backend.aclose()


async def test_a_stream_fails_after_the_tokens_it_was_told() -> None:
    """And the books know them."""
    backend = scripted(fail="cut", fail_after=3)
    seen = 0
    with pytest.raises(BackendTruncated):
        async for event in backend.chat(asking()):
            seen += isinstance(event, Chunk) and event.content_bytes > 0
    assert seen == 3
    assert backend.books.served == {"req-1": 3}
    assert backend.books.entries["req-1"].finished == 0
    await backend.aclose()


async def test_every_nth_request_fails() -> None:
    """With `fail_every = 3` the third and the sixth."""
    backend = scripted(fail="500", fail_every=3, output_tokens=1)
    outcomes = []
    for _ in range(6):
        try:
            await ask(backend, asking(stream=False))
            outcomes.append(True)
        except BackendFailed:
            outcomes.append(False)
    assert outcomes == [True, True, False, True, True, False]
    await backend.aclose()


async def test_closing_early_stops_the_generation() -> None:
    """The books hold what was generated before, and grow no more."""
    backend = scripted(output_tokens=1_000, inter_token_s=0.001)
    events = begin(backend, asking())
    for _ in range(5):
        await anext(events)
    await events.aclose()
    generated = backend.books.served["req-1"]
    assert 4 <= generated <= 5
    await asyncio.sleep(0.02)
    assert backend.books.served["req-1"] == generated
    await backend.aclose()


async def test_latencies_are_kept() -> None:
    """Time to the first token and between tokens are the script's."""
    backend = scripted(output_tokens=3, first_token_s=0.05, inter_token_s=0.02)
    now = asyncio.get_running_loop().time
    began = now()
    stamps = [
        now() - began
        async for event in backend.chat(asking())
        if isinstance(event, Chunk) and event.content_bytes
    ]
    assert stamps[0] >= 0.05
    assert stamps[2] >= 0.09
    await backend.aclose()


async def test_books_on_disk(tmp_path: Path) -> None:
    """One line a token, readable by who comes after a crash."""
    path = tmp_path / "books"
    backend = scripted(output_tokens=3, books=str(path))
    await ask(backend, asking())
    await ask(backend, asking(stream=False, request_id="req-2"))
    assert read_books(path) == {"req-1": 3, "req-2": 3} == backend.books.served
    await backend.aclose()
    books = Books(str(path))
    books.token("req-1", books.open("req-1", 0))
    books.close()
    assert read_books(path)["req-1"] == 4


async def test_bodies_that_are_no_requests() -> None:
    """Wrong types and a missing prompt are refused as by a real server."""
    backend = scripted()
    for body in ({"messages": 7}, {"messages": None}, {"n": 1_000}):
        with pytest.raises(BackendRefused):
            await ask(backend, asking(body=body))
    await backend.aclose()


async def test_no_output_at_all() -> None:
    """Zero tokens is a complete answer."""
    backend = scripted(output_tokens=0)
    for stream in (True, False):
        events = await ask(backend, asking(stream=stream))
        assert text_of(events) == ""
        assert isinstance(events[-1], Final)
    assert any(isinstance(event, Whole) for event in events)
    assert await backend.is_ready()
    await backend.aclose()
