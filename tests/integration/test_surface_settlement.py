"""The settlement matrix of the other surfaces: embeddings, responses, messages and counts of tokens
over a backend that speaks chat. Every exit is one record in every book, as on chat."""

import json
from typing import Any

import httpx
import pytest

from backends.settings import Script
from telemetry.record import SURFACE_PATHS, Outcome, Surface
from telemetry.reports.query import explain_record
from telemetry.usage import UsageSource
from tests.fakes.gateway import Harness, backend, route, scripted
from tests.fakes.upstream import STALL, Upstream, whole
from tests.integration.test_settlement_matrix import (
    AFTER,
    ERROR,
    QUICK,
    TEXT,
    Books,
    Must,
    Tried,
    failing,
    gateway,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = ["gateway"]  # the neighbour's fixture

Cell = tuple[Surface, bool]
CELLS: list[Cell] = [
    ("embeddings", False),
    *(("responses", stream) for stream in (False, True)),
    *(("messages", stream) for stream in (False, True)),
]
everything = pytest.mark.parametrize(
    ("surface", "stream"), CELLS, ids=[f"{name}-{'stream' if s else 'whole'}" for name, s in CELLS]
)
streamed = pytest.mark.parametrize("surface", ["responses", "messages"])


def body_of(surface: Surface, *, stream: bool, **more: Any) -> bytes:
    """A small request, as compact JSON."""
    fields: dict[str, Any] = {"model": "m"}
    if surface in ("messages", "count_tokens"):
        fields["messages"] = [{"role": "user", "content": TEXT}]
        if surface == "messages":
            fields["max_tokens"] = 100
    else:
        fields["input"] = TEXT
    if stream:
        fields["stream"] = True
    return json.dumps(fields | more, separators=(",", ":")).encode()


async def ask(gateway: Harness, surface: Surface, body: bytes, **headers: str) -> httpx.Response:
    """One request, read to its end."""
    return await gateway.client.post(
        SURFACE_PATHS[surface],
        content=body,
        headers={"content-type": "application/json", **gateway.auth} | headers,
    )


def ok(surface: Surface, backend: str = "b", **more: Any) -> Tried:
    """The attempt that was served: three tokens, or a vector."""
    tokens = (4, 0 if surface == "embeddings" else 3)
    return Tried(backend, Outcome.OK, None, tokens, UsageSource.REPORTED, status=200, **more)


@everything
async def test_ok(gateway: Harness, surface: Surface, stream: bool) -> None:
    """A served request is billed with what the backend reports, and its story has the surface."""
    player = gateway.play(Script(output_tokens=3))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    answer = await ask(gateway, surface, body_of(surface, stream=stream))
    assert answer.status_code == 200
    must = Must(Outcome.OK, 200, None, (ok(surface),), stream=stream)
    record = await books.one(must, answer.headers["x-request-id"])
    assert record.surface == surface
    assert sum(player.books.served.values()) == (0 if surface == "embeddings" else 3)
    story = await explain_record(gateway.engine, record.request_id)
    assert story is not None
    assert story.surface == surface


@everything
async def test_ok_without_usage(gateway: Harness, surface: Surface, stream: bool) -> None:
    """A backend that reports no usage is billed by what passed, marked as estimated."""
    gateway.play(Script(output_tokens=3, report_usage=False))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    body = body_of(surface, stream=stream)
    assert (await ask(gateway, surface, body)).status_code == 200
    written = 0 if surface == "embeddings" else 3 if stream else 4
    tried = Tried(
        *("b", Outcome.OK, None, (len(body) // 4, written), UsageSource.ESTIMATED), status=200
    )
    await books.one(Must(Outcome.OK, 200, None, (tried,), stream=stream))


REFUSALS: dict[str, tuple[Must, bytes | None, dict[str, str]]] = {
    "key": (
        Must(Outcome.CLIENT_ERROR, 401, "invalid_api_key", tenant=False, model=None),
        None,
        {"authorization": "Bearer sk-ml-nothing-like-it"},
    ),
    "JSON": (Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None), b'{"model": "m", [', {}),
    "type": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_type", model=None),
        b'{"model":7,"input":"x","messages":[{"role":"user","content":"x"}],"max_tokens":1}',
        {},
    ),
    "missing": (
        Must(Outcome.CLIENT_ERROR, 400, "missing_required_parameter", model=None),
        b'{"model":"m"}',
        {},
    ),
    "model": (
        Must(Outcome.CLIENT_ERROR, 404, "model_not_found", model="nope"),
        b'{"model":"nope","input":"x","messages":[{"role":"user","content":"x"}],"max_tokens":1}',
        {},
    ),
    "NaN": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        b'{"model":"m","input":"x","x":NaN}',
        {},
    ),
    "surrogate": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        b'{"model":"\\ud800","input":"x"}',
        {},
    ),
    "deep": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        {},
    ),
    "large": (
        Must(Outcome.CLIENT_ERROR, 413, "request_too_large", model=None),
        b'{"model":"m","input":"%s"}' % (b"x" * 1_100_000),
        {},
    ),
    "media": (
        Must(Outcome.CLIENT_ERROR, 415, "unsupported_media_type", model=None),
        None,
        {"content-type": "text/plain"},
    ),
}


