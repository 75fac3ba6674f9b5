"""`/admin/v1` over HTTP and the commands `tenant` and `key`, on a real database."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner, Result
from litestar import Litestar, Request, Response, get

from gateway.admins import Admins
from gateway.api.admin import create_admin_router
from gateway.api.openapi import add_roles
from gateway.auth import Admin, Auth, read_credential
from gateway.commands import Session, Store
from gateway.commands.admin import admin as admin_commands
from gateway.commands.audit import audit as audit_commands
from gateway.commands.key import key as key_commands
from gateway.commands.tenant import tenant as tenant_commands
from gateway.errors import Forbidden, GatewayError
from gateway.keys import KeyRing, mint_admin_key
from gateway.roles import ROLES, Principal
from gateway.tenant_tables import TenantBase
from gateway.tenants import Tenants
from telemetry.clock import SystemClock
from telemetry.database import open_engine
from tests import services

RING = KeyRing(bytes(range(32)))
ADMIN_KEY = mint_admin_key().reveal()
AS_ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
NOBODY = "018f0000-0000-7000-8000-000000000000"

Client = httpx.AsyncClient


def render(_: Request[Any, Any, Any], error: GatewayError) -> Response[Any]:
    body = {"message": error.message, "code": error.code, "param": error.param}
    return Response({"error": body}, status_code=error.status)


def app(tenants: Tenants) -> Litestar:
    """As the composition root does it, with a tenant's route beside."""

    @get("/whoami")
    async def whoami(request: Request[Any, Any, Any]) -> str:
        async with Auth(tenants, RING, SystemClock()) as auth:
            return (await auth.identify(read_credential(request.scope["headers"]))).tenant

    admin = Admin(ADMIN_KEY, admins=Admins(tenants, RING), clock=SystemClock())
    return Litestar(
        [create_admin_router(tenants, admin, RING), whoami],
        exception_handlers={GatewayError: render},
    )


def over_asgi(application: Litestar) -> Client:
    """On this event loop: the database's connections belong to it."""
    transport = httpx.ASGITransport(app=application)  # type: ignore[arg-type]  # same ASGI
    return Client(transport=transport, base_url="http://gateway")


def unopened_app() -> Litestar:
    """For reading routes: the database is never touched."""
    return app(Tenants.open("sqlite://", RING, SystemClock()))


@pytest.fixture
async def client(database_url: str) -> AsyncIterator[Client]:
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(TenantBase.metadata.create_all)
    async with over_asgi(app(Tenants(engine, RING, SystemClock()))) as client:
        client.headers.update(AS_ADMIN)
        yield client
    await engine.dispose()


# ------------------------------------------------------------------------------------------ HTTP


async def test_a_key_from_creation_to_revocation(client: Client) -> None:
    """Create a tenant and a key, use it, narrow it, rotate it, revoke it, delete the tenant."""
    made = await client.post("/admin/v1/tenants", json={"name": "acme", "labels": {"a": "b"}})
    assert made.status_code == 201
    acme = made.json()
    assert acme["state"] == "active"

    issued = await client.post(
        f"/admin/v1/tenants/{acme['id']}/keys", json={"name": "prod", "model_allow": ["a*"]}
    )
    assert issued.status_code == 201
    assert issued.headers["cache-control"] == "private, no-store"
    key = issued.json()
    secret = key.pop("key")
    assert await whoami(client, secret) == (200, "acme")

    url = f"/admin/v1/keys/{key['id']}"
    assert (await client.get(url)).json() == key
    ends = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    patched = (await client.patch(url, json={"model_allow": None, "expires_at": ends})).json()
    assert patched["name"] == "prod"
    assert patched["model_allow"] is None
    assert datetime.fromisoformat(patched["expires_at"]) == datetime.fromisoformat(ends)

    rotated = await client.post(f"{url}/rotate", json={"grace_s": 3600})
    assert rotated.status_code == 201
    assert await whoami(client, secret) == (200, "acme")
    assert await whoami(client, rotated.json()["key"]) == (200, "acme")

    revoked = await client.delete(url)
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert (await whoami(client, secret))[0] == 401

    for act, state, status in (("suspend", "suspended", 401), ("resume", "active", 200)):
        moved = await client.post(f"/admin/v1/tenants/acme/{act}")
        assert (moved.status_code, moved.json()["state"]) == (200, state)
        assert (await whoami(client, rotated.json()["key"]))[0] == status
    deleted = await client.delete(f"/admin/v1/tenants/{acme['id']}")
    assert deleted.json()["state"] == "deleted"
    assert (await whoami(client, rotated.json()["key"]))[0] == 401


