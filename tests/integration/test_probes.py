"""Servers that are asked, drained, resumed and warmed up, through a whole gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from backends.settings import Probe, Script
from gateway.drains import Drains
from gateway.probes import Standing, after_probe
from tests.fakes.gateway import ADMIN_KEY, Harness, Server, backend, route, running, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = "probe = { every_s = 0.05, failures = 2, successes = 2, path = '/health' }\n"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module."""
    prices = backend("b", "http://127.0.0.1:1/v1")
    async with running(tmp_path_factory.mktemp("gateway"), tables=prices) as harness:
        yield harness


WHOLE = (
    b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)


class Asked:
    """A server that says what it is told to, and counts."""

    def __init__(self) -> None:
        self.status = 200
        self.metrics = b""
        self.paths: list[str] = []
        self.hangs = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if self.hangs:
            await asyncio.sleep(60)
        body = self.metrics if scope["path"] == "/metrics" else WHOLE
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def servers(*urls: str, more: str = "") -> str:
    """One backend with these servers, and a route to it."""
    text = backend("b", "x", more=f"urls = {list(urls)}\n{more}").replace('base_url = "x"\n', "")
    return text + route("m", "b")


async def ask(gateway: Harness, *, stream: bool = False) -> httpx.Response:
    """One request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=gateway.auth)


async def listed(gateway: Harness) -> dict[str, dict[str, Any]]:
    """The servers of the backend, as the admin sees them."""
    answer = await gateway.client.get("/admin/v1/backends", headers=ADMIN)
    (found,) = [one for one in answer.json()["data"] if one["name"] == "b"]
    return {server["name"]: server for server in found["servers"]}


async def test_a_server_that_says_it_is_not_ready_gets_nothing(gateway: Harness) -> None:
    """After so many bad answers it is out, before any request failed; after so many good ones it is
    back. With none left, `/readyz` and the client's error say so."""
    app = Asked()
    async with Server(app, grace_s=1) as server:
        gateway.configure(servers(f"{server.base_url}/v1", more=QUICK))
        health = gateway.service.gateway.runtimes.health
        name = server.base_url.removeprefix("http://")
        await until(lambda: len(app.paths) >= 3)
        assert set(app.paths) == {"/health"}
        assert not health.held("b", name)
        app.status = 503
        await until(lambda: "down" in health.held("b", name))
        answer = await ask(gateway)
        assert answer.status_code == 503
        assert "not ready" in answer.json()["error"]["message"]
        ready = await gateway.client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["backends"]["b"] == "down"
        assert (await listed(gateway))[name]["state"] == "down"
        app.status = 200
        await until(lambda: not health.held("b", name))
        assert (await gateway.client.get("/readyz")).status_code == 200


async def test_a_server_that_hangs_holds_up_no_other(gateway: Harness) -> None:
    """Its probe runs out of time by itself; the others are asked at their own pace."""
    stuck, well = Asked(), Asked()
    stuck.hangs = True
    short = QUICK.replace("failures", "timeout_s = 1.0, failures")
    async with Server(stuck, grace_s=1) as one, Server(well, grace_s=1) as two:
        gateway.configure(servers(f"{one.base_url}/v1", f"{two.base_url}/v1", more=short))
        health = gateway.service.gateway.runtimes.health
        await until(lambda: "down" in health.held("b", one.base_url.removeprefix("http://")))
        assert not health.held("b", two.base_url.removeprefix("http://"))
        assert len(well.paths) > len(stuck.paths)
        gateway.configure(backend("b", "http://127.0.0.1:1/v1") + route("m", "b"))
        await asyncio.sleep(0.3)


