"""Several models in one server: routed, swapped under load, put to sleep and woken."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.engine.fleet import Fleet
from backends.engine.serve import build_fleet
from backends.engine.turns import Turns
from backends.openai_compat import step_times
from backends.settings import EngineModel, EngineSettings
from telemetry.capacity.heartbeat import StepTimes
from tests.fakes.gguf import tiny_llama

pytestmark = [pytest.mark.model]


def settings_of(folder: Path, **changes: Any) -> EngineSettings:
    given: dict[str, Any] = {
        "name": "e", "model": str(tiny_llama(folder / "one.gguf", seed=1)), "kernels": "torch",
        "kv_memory_gb": 0.002, "threads": 1, "speculative": {"method": "off"},
    }  # fmt: skip
    import msgspec

    return msgspec.convert(given | changes, EngineSettings)


def two_models(folder: Path) -> EngineSettings:
    second = EngineModel(name="two", model=str(tiny_llama(folder / "second.gguf", seed=2)))
    return settings_of(folder, models=[second])


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    fleet.start()
    await fleet.loaded()
    transport = httpx.ASGITransport(app=fleet)  # type: ignore[arg-type]  # a plain ASGI app
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client
    finally:
        await fleet.drain(0.0)
        await fleet.close()


async def ask(client: httpx.AsyncClient, model: str, *, count: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": "the", "max_tokens": count, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    return await client.post("/v1/completions", json=body, timeout=60)


async def test_requests_go_to_their_model(tmp_path: Path) -> None:
    """Each name is answered by its own weights; a name that nobody has is a 404; models, health
    and metrics show both, each metric declared once."""
    async with running(build_fleet(two_models(tmp_path), is_private=True)) as client:
        both = [ask(client, name, count=24) for name in ("one", "two")]
        one, two = await asyncio.gather(*both)
        assert one.json()["model"] == "one"
        assert two.json()["model"] == "two"
        assert one.json()["choices"][0]["text"] != two.json()["choices"][0]["text"]
        assert (await ask(client, "three")).status_code == 404
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["one", "two"]
        assert (await client.get("/v1/models/two")).json()["id"] == "two"
        health = (await client.get("/health")).json()
        assert health["models"] == {"one": "ready", "two": "ready"}
        text = (await client.get("/metrics")).text
        for name in ("one", "two"):
            done = f'meterline_engine_requests_total{{ending="done",model="{name}"}}'
            assert done in text
        helps = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(helps) == len(set(helps))
        vectors = await client.post("/v1/embeddings", json={"model": "two", "input": "a"})
        assert vectors.json()["model"] == "two"


async def times(client: httpx.AsyncClient) -> StepTimes:
    """The process's clock, as the gateway reads it."""
    found = step_times((await client.get("/metrics")).text)
    assert found is not None
    return found


async def test_a_swap_under_load_fails_no_request(tmp_path: Path) -> None:
    """While requests come without a pause, a model is replaced twice: every answer is whole, the
    new weights answer in the end, and the process's clock goes on without a step back."""
    other = tiny_llama(tmp_path / "other.gguf", seed=7)
    fleet = build_fleet(settings_of(tmp_path), is_private=True)
    async with running(fleet) as client:
        before = (await ask(client, "one")).json()
        began_s = time.perf_counter()
        first_clock = await times(client)
        is_over = asyncio.Event()
        statuses: list[int] = []

        async def keep_asking() -> None:
            while not is_over.is_set():
                statuses.append((await ask(client, "one", count=12)).status_code)

        clients = [asyncio.create_task(keep_asking()) for _ in range(4)]
        for model in (str(other), str(tmp_path / "one.gguf"), str(other)):
            swapped = await client.post("/admin/models/one/swap", json={"model": model})
            assert swapped.status_code == 200, swapped.text
        assert swapped.json() == {
            "name": "one", "model": str(other), "version": 4, "state": "ready"
        }  # fmt: skip
        is_over.set()
        await asyncio.gather(*clients)
        assert len(statuses) > 4
        assert set(statuses) == {200}
        after = (await ask(client, "one")).json()
        assert after["system_fingerprint"] != before["system_fingerprint"]
        async with asyncio.timeout(60):
            while sum(t.name == "engine" for t in threading.enumerate()) > 1:
                await asyncio.sleep(0.02)  # the old versions are ending
        last_clock = await times(client)
        assert last_clock.continues(first_clock)
        assert last_clock.step_us > first_clock.step_us
        passed_us = last_clock.wall_us - first_clock.wall_us
        assert passed_us <= (time.perf_counter() - began_s + 2.0) * 1e6  # each second once
        assert (await times(client)).continues(last_clock)