@pytest.mark.parametrize("surface", ["embeddings", "responses", "messages", "count_tokens"])
@pytest.mark.parametrize("name", list(REFUSALS))
async def test_refused(gateway: Harness, name: str, surface: Surface) -> None:
    """A refused request is one record without attempts or cost, and an error in the surface's
    shape."""
    must, body, headers = REFUSALS[name]
    async with Upstream(whole({})) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        body = body_of(surface, stream=False) if body is None else body
        answer = await ask(gateway, surface, body, **headers)
        assert answer.status_code == must.status
        found = answer.json()
        if surface in ("messages", "count_tokens"):
            assert found["type"] == "error"
            assert found["request_id"] == answer.headers["request-id"]
            assert set(found["error"]) == {"type", "message"}
        else:
            assert found["error"]["code"] == must.code
        await books.one(must, answer.headers["x-request-id"])
        assert not upstream.received


@everything
@pytest.mark.parametrize(
    ("fail", "status", "code", "there"),
    [
        ("500", 502, "upstream_failed", 500),
        ("401", 502, "upstream_auth", 401),
        ("429", 429, "upstream_rate_limited", 429),
        ("error_200", 502, "upstream_failed", None),
    ],
)
async def test_fails_before_content(
    gateway: Harness, surface: Surface, stream: bool, fail: Any, status: int, code: str, there: Any
) -> None:
    """An upstream that fails before any content is an error status and costs nothing."""
    gateway.play(Script(fail=fail))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    answer = await ask(gateway, surface, body_of(surface, stream=stream))
    assert answer.status_code == status
    assert "scripted" not in answer.text
    tried = Tried("b", Outcome.UPSTREAM_ERROR, code, status=there)
    await books.one(Must(Outcome.UPSTREAM_ERROR, status, code, (tried,), stream=stream))


