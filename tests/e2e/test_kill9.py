"""Killed and told to stop: after `kill -9` under load every request is in the ledger once, with the
tokens that the upstream's own books say; after SIGTERM nothing is lost at all."""

import asyncio
import contextlib
import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from backends.settings import Script
from tests.e2e.served import Served, serve
from tests.fakes.upstream import ScriptedServer, scripted_server

STREAMS = 20
IN_FLIGHT_TOKENS = 64  # in sockets and buffers when the gateway died, for one stream

CONFIG = """
[server]
drain_s = {drain_s}
[[backends]]
name = "b"
kind = "openai"
provider = "scripted"
base_url = "{url}"
allow_private = true
price = {{ input = "1", output = "2" }}
[[backends]]
name = "steady"
kind = "openai"
provider = "scripted"
base_url = "{steady}"
allow_private = true
price = {{ input = "1", output = "2" }}
[[routes]]
model = "m"
targets = [{{ backend = "b" }}]
[[routes]]
model = "steady"
targets = [{{ backend = "steady" }}]
"""


class Stream(Struct):
    """One streamed request as its client saw it."""

    limit: int
    model: str = "m"
    request_id: str | None = None
    status: int = 0
    content: int = 0  # chunks with content
    last: str = ""  # data of the last event

    @property
    def is_done(self) -> bool:
        return self.last == "[DONE]"

    async def run(self, client: httpx.AsyncClient) -> None:
        """Read to the end, or to where the gateway dies."""
        body = {
            "model": self.model,
            "stream": True,
            "max_tokens": self.limit,
            "messages": [{"role": "user", "content": "say hello to me"}],
        }
        with contextlib.suppress(httpx.TransportError):
            async with client.stream("POST", "/chat/completions", json=body) as answer:
                self.request_id = answer.headers["x-request-id"]
                self.status = answer.status_code
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        self.last = line.removeprefix("data: ")
                        if '"content":"' in self.last and '"content":""' not in self.last:
                            self.content += 1


def client_of(served: Served, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=served.base_url,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
        limits=httpx.Limits(max_connections=100),
    )


class Entry(Struct, frozen=True):
    """One request in the ledger."""

    outcome: str
    status: int | None
    attempts: int
    output: int
    source: str | None
    record: dict[str, Any]


def ledger_of(folder: Path) -> dict[str, Entry]:
    """All requests, as rows say; fails if one is there twice."""
    with contextlib.closing(
        sqlite3.connect(f"file:{folder}/meterline-data/meterline.db?mode=ro", uri=True)
    ) as db:
        found: dict[str, Entry] = {}
        for request_id, outcome, status, record in db.execute(
            "SELECT request_id, outcome, status, record FROM gateway_request"
        ).fetchall():
            assert request_id not in found
            events = db.execute(
                "SELECT out_text, usage_source FROM usage_event WHERE request_id = ?",
                (request_id,),
            ).fetchall()
            found[request_id] = Entry(
                outcome,
                status,
                len(events),
                sum(event[0] for event in events),
                events[0][1] if events else None,
                json.loads(record),
            )
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def check_laws(served: Served) -> None:
    """`meterline reconcile` says yes."""
    done = served.run("reconcile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout


@contextlib.contextmanager
def upstreams(script: Script) -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    """One that plays `script`, and a steady one that answers with five tokens."""
    with scripted_server(script) as playing, scripted_server(Script(output_tokens=5)) as steady:
        yield playing, steady


def config_for(playing: ScriptedServer, steady: ScriptedServer, *, drain_s: float = 10) -> str:
    return CONFIG.format(url=playing.base_url, steady=steady.base_url, drain_s=drain_s)


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.timeout(120)
async def test_kill_when_all_was_read(tmp_path: Path) -> None:
    """Streams stand still after some tokens when the gateway is killed. After a restart each is in
    the ledger once, and its tokens are exactly the upstream's; served ones keep their exact count.
    """
    with upstreams(Script(output_tokens=50, fail="stall", fail_after=50)) as (playing, steady):
        config, key = config_for(playing, steady), ""
        standing: list[Stream] = []
        done: list[Stream] = []
        for _ in range(2):
            with serve(tmp_path, config=config) as served:
                key = key or served.key
                async with client_of(served, key) as client:
                    now = [Stream(limit=1 + number % 7) for number in range(STREAMS)]
                    running = [asyncio.create_task(stream.run(client)) for stream in now]
                    finished = [Stream(limit=5, model="steady") for _ in range(3)]
                    await asyncio.gather(*(stream.run(client) for stream in finished))
                    await until(lambda now=now: all(s.content == s.limit for s in now))
                    served.process.kill()
                    served.process.wait()
                    await asyncio.gather(*running)
                standing += now
                done += finished
        with serve(tmp_path, config=config) as served:
            wait_for(lambda: len(ledger_of(tmp_path)) == len(standing) + len(done))
            ledger = ledger_of(tmp_path)
            books = playing.books()
            check_laws(served)
    assert all(stream.is_done for stream in done)
    assert not any(stream.is_done for stream in standing)
    assert {stream.request_id for stream in (*standing, *done)} == set(ledger)
    assert {stream.request_id for stream in standing} == set(books)
    for stream in standing:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.status, entry.attempts) == ("abandoned", None, 1)
        assert entry.source == "estimated"
        assert entry.output == stream.limit == books[str(stream.request_id)]["generated"]
    for stream in done:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.output, entry.source) == ("ok", 5, "reported")


