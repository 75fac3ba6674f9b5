"""No request reaches a backend without passing authentication, scopes and admission: every billable
route of the running gateway × every way to say who asks × every scope of a limit.

The routes are the app's own. A new one fails here until it says who may call it, and, if tenants
may, until it stands in `BILLABLE` with a body or in `FREE`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from litestar.routes import ASGIRoute, HTTPRoute

from backends.settings import Script
from gateway.allowances import Scope
from gateway.app import Service
from gateway.budgets import Allowances
from gateway.keys import SCOPES
from gateway.tenants import KeyChange, TenantChange
from tests.fakes.gateway import Harness, Server, backend, error_of, route, running
from tests.fakes.issuer import Issuer

MODEL: Final = "assistant"
CHAT: Final = {"model": MODEL, "user": "eve", "messages": [{"role": "user", "content": "hi"}]}
TEXT: Final = {"model": MODEL, "user": "eve", "prompt": "hi"}
INPUT: Final = {"model": MODEL, "user": "eve", "input": "hi"}
MESSAGES: Final = {
    "model": MODEL,
    "max_tokens": 8,
    "metadata": {"user_id": "eve"},
    "messages": [{"role": "user", "content": "hi"}],
}
COUNTED: Final = {name: MESSAGES[name] for name in ("model", "messages")}
BILLABLE: Final[dict[str, tuple[str, dict[str, Any]]]] = {  # path → scope of the key, body
    "/v1/chat/completions": ("chat", CHAT),
    "/chat/completions": ("chat", CHAT),
    "/v1/completions": ("completions", TEXT),
    "/completions": ("completions", TEXT),
    "/v1/embeddings": ("embeddings", INPUT),
    "/embeddings": ("embeddings", INPUT),
    "/v1/responses": ("responses", INPUT),
    "/responses": ("responses", INPUT),
    "/v1/messages": ("messages", MESSAGES),
    "/v1/messages/count_tokens": ("count_tokens", COUNTED),
}
FREE: Final = {"/v1/models": "models", "/v1/models/{model:path}": "models"}
STORED: Final = {"/v1/responses/{response_id:str}": "responses"}  # what a billable one left
NAMES_NO_USER: Final = {"/v1/messages/count_tokens"}  # that API has no field for one
CALLERS: Final = ("public", "tenant", "admin", "loopback or admin")
LIMITS: Final[tuple[tuple[str, Scope, str | None], ...]] = (  # whose, scope, subject
    ("org", "tenant", None),
    ("org/acme", "tenant", None),
    ("org/acme", "key", None),
    ("org/acme", "user", None),
    ("org/acme", "user", "eve"),
    ("org/acme", "route", MODEL),
    ("org/acme", "model", MODEL),
)
SOURCES: Final = ("authorization", "x-api-key", "api-key", "jwt")


def handlers(service: Service) -> Iterator[tuple[str, Any]]:
    """Path and handler of every route that somebody wrote."""
    for found in service.app.routes:
        if isinstance(found, ASGIRoute):
            yield found.path, found.route_handler
        elif isinstance(found, HTTPRoute):
            for handler, _ in found.route_handler_map.values():
                if handler.handler_name != "options_handler":
                    yield found.path, handler


def error_type(path: str, text: str) -> str:
    """Of an error in the shape of the path's API; asserts that shape."""
    if path.startswith("/v1/messages"):
        found = json.loads(text)
        assert list(found) == ["type", "error", "request_id"]
        return str(found["error"]["type"])
    return str(error_of(text)["type"])