@pytest.mark.parametrize("when_asleep", ["refuse", "wake"])
async def test_a_model_sleeps_and_wakes(tmp_path: Path, when_asleep: str) -> None:
    """Asleep it has no engine; a request gets a 503 that says when to come back, or wakes it."""
    fleet = build_fleet(settings_of(tmp_path, when_asleep=when_asleep), is_private=True)
    async with running(fleet) as client:
        said = (await ask(client, "one")).json()["choices"]
        slept = await client.post("/admin/models/one/sleep")
        assert slept.json()["state"] == "asleep"
        assert not any(t.name == "engine" for t in threading.enumerate())
        assert (await client.get("/health")).json()["models"] == {"one": "asleep"}
        assert (await client.get("/health")).status_code == 200
        answer = await ask(client, "one")
        if when_asleep == "refuse":
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            woken = await client.post("/admin/models/one/wake")
            assert woken.json()["state"] == "ready"
            answer = await ask(client, "one")
        assert answer.json()["choices"] == said
        assert (await client.get("/admin/models")).json()["data"][0]["state"] == "ready"


async def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    """A swap to a missing or damaged model is refused with the reason, and the old one serves."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((tiny_llama(tmp_path / "x.gguf")).read_bytes()[:-64])
    async with running(build_fleet(settings_of(tmp_path), is_private=True)) as client:
        for model, reason in ((tmp_path / "none.gguf", "no such model"), (damaged, "truncated")):
            answer = await client.post("/admin/models/one/swap", json={"model": str(model)})
            assert answer.status_code == 409
            assert reason in answer.json()["error"]["message"]
        assert (await client.post("/admin/models/one/swap", json={"modle": "x"})).status_code == 400
        assert (await client.post("/admin/models/two/sleep")).status_code == 404
        assert (await ask(client, "one")).status_code == 200


async def test_admin_routes_are_on_the_private_socket_only(tmp_path: Path) -> None:
    """Where others can connect, they do not exist."""
    async with running(build_fleet(settings_of(tmp_path), is_private=False)) as client:
        assert (await client.post("/admin/models/one/sleep")).status_code == 404
        assert (await client.get("/admin/models")).status_code == 404
        assert (await ask(client, "one")).status_code == 200


def test_turns_share_time_and_not_steps() -> None:
    """The next turn is for whoever computed least, even if another has waited for longer: one with
    short steps gets several for one long step."""
    turns = Turns()
    order: list[str] = []
    go_on = threading.Event()

    def compute(who: str, took_ns: int) -> None:
        assert turns.take(who)
        order.append(who)
        assert go_on.wait(60)
        turns.give(who, took_ns)

    def begin(who: str, took_ns: int, waiting: int) -> threading.Thread:
        thread = threading.Thread(target=compute, args=(who, took_ns))
        thread.start()
        while turns.waiting < waiting:
            threading.Event().wait(0.001)
        return thread

    assert not turns.take("long")
    threads = [begin("short", 10, waiting=1)]
    turns.give("long", 30)
    while not order:
        threading.Event().wait(0.001)
    threads.append(begin("long", 30, waiting=1))
    threads.append(begin("short", 10, waiting=2))
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["short", "short", "long"]
    assert turns.is_free


def test_who_was_idle_begins_level_with_the_others() -> None:
    """Nothing is saved up while others work: who comes back waits its turn."""
    turns = Turns()
    for _ in range(5):
        assert not turns.take("busy")
        turns.give("busy", 10)
    assert not turns.take("holder")
    order: list[str] = []

    def compute(who: str) -> None:
        assert turns.take(who)
        order.append(who)
        turns.give(who, 10)

    threads = []
    for who in ("busy", "idle"):  # in this order they begin to wait
        threads.append(threading.Thread(target=compute, args=(who,)))
        threads[-1].start()
        while turns.waiting < len(threads):
            threading.Event().wait(0.001)
    turns.give("holder", 10)
    for thread in threads:
        thread.join(60)
    assert order == ["busy", "idle"]