async def whoami(client: Client, secret: str) -> tuple[int, str]:
    answer = await client.get("/whoami", headers={"authorization": f"Bearer {secret}"})
    return answer.status_code, answer.text


async def test_lists_page_and_never_hold_secrets(client: Client) -> None:
    """Lists follow a cursor to their end; no answer but the first holds secret or HMAC."""
    secrets = []
    await client.post("/admin/v1/tenants", json={"name": "acme"})
    for _ in range(5):
        issued = (await client.post("/admin/v1/tenants/acme/keys", json={})).json()
        secrets.append(issued["key"])
    seen: list[str] = []
    url = "/admin/v1/tenants/acme/keys?limit=2"
    while True:
        answer = await client.get(url + (f"&after={seen[-1]}" if seen else ""))
        page = answer.json()
        seen += [item["id"] for item in page["data"]]
        assert page["last_id"] == seen[-1]
        for secret in secrets:
            assert secret.rsplit("-", 1)[1] not in answer.text
            assert RING.digest(secret).hex() not in answer.text
        if not page["has_more"]:
            break
    assert len(seen) == len(set(seen)) == 5
    tenants = (await client.get("/admin/v1/tenants")).json()
    assert [item["name"] for item in tenants["data"]] == ["acme"]
    assert tenants["has_more"] is False


def admin_routes() -> list[tuple[str, str]]:
    """Method and path of every admin route of the app."""
    probe = unopened_app()
    return sorted(
        (method, route.path)
        for route in probe.routes
        if route.path.startswith("/admin")
        for method in route.methods  # type: ignore[attr-defined]  # HTTP routes have them
        if method != "OPTIONS"
    )


async def test_every_admin_route_takes_the_admin_key_only(client: Client) -> None:
    """No key, a tenant's key, a wrong one or two different ones: 401, before anything happens."""
    await client.post("/admin/v1/tenants", json={"name": "acme"})
    key = (await client.post("/admin/v1/tenants/acme/keys", json={})).json()["key"]
    del client.headers["authorization"]
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": f"Bearer {key}"},
        {"x-api-key": ADMIN_KEY[:-1]},
        {"authorization": f"Basic {ADMIN_KEY}"},
        {**AS_ADMIN, "x-api-key": key},
    ]
    routes = admin_routes()
    assert len(routes) == 23
    for method, path in routes:
        for headers in wrong:
            url = path.replace("{tenant:str}", "acme").replace("{key:str}", key)
            answer = await client.request(method, url, headers=headers, json={"name": "x"})
            assert answer.status_code == 401, (method, path, headers)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert key.rsplit("-", 1)[1] not in answer.text
    client.headers.update(AS_ADMIN)
    assert len((await client.get("/admin/v1/tenants")).json()["data"]) == 1
    assert (await client.get("/whoami")).status_code == 401  # the admin key is no tenant's key