@pytest.mark.timeout(150)
async def test_kill_in_full_flow(tmp_path: Path) -> None:
    """The gateway is killed three times at random points while tokens flow. No request is missing,
    none is there twice, and a swept one differs from the upstream's books only by what was still
    in the sockets."""
    dice = random.Random(20260730)
    steady_done: list[Stream] = []
    seen: list[Stream] = []
    with upstreams(Script(output_tokens=100_000, inter_token_s=0.004)) as (playing, steady):
        config, key = config_for(playing, steady), ""
        for _ in range(3):
            with serve(tmp_path, config=config) as served:
                key = key or served.key
                async with client_of(served, key) as client:
                    streams = [Stream(limit=dice.choice((5, 20, 100_000))) for _ in range(STREAMS)]
                    running = [asyncio.create_task(stream.run(client)) for stream in streams]
                    finished = [Stream(limit=5, model="steady") for _ in range(2)]
                    await asyncio.gather(*(stream.run(client) for stream in finished))
                    at = dice.randrange(1, 40)
                    await until(
                        lambda streams=streams, at=at: max(s.content for s in streams) >= at
                    )
                    served.process.kill()
                    served.process.wait()
                    await asyncio.gather(*running)
                seen += streams
                steady_done += finished
        with serve(tmp_path, config=config) as served:
            books = playing.books()
            wait_for(lambda: set(books) <= set(ledger_of(tmp_path)))
            ledger = ledger_of(tmp_path)
            check_laws(served)
    assert sum(1 for stream in seen if stream.request_id) > STREAMS
    for stream in (*seen, *steady_done):
        if stream.request_id is not None:
            entry = ledger[stream.request_id]
            assert entry.output >= stream.content
            if stream.is_done:
                assert entry.outcome == "ok"
                assert (entry.output, entry.source) == (stream.limit, "reported")
    for request_id, entry in ledger.items():
        if request_id not in books:  # never reached this upstream
            assert entry.output in (0, 5)
        elif entry.outcome == "abandoned":
            generated = books[request_id]["generated"]
            assert 0 <= generated - entry.output <= IN_FLIGHT_TOKENS
        else:
            assert entry.output == books[request_id]["generated"]
    assert {entry.outcome for entry in ledger.values()} == {"ok", "abandoned"}


@pytest.mark.timeout(90)
async def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    """At SIGTERM readiness fails, new requests are told to go elsewhere, running streams finish,
    the process ends with 0, and all of it is in the database without another start."""
    script = Script(output_tokens=40, inter_token_s=0.04)
    with (
        upstreams(script) as (playing, steady),
        serve(tmp_path, config=config_for(playing, steady)) as served,
    ):
        async with client_of(served, served.key) as client:
            streams = [Stream(limit=40) for _ in range(STREAMS)]
            running = [asyncio.create_task(stream.run(client)) for stream in streams]
            await until(lambda: all(stream.content >= 2 for stream in streams))
            served.process.send_signal(signal.SIGTERM)
            root = served.base_url.removesuffix("/v1")
            while (ready := await client.get(f"{root}/readyz")).status_code == 200:
                await asyncio.sleep(0.005)
            assert ready.status_code == 503
            assert ready.json()["draining"] is True
            assert (await client.get(f"{root}/livez")).status_code == 200
            late = Stream(limit=5, model="steady")
            await late.run(client)
            assert late.status == 503
            await asyncio.gather(*running)
        assert served.process.wait(20) == 0
        assert "Traceback" not in served.output
    assert all(stream.is_done and stream.content == 40 for stream in streams)
    ledger = ledger_of(tmp_path)
    assert set(ledger) == {late.request_id, *(stream.request_id for stream in streams)}
    assert ledger[str(late.request_id)].record["error_code"] == "shutting_down"
    for stream in streams:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.output, entry.source) == ("ok", 40, "reported")


@pytest.mark.timeout(90)
async def test_sigterm_ends_what_does_not_finish(tmp_path: Path) -> None:
    """Streams that outlast the grace end with an error event and no [DONE], and are billed for
    what was read."""
    with upstreams(Script(output_tokens=50, fail="stall", fail_after=50)) as (playing, steady):
        with serve(tmp_path, config=config_for(playing, steady, drain_s=0.5)) as served:
            async with client_of(served, served.key) as client:
                streams = [Stream(limit=1 + number % 5) for number in range(STREAMS)]
                running = [asyncio.create_task(stream.run(client)) for stream in streams]
                await until(lambda: all(stream.content == stream.limit for stream in streams))
                began = time.monotonic()
                served.process.send_signal(signal.SIGTERM)
                await asyncio.gather(*running)
            assert served.process.wait(20) == 0
            assert time.monotonic() - began < 6
            assert "Traceback" not in served.output, served.output[-6000:]
            check_laws(served)
        books = playing.books()
    ledger = ledger_of(tmp_path)
    assert set(ledger) == {stream.request_id for stream in streams} == set(books)
    for stream in streams:
        assert json.loads(stream.last)["error"]["code"] == "shutting_down"
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.status) == ("truncated", 200)
        assert entry.output == stream.limit == books[str(stream.request_id)]["generated"]
