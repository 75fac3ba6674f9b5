"""What a backend costs in Python calls: deterministic where microseconds are not. Over httpx's own
transport it was 2,800 a request and 288 a chunk (ADR 0012)."""

import cProfile
import pstats
from collections.abc import Iterator

import pytest

from backends.base import Backend, ChatRequest
from backends.registry import build
from backends.settings import BackendSettings, Script
from tests.fakes.requests import ask, asking
from tests.fakes.upstream import ScriptedServer, scripted_server

ROUNDS = 5


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    """A server of one token, and one of 51 tokens far enough apart to be read one by one."""
    with (
        scripted_server(Script(output_tokens=1)) as short,
        scripted_server(Script(output_tokens=51, inter_token_s=0.003)) as long,
    ):
        yield short, long


def to(server: ScriptedServer) -> Backend:
    """The `openai` kind in front of it."""
    settings = BackendSettings(
        name="up", kind="openai", base_url=server.base_url, allow_private=True
    )
    return build(settings, ())


async def calls(backend: Backend, request: ChatRequest) -> float:
    """Python calls of one request on a warm connection."""
    await ask(backend, request)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(ROUNDS):
        await ask(backend, request)
    profile.disable()
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]  # undocumented
    return total / ROUNDS


async def test_calls_per_whole_request(servers: tuple[ScriptedServer, ScriptedServer]) -> None:
    """On asyncio's own loop, whose transports are Python too."""
    backend = to(servers[0])
    measured = await calls(backend, asking(stream=False))
    await backend.aclose()
    assert measured < 400


async def test_calls_per_streamed_chunk(servers: tuple[ScriptedServer, ScriptedServer]) -> None:
    """From the socket to the event."""
    short, long = to(servers[0]), to(servers[1])
    per_chunk = (await calls(long, asking()) - await calls(short, asking())) / 50
    await short.aclose()
    await long.aclose()
    assert per_chunk < 80