def test_every_admin_route_declares_its_caller() -> None:
    """Each handler says who may call it, for the inventory of routes."""
    handlers = [
        handler
        for route in unopened_app().routes
        if route.path.startswith("/admin")
        for handler, _ in route.route_handler_map.values()  # type: ignore[union-attr]  # HTTP
        if "OPTIONS" not in handler.http_methods
    ]
    assert {handler.opt.get("caller") for handler in handlers} == {"admin"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "tenants", {"name": ""}, 400, "name"),
        ("POST", "tenants", {"name": "acme"}, 409, "name"),
        ("POST", "tenants", {"name": "b", "labels": {"k": "\n"}}, 400, "labels.k"),
        ("POST", "tenants", {"name": "b", "parent": "nobody"}, 404, "parent"),
        ("POST", "tenants", {"name": "b", "currency": "€"}, 400, "currency"),
        ("PATCH", "tenants/acme", {"parent": "acme"}, 400, "parent"),
        ("PATCH", "tenants/acme", {"kind": "a b"}, 400, "kind"),
        ("GET", "tenants?limit=0", None, 400, "limit"),
        ("GET", "tenants?after=x", None, 400, "after"),
        ("GET", f"tenants/{NOBODY}", None, 404, None),
        ("POST", f"tenants/{NOBODY}/suspend", None, 404, None),
        ("POST", f"tenants/{NOBODY}/keys", {}, 404, None),
        ("GET", f"tenants/{NOBODY}/keys", None, 404, None),
        ("POST", "tenants/acme/keys", {"model_allow": ["a", "*b"]}, 400, "model_allow[1]"),
        (
            "POST",
            "tenants/acme/keys",
            {"expires_at": "2001-01-01T00:00:00Z"},
            400,
            "expires_at",
        ),
        ("POST", "tenants/acme/keys", {"expires_at": "2999-01-01T00:00:00"}, 400, "expires_at"),
        ("GET", f"keys/{NOBODY}", None, 404, None),
        ("DELETE", "keys/%00", None, 404, None),
        ("POST", "keys/KEY/rotate", {"grace_s": -1}, 400, "grace_s"),
        ("POST", "keys/KEY/rotate", {"grace_s": 1e300}, 400, "grace_s"),
        ("PATCH", "keys/KEY", {"name": "\n"}, 400, "name"),
    ],
)
async def test_mistakes_are_answered_with_their_path(
    client: Client, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    """What cannot be done names the field, and changes nothing."""
    await client.post("/admin/v1/tenants", json={"name": "acme"})
    key = (await client.post("/admin/v1/tenants/acme/keys", json={})).json()["id"]
    answer = await client.request(method, f"/admin/v1/{path.replace('KEY', key)}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert len((await client.get("/admin/v1/tenants")).json()["data"]) == 1
    assert len((await client.get("/admin/v1/tenants/acme/keys")).json()["data"]) == 1


@pytest.mark.parametrize(
    "body", [{"name": "x", "nmae": "y"}, {"name": 1}, {}, [], {"name": "x", "labels": {"a": 1}}]
)
async def test_a_body_of_another_shape_is_a_400(client: Client, body: Any) -> None:
    """Unknown fields, wrong types and missing fields are refused by the framework."""
    assert (await client.post("/admin/v1/tenants", json=body)).status_code == 400


async def test_the_database_gone_is_a_503() -> None:
    """Admin routes answer 503 when the database cannot be reached, and name no host."""
    url = f"postgresql://postgres@127.0.0.1:{services.free_port()}/x"
    tenants = Tenants.open(url, RING, SystemClock())
    async with over_asgi(app(tenants)) as client:
        for answer in (
            await client.get("/admin/v1/tenants", headers=AS_ADMIN),
            await client.post("/admin/v1/tenants", headers=AS_ADMIN, json={"name": "acme"}),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "store_unavailable"
            assert "127.0.0.1" not in answer.text
    await tenants.close()


async def test_a_planted_secret_is_in_no_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """With every logger at DEBUG, SQL and driver included, no line holds the secret."""
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("sqlalchemy.engine").setLevel(logging.DEBUG)
        try:
            await client.post("/admin/v1/tenants", json={"name": "acme"})
            issued = (await client.post("/admin/v1/tenants/acme/keys", json={})).json()
            await whoami(client, issued["key"])
            await whoami(client, issued["key"][:-1] + "!")
        finally:
            logging.getLogger("sqlalchemy.engine").setLevel(logging.NOTSET)
    assert "api_key" in caplog.text
    assert issued["key"].rsplit("-", 1)[1][:-1] not in caplog.text
    assert ADMIN_KEY not in caplog.text


def test_the_api_documents_itself() -> None:
    """The OpenAPI document describes each admin route's fields."""
    document = unopened_app().openapi_schema.to_schema()
    assert {path for path in document["paths"] if path.startswith("/admin")} == {
        path.replace(":str", "") for _, path in admin_routes()
    }
    patch = document["components"]["schemas"]["KeyPatch"]
    assert "required" not in patch or patch["required"] == []
    assert "key" in document["components"]["schemas"]["KeyWithSecret"]["properties"]
    assert "hmac" not in json.dumps(document).lower()


# -------------------------------------------------------------------------------------- commands

Run = Callable[..., Result]


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Store:
    """A migrated database and no pepper yet."""

    async def create_tables() -> None:
        engine = open_engine(database_url)
        async with engine.begin() as db:
            await db.run_sync(TenantBase.metadata.create_all)
        await engine.dispose()

    asyncio.run(create_tables())
    return Store(database=database_url, pepper=tmp_path / "data" / "key-pepper")


@pytest.fixture
def run(store: Store) -> Run:
    return runner_on(store)


def runner_on(store: Store) -> Run:
    root = click.Group(commands=[tenant_commands, key_commands, admin_commands, audit_commands])

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(root, arguments, obj=lambda _config: store)

    return invoke


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_operator_makes_rotates_and_revokes_a_key(run: Run) -> None:
    """The commands do the whole life of a key and print it as a table or as JSON."""
    acme = facts(run("tenant", "create", "acme", "--label", "cost-centre=4711", "--format", "json"))
    assert acme["labels"] == {"cost-centre": "4711"}
    created = run(
        "key", "create", "acme", "--name", "prod", "--models", "a, b*", "--expires", "90d"
    )
    assert created.exit_code == 0, created.output
    shown = dict(line.split(maxsplit=1) for line in created.stdout.splitlines())
    assert shown["model_allow"] == "a,b*"
    assert shown["key"].startswith(f"sk-ml-{shown['public_id']}-")
    assert "cannot be shown again" in created.stderr

    rotated = facts(run("key", "rotate", shown["public_id"], "--grace", "24h", "--format", "json"))
    assert rotated["model_allow"] == ["a", "b*"]
    listed = run("key", "list", "acme")
    assert shown["key"].rsplit("-", 1)[1] not in listed.output
    assert [line.split()[4] for line in listed.stdout.splitlines()] == [
        "STATE",
        "rotated",
        "active",
    ]
    assert facts(run("key", "revoke", rotated["id"], "--format", "json"))["state"] == "revoked"
    states = {item["id"]: item["state"] for item in facts(run("key", "list", "--format", "json"))}
    assert states == {shown["id"]: "rotated", rotated["id"]: "revoked"}


def test_an_operator_suspends_resumes_and_deletes_a_tenant(run: Run) -> None:
    """States show at once in `show` and `list`."""
    run("tenant", "create", "acme")
    for act, state in (("suspend", "suspended"), ("resume", "active"), ("delete", "deleted")):
        assert facts(run("tenant", act, "acme", "--format", "json"))["state"] == state
        (listed,) = facts(run("tenant", "list", "--format", "json"))
        assert listed["state"] == state
        assert facts(run("tenant", "show", listed["id"], "--format", "json")) == listed
    assert "deleted" in run("tenant", "list").stdout


def test_a_list_has_every_page(run: Run, store: Store) -> None:
    """`list` goes beyond one page of the store."""
    run("tenant", "create", "acme")

    async def many(tenants: Tenants) -> None:
        for _ in range(105):
            await tenants.create_key("acme", actor="t")

    Session(store, actor="t", clock=SystemClock()).run(many)
    assert len(facts(run("key", "list", "acme", "--format", "json"))) == 105


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tenant", "show", "nobody"), 1, "No such tenant"),
        (("tenant", "suspend", NOBODY), 1, "No such tenant"),
        (("tenant", "create", "acme"), 1, "exists already"),
        (("tenant", "create", ""), 2, "name is 1 to 64"),
        (("tenant", "create", "b", "--label", "x"), 2, "--label: 'x' is not KEY=VALUE"),
        (("tenant", "create", "b", "--label", "x=1", "--label", "x=2"), 2, "given twice"),
        (("key", "create", "nobody"), 1, "No such tenant"),
        (("key", "create", "acme", "--expires", "soon"), 2, "--expires: 'soon' is neither"),
        (("key", "create", "acme", "--expires", "999999d"), 2, "within 100 years"),
        (("key", "create", "acme", "--expires", "2001-01-31"), 2, "must be in the future"),
        (("key", "create", "acme", "--models", "a*b"), 2, "followed by one `*`"),
        (("key", "rotate", "nothing"), 1, "No such key"),
        (("key", "rotate", "nothing", "--grace", "1y"), 2, "--grace: '1y' is not a duration"),
        (("key", "rotate", "nothing", "--grace", "91d"), 2, "between 0 and 90 days"),
        (("key", "revoke", "nothing"), 1, "No such key"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """1 when the answer is no, 2 for bad input; one line on stderr, nothing on stdout."""
    run("tenant", "create", "acme")
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (Store(database="sqlite:///{tmp}/x.db", pepper=bytes(32)), "meterline migrate"),
        (Store(database="mysql://x/y", pepper=bytes(32)), "not supported"),
        (Store(database="not a url", pepper=bytes(32)), "not a database URL"),
        (Store(database="postgresql://p@127.0.0.1:1/x", pepper=bytes(32)), "cannot be reached"),
        (Store(database="sqlite:////proc/none/x.db", pepper=bytes(32)), "/proc/none"),
        (Store(database="sqlite:///{tmp}/x.db", pepper=b"short"), "32 bytes"),
        (Store(database="sqlite:///{tmp}/x.db", pepper=Path("/proc/none/pepper")), "/proc/none"),
    ],
    ids=["no tables", "mysql", "no url", "no server", "no folder", "short pepper", "no pepper"],
)
def test_a_store_that_cannot_be_used_is_one_line(
    store: Store, message: str, tmp_path: Path
) -> None:
    """A wrong URL, pepper, folder or server ends with exit code 2 and says what it was."""
    at = store.database.replace("{tmp}", str(tmp_path))
    result = runner_on(Store(database=at, pepper=store.pepper))("tenant", "list")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert message in line


def test_every_command_helps_with_an_example() -> None:
    """`--help` of each group and command shows one that can be pasted."""
    runner = CliRunner()
    for group in (tenant_commands, key_commands):
        assert f"meterline {group.name} " in runner.invoke(group, ["--help"]).stdout
        for name in group.commands:
            text = runner.invoke(group, [name, "--help"]).stdout
            assert "Example:" in text
            assert f"meterline {group.name} {name}" in text


# ------------------------------------------------------------------------------- roles and audit

EXPECTED: dict[str, tuple[set[str], set[str]]] = {  # area → who may read, who may write
    "tenants": ({"owner", "admin", "billing", "member", "viewer"}, {"owner", "admin"}),
    "keys": ({"owner", "admin", "billing", "member", "viewer"}, {"owner", "admin", "member"}),
    "limits": ({"owner", "admin", "billing", "member", "viewer"}, {"owner", "admin"}),
    "budgets": ({"owner", "admin", "billing", "member", "viewer"}, {"owner", "admin", "billing"}),
    "admins": ({"owner", "admin"}, {"owner"}),
    "backends": ({"owner", "admin", "billing", "member", "viewer"}, {"owner", "admin"}),
    "audit": ({"owner", "admin", "billing"}, set()),
}


def area_of(path: str) -> str:
    """By hand, not from the routes' own words."""
    if "/keys" in path:
        return "keys"
    return path.split("/")[3]


async def issue_admin(client: Client, role: str, tenant: str | None = None) -> dict[str, str]:
    answer = await client.post(
        "/admin/v1/admins", json={"name": f"a {role}", "role": role, "tenant": tenant}
    )
    assert answer.status_code == 201, answer.text
    return {"authorization": f"Bearer {answer.json()['key']}"}


async def test_every_admin_route_by_every_role(client: Client) -> None:
    """Each role may call exactly what the table says; the others are a 403 that names who may."""
    await client.post("/admin/v1/tenants", json={"name": "acme"})
    roles = {role: await issue_admin(client, role) for role in ROLES}
    seen = set()
    for method, path in admin_routes():
        seen.add(area_of(path))
        readers, writers = EXPECTED[area_of(path)]
        allowed = readers if method == "GET" else writers
        url = re.sub(r"\{[^}]*\}", NOBODY, path)
        for role, headers in roles.items():
            answer = await client.request(method, url, headers=headers, json={})
            is_refused = answer.status_code == 403
            assert is_refused == (role not in allowed), (method, path, role, answer.text)
            if is_refused:
                assert answer.json()["error"]["code"] == "insufficient_role"
    # Backends have a router of their own: tests/integration/test_admin_roles.py walks them all.
    assert seen == EXPECTED.keys() - {"backends"}


def test_every_admin_route_says_for_whom_it_is() -> None:
    """Each handler names its area, and the OpenAPI document the roles."""
    for route in unopened_app().routes:
        if route.path.startswith("/admin"):
            for method, (handler, _) in route.route_handler_map.items():  # type: ignore[union-attr]  # HTTP
                if method != "OPTIONS":
                    assert handler.opt["area"] == area_of(route.path), route.path
    probe = unopened_app()
    add_roles(probe.openapi_schema, probe.routes)
    for path, item in probe.openapi_schema.to_schema()["paths"].items():
        if path.startswith("/admin"):
            for operation in item.values():
                assert "Roles: owner" in operation["description"], path


async def test_a_route_without_an_area_is_nobodys() -> None:
    """The guard fails closed."""
    with pytest.raises(Forbidden, match="cannot be called"):
        Principal(name="x", role="owner").require(None, "read")


async def test_an_administrator_of_a_part_sees_and_changes_that_part_only(client: Client) -> None:
    """What is elsewhere does not exist for them: not by id, by name, in lists, nor as a parent."""
    for name, parent in (("acme", None), ("search", "acme"), ("globex", None)):
        await client.post("/admin/v1/tenants", json={"name": name, "parent": parent})
    elsewhere = (await client.post("/admin/v1/tenants/globex/keys", json={})).json()
    limit = {"tenant": "globex", "counts": "requests", "amount": "5", "per_s": 60}
    foreign = (await client.put("/admin/v1/limits", json=limit)).json()
    mine = await issue_admin(client, "owner", "acme")
    del client.headers["authorization"]
    client.headers.update(mine)

    listed = (await client.get("/admin/v1/tenants")).json()["data"]
    assert [item["path"] for item in listed] == ["acme", "acme/search"]
    assert (await client.get("/admin/v1/limits")).json()["data"] == []
    for method, path, body in (
        ("GET", "tenants/globex", None),
        ("POST", "tenants/globex/suspend", None),
        ("POST", "tenants/globex/keys", {}),
        ("GET", "tenants/globex/keys", None),
        ("GET", f"keys/{elsewhere['id']}", None),
        ("DELETE", f"keys/{elsewhere['id']}", None),
        ("GET", "limits?tenant=globex", None),
        ("PUT", "limits", limit),
        ("DELETE", f"limits/{foreign['id']}", None),
        ("PATCH", "tenants/search", {"parent": "globex"}),
        ("POST", "tenants", {"name": "x", "parent": "globex"}),
        ("POST", "admins", {"name": "x", "role": "viewer", "tenant": "globex"}),
    ):
        answer = await client.request(method, f"/admin/v1/{path}", json=body)
        assert answer.status_code == 404, (method, path, answer.text)
    for method, path, body in (
        ("POST", "tenants", {"name": "x"}),
        ("PATCH", "tenants/search", {"parent": None}),
        ("POST", "admins", {"name": "x", "role": "viewer"}),
        ("GET", "audit", None),
    ):
        answer = await client.request(method, f"/admin/v1/{path}", json=body)
        assert answer.status_code == 403, (method, path, answer.text)
    made = await client.post("/admin/v1/tenants", json={"name": "x", "parent": "acme/search"})
    assert made.json()["path"] == "acme/search/x"
    assert (await client.post("/admin/v1/tenants/search/keys", json={})).status_code == 201
    assert len((await client.get("/admin/v1/admins")).json()["data"]) == 1


async def test_a_revoked_or_expired_admin_key_opens_nothing(client: Client) -> None:
    """At once; and a tenant's key never was one."""
    soon = (datetime.now(UTC) + timedelta(seconds=0.4)).isoformat()
    short = await client.post(
        "/admin/v1/admins", json={"name": "s", "role": "viewer", "expires_at": soon}
    )
    long = (await client.post("/admin/v1/admins", json={"name": "l", "role": "viewer"})).json()
    url, headers = "/admin/v1/tenants", {"authorization": f"Bearer {long['key']}"}
    assert (await client.get(url, headers=headers)).status_code == 200
    assert (await client.delete(f"/admin/v1/admins/{long['id']}")).json()["revoked_at"]
    assert (await client.get(url, headers=headers)).status_code == 401
    await asyncio.sleep(0.5)
    headers = {"authorization": f"Bearer {short.json()['key']}"}
    assert (await client.get(url, headers=headers)).status_code == 401
    listed = (await client.get("/admin/v1/admins")).text
    assert long["key"].rsplit("-", 1)[1] not in listed


async def test_the_audit_log_tells_who_did_what_to_what(client: Client) -> None:
    """Before and after, the request that did it, filters and pages; and no secret."""
    ann = await issue_admin(client, "admin")
    made = await client.post("/admin/v1/tenants", json={"name": "acme"}, headers=ann)
    key = (await client.post("/admin/v1/tenants/acme/keys", json={}, headers=ann)).json()
    await client.delete(f"/admin/v1/keys/{key['id']}")
    everything = (await client.get("/admin/v1/audit")).json()
    assert [(line["actor"], line["action"]) for line in everything["data"]] == [
        ("admin", "key.revoke"),
        ("admin:a admin", "key.create"),
        ("admin:a admin", "tenant.create"),
        ("admin", "admin.create"),
    ]
    revoke, create = everything["data"][:2]
    assert (revoke["before"]["state"], revoke["after"]["state"]) == ("active", "revoked")
    assert create["before"] is None and create["object"] == f"key/{key['id']}"
    tenant_line = everything["data"][2]
    assert tenant_line["request_id"]
    assert key["key"].rsplit("-", 1)[1] not in json.dumps(everything)
    for query, count in (
        ("action=key.*", 2),
        ("action=key.revoke", 1),
        ("actor=admin:*", 2),
        ("actor=admin", 2),
        (f"object=tenant/{made.json()['id']}", 1),
        ("from=2001-01-01T00:00:00Z", 4),
        ("to=2001-01-01T00:00:00Z", 0),
        ("action=%25", 0),
    ):
        found = (await client.get(f"/admin/v1/audit?{query}")).json()
        assert len(found["data"]) == count, query
    page = (await client.get("/admin/v1/audit?limit=3")).json()
    assert page["has_more"] is True
    rest = (await client.get(f"/admin/v1/audit?before={page['last_id']}")).json()
    assert [line["action"] for line in rest["data"]] == ["admin.create"]
    for query, param in (
        ("limit=0", "limit"),
        ("from=2001-01-01T00:00:00", "from"),
        ("from=2002-01-01T00:00:00Z&to=2001-01-01T00:00:00Z", "to"),
    ):
        wrong = await client.get(f"/admin/v1/audit?{query}")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)


def test_administrators_and_the_audit_log_by_command(run: Run) -> None:
    """Create, list, revoke; then what was done, by whom, filtered."""
    run("tenant", "create", "acme")
    made = facts(run("admin", "create", "ann", "--role", "member", "--tenant", "acme",
                     "--format", "json"))  # fmt: skip
    assert made["key"].startswith("sk-ml-admin-")
    listed = run("admin", "list")
    assert "member" in listed.stdout and made["key"] not in listed.stdout
    assert run("admin", "revoke", made["id"]).exit_code == 0
    assert run("admin", "revoke", "nobody").exit_code == 1
    lines = facts(run("audit", "list", "--action", "admin.*", "--format", "json"))
    assert [line["action"] for line in lines] == ["admin.revoke", "admin.create"]
    assert lines[0]["actor"].startswith("cli:")
    more = run("audit", "list", "--limit", "1")
    assert "--before" in more.stderr
    assert run("audit", "list", "--from", "soon").exit_code == 2


def test_a_tree_is_made_and_moved_by_command(run: Run) -> None:
    """Create under, move, change, list below; a circle is bad input."""
    run("tenant", "create", "acme", "--kind", "organisation", "--currency", "EUR")
    run("tenant", "create", "search", "--under", "acme", "--cost-centre", "4711")
    run("tenant", "create", "lab")
    assert run("tenant", "move", "acme", "--under", "acme/search").exit_code == 2
    assert run("tenant", "move", "acme").exit_code == 2
    moved = facts(run("tenant", "move", "acme/search", "--under", "lab", "--format", "json"))
    assert moved["path"] == "lab/search"
    changed = run("tenant", "change", "search", "--cost-centre", "", "--name", "find",
                  "--format", "json")  # fmt: skip
    assert (facts(changed)["cost_centre"], facts(changed)["path"]) == (None, "lab/find")
    assert "lab/find" in run("tenant", "list", "--below", "lab").stdout
    assert "acme" not in run("tenant", "list", "--below", "lab").stdout
    key = facts(run("key", "create", "find", "--scopes", "chat", "--from", "192.0.2.0/24",
                    "--format", "json"))  # fmt: skip
    assert (key["scopes"], key["ip_allow"]) == (["chat"], ["192.0.2.0/24"])
    lifted = facts(run("key", "change", key["id"], "--from", "all", "--format", "json"))
    assert (lifted["scopes"], lifted["ip_allow"]) == (["chat"], None)
    assert "lab/find" in run("key", "list").stdout


def test_a_command_may_be_held_to_a_role(run: Run, tmp_path: Path) -> None:
    """`--as`: the key's role and tenant hold, and the audit log has its name; a key in plain text
    is refused."""
    run("tenant", "create", "acme")
    run("tenant", "create", "search", "--under", "acme")
    run("tenant", "create", "globex")
    made = facts(run("admin", "create", "bob", "--role", "member", "--tenant", "acme",
                     "--format", "json"))  # fmt: skip
    file = tmp_path / "bob"
    file.write_text(made["key"])
    bob = ("--as", f"file:{file}")
    listed = run("tenant", "list", *bob).stdout
    assert "acme/search" in listed and "globex" not in listed
    assert run("key", "create", "search", *bob).exit_code == 0
    assert run("key", "create", "globex", *bob).exit_code == 1
    refused = run("tenant", "create", "x", "--under", "acme", *bob)
    assert (refused.exit_code, "is for owner, admin" in refused.stderr) == (1, True)
    assert run("audit", "list", *bob).exit_code == 1
    assert run("tenant", "list", "--as", made["key"]).exit_code == 2
    lines = facts(run("audit", "list", "--action", "key.create", "--format", "json"))
    assert [line["actor"] for line in lines] == ["admin:bob"]
    run("admin", "revoke", made["id"])
    assert run("tenant", "list", *bob).exit_code == 1