async def test_what_a_server_says_of_its_load_counts(gateway: Harness) -> None:
    """The one with the shorter queue gets the request, whoever filled the other."""
    busy, idle = Asked(), Asked()
    busy.metrics = b'vllm:num_requests_running{m="x"} 8.0\nvllm:num_requests_waiting{m="x"} 5.0\n'
    idle.metrics = b'vllm:num_requests_running{m="x"} 1.0\nvllm:num_requests_waiting{m="x"} 0.0\n'
    loaded = QUICK.replace("path =", 'load_path = "/metrics", path =')
    async with Server(busy, grace_s=1) as one, Server(idle, grace_s=1) as two:
        gateway.configure(servers(f"{one.base_url}/v1", f"{two.base_url}/v1", more=loaded))
        upstream = gateway.service.gateway.runtimes.current.upstreams["b"]
        await until(lambda: all(member.server.load for member in upstream.members))
        for _ in range(6):
            await ask(gateway)
        assert "/v1/chat/completions" not in busy.paths
        assert idle.paths.count("/v1/chat/completions") == 6
        found = await listed(gateway)
        assert found[one.base_url.removeprefix("http://")]["waiting"] == 5


async def test_a_drained_server_gets_nothing_new_and_keeps_what_runs(gateway: Harness) -> None:
    """By the admin's call, in the database, so that all replicas obey; and back with a warm-up."""
    slow = Script(output_tokens=20, inter_token_s=0.1)
    async with scripted(slow) as (one, first), scripted(slow) as (two, second):
        gateway.configure(
            servers(f"{one.base_url}/v1", f"{two.base_url}/v1", more="warm_up_s = 30")
        )
        running = [asyncio.create_task(ask(gateway, stream=True)) for _ in range(2)]
        await until(lambda: first.player.books.entries != {} and second.player.books.entries != {})
        name = one.base_url.removeprefix("http://")
        path = "/admin/v1/backends/b"
        answer = await gateway.client.post(f"{path}/drain", json={"endpoint": name}, headers=ADMIN)
        assert answer.status_code == 200
        health = gateway.service.gateway.runtimes.health
        await until(lambda: "drained" in health.held("b", name))
        before = len(first.player.books.entries)
        more = [asyncio.create_task(ask(gateway, stream=True)) for _ in range(4)]
        answers = await asyncio.gather(*running, *more)
        assert all(one.text.endswith("data: [DONE]\n\n") for one in answers)
        assert len(first.player.books.entries) == before == 1
        assert (await listed(gateway))[name]["state"] == "drained"
        assert [one.endpoint for one in await Drains(gateway.service.tenants).all()] == [name]
        answer = await gateway.client.post(f"{path}/resume", json={"endpoint": name}, headers=ADMIN)
        assert answer.json() == {"resumed": True}
        await until(lambda: not health.held("b", name))
        members = gateway.service.gateway.runtimes.current.upstreams["b"].members
        now = asyncio.get_running_loop().time()
        (resumed,) = [member.server for member in members if member.server.name == name]
        assert 0.1 <= resumed.warmth(now) < 0.5
        again = await gateway.client.post(f"{path}/resume", json={"endpoint": name}, headers=ADMIN)
        assert again.json() == {"resumed": False}


async def test_a_whole_backend_is_drained(gateway: Harness) -> None:
    """Requests get 503 with Retry-After; a name that is none is 404; tenants may not drain."""
    async with scripted(Script(output_tokens=1)) as (one, _):
        gateway.configure(backend("b", f"{one.base_url}/v1") + route("m", "b"))
        drains, health = Drains(gateway.service.tenants), gateway.service.gateway.runtimes.health
        await drains.drain("b", actor="test")
        await until(lambda: "drained" in health.held("b"))
        answer = await ask(gateway)
        assert answer.status_code == 503
        assert "drained" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        await drains.resume("b", actor="test")
        await until(lambda: not health.held("b"))
        assert (await ask(gateway)).status_code == 200
        path = "/admin/v1/backends/{}/drain"
        nobody = await gateway.client.post(path.format("nope"), json={}, headers=ADMIN)
        assert nobody.status_code == 404
        theirs = await gateway.client.post(path.format("b"), json={}, headers=gateway.auth)
        assert theirs.status_code in (401, 403)


async def test_thresholds() -> None:
    """So many in a row either way; one good answer between bad ones starts the count again."""
    settings = Probe(failures=3, successes=2)
    standing = Standing()
    seen = []
    for is_ready in (False, False, True, False, False, False, True, False, True, True):
        standing = after_probe(standing, is_ready, settings)
        seen.append(standing.is_down)
    assert seen == [False] * 5 + [True] * 4 + [False]
