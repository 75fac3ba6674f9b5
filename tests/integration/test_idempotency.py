"""Idempotency-Key: sent again, a request gets the first one's answer, is billed once, and has a
record of its own; while the first still runs, the second follows it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from backends.settings import Script
from telemetry.record import Outcome
from tests import services
from tests.fakes.gateway import Harness, backend, error_of, route, running
from tests.services import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SLOW = Script(output_tokens=6, inter_token_s=0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway before the scripted upstream."""
    async with running(tmp_path_factory.mktemp("idem"), server="idempotency_mb = 1") as harness:
        harness.configure(backend("s", harness.scripted_url) + route("m", "s"))
        yield harness
        assert not await harness.broken_laws()


def body(stream: bool = False, text: str = "hi") -> dict[str, Any]:
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}


async def ask(
    gateway: Harness,
    key: str,
    asked: dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    **more: str,
) -> httpx.Response:
    headers = {**gateway.auth, **more, "idempotency-key": key}
    return await gateway.client.post(path, json=asked, headers=headers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_replay_is_the_same_answer_and_costs_nothing(
    gateway: Harness, stream: bool
) -> None:
    """The very bytes, another request id, and one record with attempts and cost: the first."""
    gateway.play(Script(output_tokens=3))
    first = await ask(gateway, f"same-{stream}", body(stream))
    again = await ask(gateway, f"same-{stream}", body(stream))
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-meterline-replay-of"] == first.headers["x-request-id"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert "x-meterline-cost-usd" not in again.headers
    billed = await gateway.rows(first.headers["x-request-id"])
    free = await gateway.rows(again.headers["x-request-id"])
    assert len(billed.requests) == len(free.requests) == 1
    assert len(billed.events) == 1
    assert billed.lines
    assert (free.events, free.lines) == ([], [])
    assert free.requests[0].outcome == Outcome.OK
    assert free.requests[0].tenant_id == billed.requests[0].tenant_id


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_who_comes_meanwhile_joins(gateway: Harness, stream: bool) -> None:
    """Three at once are one attempt upstream, and all three get its answer."""
    player = gateway.play(SLOW)
    answers = await asyncio.gather(
        *(ask(gateway, f"join-{stream}", body(stream)) for _ in range(3))
    )
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {200}
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 2
    assert len(player.books.entries) == 1


async def test_who_left_may_come_back(gateway: Harness) -> None:
    """A client that times out and asks again gets the answer of the request that it gave up."""
    player = gateway.play(SLOW)
    with pytest.raises(httpx.ReadTimeout):
        await gateway.client.post(
            "/v1/chat/completions",
            json=body(),
            headers={**gateway.auth, "idempotency-key": "left"},
            timeout=0.05,
        )
    again = await ask(gateway, "left", body())
    assert again.status_code == 200
    assert again.headers["idempotent-replayed"] == "true"
    assert len(player.books.entries) == 1


async def test_another_body_is_refused(gateway: Harness) -> None:
    """422 and not to be retried; 409 would be, by every client."""
    gateway.play(Script(output_tokens=1))
    assert (await ask(gateway, "k", body())).status_code == 200
    other = await ask(gateway, "k", body(text="something else"))
    assert other.status_code == 422
    assert error_of(other.text)["code"] == "idempotency_key_reused"
    assert other.headers["x-should-retry"] == "false"
    rows = await gateway.rows(other.headers["x-request-id"])
    assert (len(rows.requests), rows.events) == (1, [])


async def test_keys_are_a_tenants_and_a_surfaces(gateway: Harness) -> None:
    """The same key of another tenant, or on another route, is another key."""
    player = gateway.play(Script(output_tokens=1))
    first = await ask(gateway, "mine", body())
    tenants = gateway.service.tenants
    other = await tenants.create_tenant("rival", {}, actor="test")
    issued = await tenants.create_key(other.id, name="k", actor="test")
    theirs = await ask(gateway, "mine", body(), authorization=f"Bearer {issued.secret.reveal()}")
    text = await ask(gateway, "mine", {"model": "m", "prompt": "hi"}, path="/v1/completions")
    for answer in (first, theirs, text):
        assert answer.status_code == 200
        assert "idempotent-replayed" not in answer.headers
    assert len(player.books.entries) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_failures_are_tried_again(gateway: Harness, stream: bool) -> None:
    """An answer that failed on our side, before or after it began, is not kept."""
    for script in (Script(fail="500"), Script(fail="cut", fail_after=1)):
        gateway.forget_failures()
        gateway.play(script)
        failed = await ask(gateway, f"fail-{stream}", body(stream))
        assert "error" in failed.text
        gateway.forget_failures()
        gateway.play(Script(output_tokens=1))
    again = await ask(gateway, f"fail-{stream}", body(stream))
    assert again.status_code == 200
    assert '"error"' not in again.text
    assert "idempotent-replayed" not in again.headers


async def test_wrong_keys(gateway: Harness) -> None:
    """Too long, empty or not text: a 400 that names the header; and who has no key at all gets 401
    and nobody's answer."""
    for key in ("x" * 256, ""):
        answer = await ask(gateway, key, body())
        assert answer.status_code == 400
        assert error_of(answer.text)["param"] == "Idempotency-Key"
    gateway.play(Script(output_tokens=1))
    assert (await ask(gateway, "secret", body())).status_code == 200
    nobody = await ask(gateway, "secret", body(), authorization="Bearer sk-ml-nobody-nothing")
    assert nobody.status_code == 401


async def test_what_is_kept_is_bounded(gateway: Harness) -> None:
    """The oldest answers make room, and one that is too large is passed on but not kept."""
    gateway.play(Script(output_tokens=2, text="word" * 10_000))
    for number in range(30):
        assert (await ask(gateway, f"much-{number}", body())).status_code == 200
    again = await ask(gateway, "much-29", body())
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in (await ask(gateway, "much-0", body())).headers
    gateway.play(Script(output_tokens=20, text="word" * 10_000))
    for stream in (False, True):
        large = await ask(gateway, f"large-{stream}", body(stream))
        assert len(large.content) > 700_000
        if stream:
            assert large.text.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(large.text)["choices"]
        assert (
            "idempotent-replayed"
            not in (await ask(gateway, f"large-{stream}", body(stream))).headers
        )


async def test_replicas_share_answers(tmp_path: Path) -> None:
    """On one Redis a key that comes to a replica that does not know it waits for the answer and
    gets it, whole or streamed; with another body it is refused; and it is generated once."""
    with services.redis() as server:
        async with running(tmp_path, store=f'redis = "{server.url}"') as one:
            one.configure(backend("s", one.scripted_url) + route("m", "s"))
            known = one.service.app.state.idempotency._known
            for stream in (False, True):
                player = one.play(SLOW)
                first = asyncio.create_task(ask(one, f"shared-{stream}", body(stream)))
                async with asyncio.timeout(10):
                    while not player.books.entries:
                        await asyncio.sleep(0.005)
                known.clear()  # as another process, which knows nothing
                again = await ask(one, f"shared-{stream}", body(stream))
                assert (await first).content == again.content
                assert again.headers["idempotent-replayed"] == "true"
                assert (
                    again.headers["x-meterline-replay-of"] == (await first).headers["x-request-id"]
                )
                assert len(player.books.entries) == 1
                known.clear()
                other = await ask(one, f"shared-{stream}", body(stream, "something else"))
                assert other.status_code == 422
            known.clear()
            one.play(Script(fail="500"))
            assert (await ask(one, "fails", body())).status_code == 502
            one.forget_failures()
            one.play(Script(output_tokens=1))
            known.clear()
            assert (await ask(one, "fails", body())).status_code == 200


async def test_redis_away(tmp_path: Path) -> None:
    """Then each replica knows its own keys, and nobody waits long for that."""
    async with running(tmp_path, store=f'redis = "redis://127.0.0.1:{free_port()}"') as one:
        one.configure(backend("s", one.scripted_url) + route("m", "s"))
        one.play(Script(output_tokens=1))
        assert (await ask(one, "k", body())).status_code == 200
        again = await ask(one, "k", body())
        assert again.headers["idempotent-replayed"] == "true"
