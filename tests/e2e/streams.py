"""Streams through a served gateway as their clients see them, and what its ledger says of them."""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from backends.settings import Script
from tests.e2e.served import Served
from tests.fakes.upstream import ScriptedServer, scripted_server

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
