"""The scripted server as a process of its own, reached by the `openai` kind over HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.base import Backend, BackendAuth, BackendRefused, BackendTruncated, Chunk
from backends.registry import build
from backends.scripted import read_books
from backends.settings import BackendSettings, Script
from telemetry.usage import Usage
from tests.fakes.requests import ask, asking, begin, final_of, text_of
from tests.fakes.upstream import GOOD, ScriptedServer, scripted_server, upstream_thread


def backend_to(base_url: str, api_key: str | None = None) -> Backend:
    """The `openai` kind in front of it."""
    settings = BackendSettings(name="up", kind="openai", base_url=base_url, allow_private=True)
    return build(settings, () if api_key is None else (api_key,))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """One quick server for the tests that do not care."""
    with scripted_server(Script(output_tokens=4, inter_token_s=0.01)) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_answers_over_http(server: ScriptedServer, stream: bool) -> None:
    """The same text, usage and books as in process."""
    backend = backend_to(server.base_url)
    request = asking(stream=stream, request_id=f"http-{stream}")
    events = await ask(backend, request)
    assert await backend.is_ready()
    await backend.aclose()
    assert text_of(events) == "the quick brown fox"
    assert final_of(events).usage == Usage(in_uncached_text=4, out_text=4)
    assert server.books()[f"http-{stream}"] == {
        "attempts": 1,
        "prompt_tokens": 4,
        "generated": 4,
        "sent": 4,
        "finished": 1,
    }


async def test_tokens_arrive_one_by_one(server: ScriptedServer) -> None:
    """Nothing between the two buffers: chunks are spaced as the script spaces tokens."""
    backend = backend_to(server.base_url)
    now = asyncio.get_running_loop().time
    stamps = [
        now()
        async for event in backend.chat(asking(request_id="spaced"))
        if isinstance(event, Chunk) and event.content_bytes
    ]
    await backend.aclose()
    assert len(stamps) == 4
    assert stamps[-1] - stamps[0] > 0.02


async def test_many_at_once(server: ScriptedServer) -> None:
    """Concurrent streams do not mix: each gets its own id and its own tokens."""
    backend = backend_to(server.base_url)
    ids = [f"many-{number}" for number in range(20)]
    answers = await asyncio.gather(*(ask(backend, asking(request_id=each)) for each in ids))
    await backend.aclose()
    for each, events in zip(ids, answers, strict=True):
        assert final_of(events).provider_request_id == f"chatcmpl-{each}"
        assert text_of(events) == "the quick brown fox"
    assert all(server.books()[each]["sent"] == 4 for each in ids)


async def test_a_client_that_leaves_stops_the_generation() -> None:
    """The upstream's own books stop growing once we close."""
    with scripted_server(Script(output_tokens=10_000, inter_token_s=0.005)) as server:
        backend = backend_to(server.base_url)
        events = begin(backend, asking())
        for _ in range(4):
            await anext(events)
        await events.aclose()
        await asyncio.sleep(0.1)
        after = server.books()["req-1"]["generated"]
        await asyncio.sleep(0.1)
        assert server.books()["req-1"]["generated"] == after < 40
        await backend.aclose()


async def test_a_cut_stream_over_http() -> None:
    """The server drops the connection after three tokens; the books know them."""
    with scripted_server(Script(fail="cut", fail_after=3)) as server:
        backend = backend_to(server.base_url)
        with pytest.raises(BackendTruncated):
            await ask(backend, asking())
        await backend.aclose()
        assert server.books()["req-1"]["sent"] == 3


async def test_keys_are_checked_when_asked_to() -> None:
    """With --api-key another key is a 401."""
    with scripted_server(api_key="right") as server:
        for key, error in (("right", None), ("wrong", BackendAuth), (None, BackendAuth)):
            backend = backend_to(server.base_url, key)
            if error is None:
                await ask(backend, asking())
            else:
                with pytest.raises(error):
                    await ask(backend, asking())
            await backend.aclose()


async def test_an_unknown_path_is_an_error_object(server: ScriptedServer) -> None:
    """As the real API answers, so that a wrong base_url is seen for what it is."""
    backend = backend_to(server.base_url + "/x")
    with pytest.raises(BackendRefused):
        await ask(backend, asking())
    await backend.aclose()


async def test_books_survive_a_kill(tmp_path: Path) -> None:
    """After kill -9 of the server its file holds at least every token that we received."""
    path = tmp_path / "books"
    script = Script(output_tokens=1_000, inter_token_s=0.002, books=str(path))
    with scripted_server(script) as server:
        backend = backend_to(server.base_url)
        received = 0
        with pytest.raises(BackendTruncated):
            async for event in backend.chat(asking()):
                received += isinstance(event, Chunk) and event.content_bytes > 0
                if received == 20:
                    os.kill(server.pid, signal.SIGKILL)
        await backend.aclose()
    assert received <= read_books(path)["req-1"] < 1_000


@pytest.mark.parametrize("script", ["{", '{"output_tokens": -1}', '{"nonsense": 1}'])
def test_a_bad_script_is_one_line_and_exit_2(script: str) -> None:
    """No traceback for a user's mistake."""
    done = subprocess.run(
        [sys.executable, "-m", "backends.scripted", "--script-json", script],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_raw_upstream_runs_on_a_thread_too() -> None:
    """For tests that block, such as those that run the packaged command."""
    with upstream_thread(GOOD) as upstream:
        backend = backend_to(upstream.base_url)

        async def once() -> str:
            try:
                return text_of(await ask(backend, asking()))
            finally:
                await backend.aclose()

        assert asyncio.run(once()) == "Hello"
    assert len(upstream.received) == 1