class Scene:
    """A gateway with one tenant, its key, and tokens for it."""

    def __init__(self, harness: Harness, issuer: Issuer) -> None:
        self.harness = harness
        self.issuer = issuer
        self.allowances = Allowances(harness.service.tenants)

    def headers(self, source: str) -> dict[str, str]:
        if source == "jwt":
            now_s = self.harness.service.gateway.ledger._clock.now_ns() / 1e9
            return {"authorization": f"Bearer {self.issuer.signed(now_s)}"}
        prefix = "Bearer " if source == "authorization" else ""
        return {source: f"{prefix}{self.harness.key}"}

    async def ask(self, path: str, source: str) -> httpx.Response:
        _, body = BILLABLE[path]
        return await self.harness.client.post(path, headers=self.headers(source), json=body)

    async def heard(self) -> None:
        await self.harness.service.gateway.auth.refresh()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    issuer = Issuer()

    async def keys(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": issuer.jwks()})

    async with Server(keys, grace_s=1) as provider:
        trust = (
            f'[[auth.issuers]]\nissuer = "{issuer.name}"\naudience = ["meterline"]\n'
            f'jwks_url = "{provider.base_url}/keys"\nallow_private = true\n'
            'scope_claim = "scope"\n'
        )
        async with running(tmp_path, telemetry=trust) as harness:
            harness.configure(backend("up", harness.scripted_url) + route(MODEL, "up"))
            tenants = harness.service.tenants
            await tenants.create_tenant("org", actor="t")
            await tenants.change_tenant(harness.tenant_id, TenantChange(parent="org"), actor="t")
            issuer.defaults = {"tenant": "org/acme", "scope": " ".join(SCOPES)}
            made = Scene(harness, issuer)
            await made.heard()
            yield made


def test_the_table_names_every_way_to_say_who_asks() -> None:
    """Scopes of keys are the surfaces and the list of models."""
    assert {scope for scope, _ in BILLABLE.values()} | set(FREE.values()) == set(SCOPES)


async def test_every_route_is_classified(scene: Scene) -> None:
    """A new route fails here until somebody has decided what it is."""
    unknown = []
    by_path = dict(handlers(scene.harness.service))
    for path in BILLABLE:
        assert by_path[path] is by_path["/v1" + path.removeprefix("/v1")]
    for path, handler in handlers(scene.harness.service):
        caller = handler.opt.get("caller")
        is_known = path in BILLABLE or path in FREE or path in STORED
        if caller not in CALLERS or (caller == "tenant") != is_known:
            unknown.append((path, caller))
    assert [one for one in unknown if not one[0].startswith("/schema")] == []


async def test_no_path_skips_admission(scene: Scene) -> None:
    """With none allowed in one scope, every route refuses every source; nothing goes upstream."""
    for whose, scope, subject in LIMITS:
        limit = await scene.allowances.set_limit(
            whose, "requests", Decimal(0), per_s=60, scope=scope, subject=subject, actor="t"
        )
        await scene.heard()
        player = scene.harness.play(Script())
        for path in BILLABLE:
            if subject == "eve" and path in NAMES_NO_USER:
                continue
            for source in SOURCES:
                answer = await scene.ask(path, source)
                assert answer.status_code == 429, (whose, scope, path, source, answer.text)
                assert error_type(path, answer.text) == "rate_limit_error"
        assert player._requests == 0, scope
        await scene.allowances.remove_limit(limit.id, actor="t")


async def test_every_path_counts_once(scene: Scene) -> None:
    """Where something is left, each request of each source takes one and is recorded once."""
    await scene.allowances.set_limit("org/acme", "requests", Decimal(500), per_s=60, actor="t")
    await scene.heard()
    left = 500
    for path in BILLABLE:
        for source in SOURCES:
            answer = await scene.ask(path, source)
            assert answer.status_code == 200, (path, source, answer.text)
            left -= 1
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left), (path, source)
    records = await scene.harness.next_settled(500 - left)
    assert len(records) == 500 - left
    assert {record.tenant_id for record in records} == {scene.harness.tenant_id}


async def test_no_path_skips_a_scope(scene: Scene) -> None:
    """A key or token without a route's scope is refused there, and taken where it has it."""
    tenants = scene.harness.service.tenants
    for scope in SCOPES:
        await tenants.change_key(scene.harness.key_id, KeyChange(scopes=[scope]), actor="t")
        scene.issuer.defaults["scope"] = scope
        await scene.heard()
        for source in SOURCES:
            for path, (needed, _) in BILLABLE.items():
                if not path.startswith("/v1"):
                    continue  # the same handler as with it: `test_every_route_is_classified`
                answer = await scene.ask(path, source)
                assert answer.status_code == (200 if needed == scope else 403), (path, source)
                if needed != scope:
                    assert error_type(path, answer.text) == "permission_error"
            for path, needed in FREE.items():
                url = path.replace("{model:path}", MODEL)
                got = await scene.harness.client.get(url, headers=scene.headers(source))
                assert got.status_code == (200 if needed == scope else 403), (path, source)


async def test_no_path_takes_nobody(scene: Scene) -> None:
    """Without a credential, with a wrong one, from a wrong address or under a suspended parent."""
    tenants = scene.harness.service.tenants
    paths = [*BILLABLE, *(path.replace("{model:path}", MODEL) for path in FREE)]

    async def refused(headers: dict[str, str]) -> None:
        for path in paths:
            method = "POST" if path in BILLABLE else "GET"
            content = json.dumps(BILLABLE[path][1]) if path in BILLABLE else None
            answer = await scene.harness.client.request(
                method, path, content=content, headers=headers
            )
            assert answer.status_code == 401, (path, headers, answer.text)
            assert error_type(path, answer.text) in (
                "invalid_request_error",
                "authentication_error",
            )

    player = scene.harness.play(Script())
    now_s = scene.harness.service.gateway.ledger._clock.now_ns() / 1e9
    await refused({})
    await refused({"authorization": "Bearer sk-ml-nobody"})
    for wrong in (
        {"iss": "https://evil.example"},
        {"aud": "other"},
        {"exp": int(now_s) - 60},
        {"nbf": int(now_s) + 600},
        {"header": {"kid": "nobody"}},
        {"tenant": "org/nobody"},
    ):
        await refused({"authorization": f"Bearer {scene.issuer.signed(now_s, **wrong)}"})
    change = KeyChange(ip_allow=["203.0.113.0/24"])
    await tenants.change_key(scene.harness.key_id, change, actor="t")
    await scene.heard()
    await refused(scene.harness.auth | {"x-forwarded-for": "203.0.113.9"})
    await tenants.change_key(scene.harness.key_id, KeyChange(ip_allow=None), actor="t")
    await tenants.suspend_tenant("org", actor="t")
    await scene.heard()
    for source in SOURCES:
        await refused(scene.headers(source))
    assert player._requests == 0


async def test_a_token_is_in_no_log_line_and_no_record(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Taken or refused, at any level."""
    now_s = scene.harness.service.gateway.ledger._clock.now_ns() / 1e9
    tokens = [scene.issuer.signed(now_s), scene.issuer.signed(now_s, aud="other")]
    with caplog.at_level(0):
        for token in tokens:
            headers = {"authorization": f"Bearer {token}"}
            await scene.harness.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        records = await scene.harness.next_settled(2)
        await asyncio.sleep(0)
    written = caplog.text + repr(records)
    for token in tokens:
        assert token.split(".")[1] not in written and token.split(".")[2] not in written