@streamed
@pytest.mark.parametrize("fail", list(AFTER))
async def test_stream_breaks(gateway: Harness, fail: Any, surface: Surface) -> None:
    """A stream that breaks ends with an error event and not with the event of a complete one."""
    outcome, code = AFTER[fail]
    player = gateway.play(Script(output_tokens=9, fail=fail, fail_after=2))
    gateway.configure(backend("b", gateway.scripted_url, more=QUICK) + route("m", "b"))
    books = Books(gateway)
    body = body_of(surface, stream=True)
    answer = await ask(gateway, surface, body)
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert events[-1].startswith("event: error\n")
    assert "message_stop" not in answer.text
    assert "response.completed" not in answer.text
    tried = Tried("b", outcome, code, (len(body) // 4, 2), UsageSource.ESTIMATED)
    record = await books.one(Must(outcome, 200, code, (tried,), stream=True))
    assert player.books.served == {record.request_id: 2}


@everything
async def test_falls_back(gateway: Harness, surface: Surface, stream: bool) -> None:
    """When the first target fails before content the next one answers: two attempts, each priced
    as what it was; also from a backend of another API to one of this."""
    gateway.play(Script(output_tokens=3))
    async with Upstream(failing(500, ERROR)) as broken:
        first = backend("b", broken.base_url)
        if surface != "embeddings":
            first = first.replace('kind = "openai"', 'kind = "anthropic"')
        gateway.configure(
            first
            + backend("c", gateway.scripted_url, price='"3", output = "5"')
            + route("m", "b", "c")
        )
        books = Books(gateway)
        answer = await ask(gateway, surface, body_of(surface, stream=stream))
        assert answer.status_code == 200
        assert answer.headers["x-meterline-backend"] == "c"
        failed = Tried("b", Outcome.UPSTREAM_ERROR, "upstream_failed", status=500)
        served = ok(surface, "c", price=(3, 5))
        await books.one(Must(Outcome.OK, 200, None, (failed, served), stream=stream))


@streamed
async def test_client_leaves_mid_stream(gateway: Harness, surface: Surface) -> None:
    """A client that leaves after two tokens pays for two tokens, and the upstream is cut off."""
    async with scripted(Script(output_tokens=9, fail="stall", fail_after=2)) as (upstream, app):
        gateway.configure(backend("b", f"{upstream.base_url}/v1") + route("m", "b"))
        books = Books(gateway)
        body = body_of(surface, stream=True)
        async with (
            httpx.AsyncClient(base_url=gateway.server.base_url, timeout=20) as client,
            client.stream(
                "POST", SURFACE_PATHS[surface], content=body, headers=gateway.auth
            ) as answer,
        ):
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count("delta\n") == 2:  # the names of two events with content
                    break
        gone = (Outcome.CLIENT_DISCONNECT, "client_disconnect")
        tried = Tried("b", *gone, (len(body) // 4, 2), UsageSource.ESTIMATED)
        record = await books.one(Must(gone[0], 499, gone[1], (tried,), stream=True))
        assert app.player.books.served == {record.request_id: 2}
        await until(lambda: upstream.connections == 0)


@everything
async def test_client_leaves_before_the_first_token(
    gateway: Harness, surface: Surface, stream: bool
) -> None:
    """A client that leaves while the upstream thinks is billed nothing."""
    async with Upstream((STALL,)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(base_url=gateway.server.base_url) as client:
                await client.post(
                    SURFACE_PATHS[surface],
                    content=body_of(surface, stream=stream),
                    headers=gateway.auth,
                    timeout=httpx.Timeout(5, read=0.3),
                )
        gone = (Outcome.CLIENT_DISCONNECT, "client_disconnect")
        await books.one(Must(gone[0], 499, gone[1], (Tried("b", *gone),), stream=stream))


async def test_counts_are_requests_too(gateway: Harness) -> None:
    """A count of tokens is one record with one attempt, which costs nothing; its limits hold."""
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    answer = await ask(gateway, "count_tokens", body_of("count_tokens", stream=False))
    assert answer.json()["input_tokens"] > 0
    tried = Tried("b", Outcome.OK, None, (0, 0), UsageSource.ESTIMATED, status=200)
    await books.one(Must(Outcome.OK, 200, None, (tried,)))


@everything
async def test_refused_while_draining(gateway: Harness, surface: Surface, stream: bool) -> None:
    """A request that comes while the gateway drains is told to go elsewhere."""
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    gateway.service.gateway.draining = True
    try:
        answer = await ask(gateway, surface, body_of(surface, stream=stream))
    finally:
        gateway.service.gateway.draining = False
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"
    if surface == "messages":
        assert answer.json()["error"]["type"] == "overloaded_error"
    await books.one(Must(Outcome.SHED, 503, "shutting_down", model=None))


async def test_limits_hold_everywhere(gateway: Harness) -> None:
    """Each surface passes the same limit: what one took another does not get."""
    gateway.play(Script(output_tokens=1))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    tenants = gateway.service.tenants
    other = await tenants.create_tenant("limited", {}, actor="test")
    key = (await tenants.create_key(other.id, name="k", actor="test")).secret.reveal()
    created = await gateway.client.put(
        "/admin/v1/limits",
        json={"tenant": "limited", "counts": "requests", "amount": "4", "per_s": 3600},
        headers={"authorization": "Bearer admin-canary-0123456789abcdef"},
    )
    assert created.status_code in (200, 201), created.text
    statuses = []
    for surface in ("embeddings", "responses", "messages", "count_tokens", "embeddings"):
        body = body_of(surface, stream=False)
        answer = await ask(gateway, surface, body, authorization=f"Bearer {key}")
        statuses.append(answer.status_code)
    assert statuses == [200, 200, 200, 200, 429]
