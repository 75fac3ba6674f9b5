"""Roles on the whole running gateway: its own routes, reports, tokens, and the audit log's ids."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from litestar.routes import HTTPRoute

from gateway.roles import READ, ROLES, WRITE, act_of
from tests.fakes.gateway import ADMIN_KEY, Harness, Server, backend, error_of, route, running
from tests.fakes.issuer import Issuer

ROOT = {"authorization": f"Bearer {ADMIN_KEY}"}
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}]}
NOBODY = "018f0000-0000-7000-8000-000000000000"


class Scene:
    """A gateway with a tenant below another, and an issuer whose tokens have roles."""

    def __init__(self, harness: Harness, issuer: Issuer) -> None:
        self.harness = harness
        self.issuer = issuer

    async def admin(self, method: str, path: str, headers: dict[str, str], **more: Any) -> Any:
        return await self.harness.client.request(
            method, f"/admin/v1/{path}", headers=headers, **more
        )

    async def issue(self, role: str, tenant: str | None = None) -> dict[str, str]:
        body = {"name": role, "role": role, "tenant": tenant}
        answer = await self.admin("POST", "admins", ROOT, json=body)
        return {"authorization": f"Bearer {answer.json()['key']}"}

    def token(self, **claims: Any) -> dict[str, str]:
        now_s = self.harness.service.gateway.ledger._clock.now_ns() / 1e9
        return {"authorization": f"Bearer {self.issuer.signed(now_s, **claims)}"}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    issuer = Issuer()

    async def keys(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": issuer.jwks()})

    async with Server(keys, grace_s=1) as provider:
        trust = (
            f'[[auth.issuers]]\nissuer = "{issuer.name}"\naudience = ["meterline"]\n'
            f'jwks_url = "{provider.base_url}/keys"\nallow_private = true\n'
            'role_claim = "roles"\nroles = { finance = "billing", boss = "owner" }\n'
        )
        async with running(tmp_path, telemetry=trust) as harness:
            harness.configure(backend("up", harness.scripted_url) + route("assistant", "up"))
            await harness.service.tenants.create_tenant("other", actor="t")
            await harness.service.tenants.create_tenant("team", parent="acme", actor="t")
            yield Scene(harness, issuer)


async def test_every_admin_route_of_the_app_by_every_role(scene: Scene) -> None:
    """The routes are the running app's own, reports included: each role may call what the one table
    grants, and each route tells its roles in the OpenAPI document."""
    roles = {role: await scene.issue(role) for role in ROLES}
    document = (await scene.harness.client.get("/schema")).json()["paths"]
    count = 0
    for found in scene.harness.service.app.routes:
        if not isinstance(found, HTTPRoute) or not found.path.startswith("/admin"):
            continue
        for method, (handler, _) in found.route_handler_map.items():
            if method == "OPTIONS":
                continue
            area, act = handler.opt["area"], act_of(method)
            granted = READ if act == "read" else WRITE
            path = re.sub(r"\{[^}]*\}", NOBODY, found.path)
            told = document[re.sub(r":\w+}", "}", found.path)][method.lower()]["description"]
            for role, headers in roles.items():
                answer = await scene.harness.client.request(method, path, headers=headers, json={})
                is_refused = answer.status_code == 403
                assert is_refused == (area not in granted[role]), (method, path, role, answer.text)
                listed = told.rsplit("Roles: ", 1)[1].rstrip(".").split(", ")
                assert (role in listed) != is_refused, (method, path, role, told)
                count += 1
    assert count >= 25 * len(ROLES)


async def test_an_audit_line_has_the_id_of_the_answer(scene: Scene) -> None:
    """Of an act that was done; an error's id is its own."""
    made = await scene.admin("POST", "tenants", ROOT, json={"name": "new"})
    failed = await scene.admin("POST", "tenants", ROOT, json={"name": "new"})
    assert failed.status_code == 409
    (line, *_) = (await scene.admin("GET", "audit", ROOT)).json()["data"]
    assert line["action"] == "tenant.create"
    assert line["request_id"] == made.headers["x-request-id"] != failed.headers["x-request-id"]
    assert len(made.headers.get_list("x-request-id")) == 1


async def test_a_part_of_the_tree_sees_its_own_costs(scene: Scene) -> None:
    """Chargeback is cut to it; reports over all tenants are refused."""
    ask = {"headers": scene.harness.auth, "json": CHAT}
    await scene.harness.client.post("/v1/chat/completions", **ask)  # type: ignore[arg-type]  # by name
    await scene.harness.next_settled(1)
    assert not await scene.harness.broken_laws()
    for tenant, expected in ((None, ["acme"]), ("acme", ["acme"]), ("other", [])):
        viewer = await scene.issue("viewer", tenant)
        answer = await scene.admin("GET", "reports/chargeback?by=level-1", viewer)
        lines = answer.json()["lines"]
        assert [line["level_1_name"] for line in lines] == expected, answer.text
    refused = await scene.admin("GET", "reports/waste", viewer)
    assert (refused.status_code, error_of(refused.text)["code"]) == (403, "insufficient_role")


async def test_a_token_with_a_role_administers_its_tenant(scene: Scene) -> None:
    """By the config's table, for the tenant that it names and what is below; without a role it
    opens nothing, and the audit log names its subject as a hash."""
    finance = scene.token(roles=["staff", "finance"])
    budget = {"tenant": "team", "amount_usd": "5"}
    assert (await scene.admin("PUT", "budgets", finance, json=budget)).status_code == 200
    foreign = {"tenant": "other", "amount_usd": "5"}
    assert (await scene.admin("PUT", "budgets", finance, json=foreign)).status_code == 404
    assert (await scene.admin("POST", "tenants/team/keys", finance, json={})).status_code == 403
    both = scene.token(roles=["finance", "boss"])
    assert (await scene.admin("POST", "tenants/team/keys", both, json={})).status_code == 201
    for claims in ({}, {"roles": []}, {"roles": "owner"}, {"roles": {"finance": True}}):
        refused = await scene.admin("GET", "tenants", scene.token(**claims))
        assert refused.status_code == 401, claims
    lines = (await scene.admin("GET", "audit?actor=token:*", ROOT)).json()["data"]
    assert {line["action"] for line in lines} == {"key.create", "budget.set"}
    assert "ann" not in "".join(line["actor"] for line in lines)
