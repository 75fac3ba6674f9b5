"""The edge: the shape of every error, headers both ways, SSE byte for byte, who may call what, and
that no secret gets out."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler
from sqlalchemy import text

from telemetry.logs import JsonFormatter
from tests.fakes.gateway import (
    ADMIN_KEY,
    ENVIRONMENT,
    Harness,
    Server,
    backend,
    error_of,
    events_of,
    route,
    running,
)
from tests.fakes.upstream import END, GOOD_EVENTS, Upstream, event, head, piece, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
STREAMED = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module, with the scripted upstream behind model `m`."""
    prices = backend("b", "http://127.0.0.1:1/v1")
    async with running(tmp_path_factory.mktemp("gateway"), tables=prices) as harness:
        yield harness


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def routed(gateway: Harness) -> None:
    """Each test begins with the same route."""
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))


def check_shape(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """An error answer in our shape with the headers of every answer."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.headers["x-request-id"]) == 36
    assert answer.headers["cache-control"] == "private, no-store"
    assert answer.headers["vary"] == "Authorization"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-should-retry"] == ("true" if status >= 500 else "false")
    error = error_of(answer.text)
    assert error["code"] == code
    return error


# --- errors that the framework makes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/audio/speech", 404, "not_found"),
        ("GET", "/admin/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/x", 404, "not_found"),
        ("GET", "/%ff%00", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/livez", 405, "method_not_allowed"),
        ("PUT", "/admin/v1/tenants", 405, "method_not_allowed"),
    ],
)
async def test_no_such_route(
    gateway: Harness, method: str, path: str, status: int, code: str
) -> None:
    """A path or method that does not exist is an error in our shape, too."""
    before = gateway.service.gateway.ledger.opened
    answer = await gateway.client.request(method, path, headers=ADMIN)
    check_shape(answer, status, code)
    if status == 405:
        allowed = answer.headers["allow"].split(", ")
        assert method not in allowed
        assert ("POST" in allowed) == (path in (CHAT, "/v1/completions", "/admin/v1/tenants"))
    assert gateway.service.gateway.ledger.opened == before


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_request", None),
        (b"[]", 400, "invalid_request", None),
        (b'{"name": 7}', 400, "invalid_request", "name"),
        (b'{"nam": "x"}', 400, "invalid_request", None),
        (b'{"name": "\xff"}', 400, "invalid_request", None),
        (b'{"name": "x", "labels": {"a": 1}}', 400, "invalid_request", "labels[...]"),
        (b'{"name": ""}', 400, "invalid_request", "name"),
        (b'{"name": "acme"}', 409, "conflict", "name"),
        (b'{"name": "' + b"x" * 1_100_000 + b'"}', 413, "request_too_large", None),
    ],
)
async def test_bad_admin_body(
    gateway: Harness, body: bytes, status: int, code: str, param: str | None
) -> None:
    """A bad body to the admin API says which field, in our shape, and never what we are made of."""
    answer = await gateway.client.post(
        "/admin/v1/tenants", content=body, headers=ADMIN | {"content-type": "application/json"}
    )
    error = check_shape(answer, status, code)
    assert error["param"] == param
    assert "Traceback" not in answer.text
    assert "msgspec" not in answer.text
    assert "litestar" not in answer.text


async def test_defect_in_a_framework_route(
    gateway: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of ours is a 500 in our shape; its text is in the log under the answer's id."""
    runtime = gateway.service.gateway.runtimes.current
    runtime.created = object()  # type: ignore[assignment]  # the planted defect
    answer = await gateway.client.get("/v1/models", headers=gateway.auth)
    check_shape(answer, 500, "internal_error")
    assert "object" not in answer.text
    logged = [getattr(line, "request_id", None) for line in caplog.records]
    assert answer.headers["x-request-id"] in logged


# --- methods, paths ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/health", "/readyz", CHAT, "/nothing"])
async def test_head(gateway: Harness, path: str) -> None:
    """HEAD never has a body, and says what GET would or that it is not allowed."""
    answer = await gateway.client.head(path)
    assert answer.content == b""
    assert answer.status_code == {CHAT: 405, "/nothing": 404}.get(path, 200)


@pytest.mark.parametrize("path", ["/livez", "/v1/models", CHAT, "/admin/v1/tenants"])
async def test_options(gateway: Harness, path: str) -> None:
    """OPTIONS lists methods and lets no browser of another site in: CORS is off."""
    answer = await gateway.client.options(
        path, headers={"origin": "https://evil.example", "access-control-request-method": "POST"}
    )
    assert answer.status_code == {CHAT: 405, "/admin/v1/tenants": 401}.get(path, 204)
    assert answer.status_code == 401 or answer.headers["allow"]
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/"])
async def test_other_spellings(gateway: Harness, path: str) -> None:
    """A base URL without /v1 works, and a trailing slash does."""
    answer = await gateway.client.post(path, content=BODY, headers=gateway.auth)
    assert answer.status_code == 200


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_other_key_headers(gateway: Harness, header: str) -> None:
    """The key may come as Anthropic's and Azure's clients send it."""
    answer = await gateway.client.post(CHAT, content=BODY, headers={header: gateway.key})
    assert answer.status_code == 200


async def test_models(gateway: Harness) -> None:
    """The model list has the shape of the real API, and the headers of every answer."""
    gateway.configure(
        backend("b", gateway.scripted_url) + route("m", "b") + route("org/model:7b", "b")
    )
    answer = await gateway.client.get("/v1/models", headers=gateway.auth)
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 36
    assert answer.headers["cache-control"] == "private, no-store"
    found = answer.json()
    assert found["object"] == "list"
    assert [model["id"] for model in found["data"]] == ["m", "org/model:7b"]
    assert all(
        model["object"] == "model" and isinstance(model["created"], int) and model["owned_by"]
        for model in found["data"]
    )
    for name in ("org/model:7b", "org%2Fmodel%3A7b"):
        one = await gateway.client.get(f"/v1/models/{name}", headers=gateway.auth)
        assert one.json() == found["data"][1]
    missing = await gateway.client.get("/v1/models/other", headers=gateway.auth)
    check_shape(missing, 404, "model_not_found")


# --- streams, byte for byte -------------------------------------------------------------------

ODD = (
    b'{"id":"c-1", "object":"chat.completion.chunk","created":1,"model":"m","x_unknown":1.0e-07,'
    b'"choices":[{"index":0,"delta":{"content":"h\\u00e9\\/","annotations":[]},"logprobs":'
    b'{"content":[{"token":"h","logprob":-0.10000000000000001,"big":123456789012345678901234}]},'
    b'"finish_reason":null}]}'
)
FINISH = b'{"id":"c-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"z":0.10}'
USAGE = b'{"id":"c-1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
EVENTS = [event(ODD), event(FINISH), event(USAGE), event(b"[DONE]")]


async def raw_stream(gateway: Harness, body: bytes) -> tuple[bytes, list[bytes]]:
    """The head, and the chunks of the chunked body as they were written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
        % (gateway.key.encode(), len(body))
        + body
    )
    answer_head = await reader.readuntil(b"\r\n\r\n")
    chunks = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    assert await reader.read() == b"\r\n"
    writer.close()
    await writer.wait_closed()
    return answer_head, chunks


@pytest.mark.parametrize("asks", [False, True], ids=["no usage", "usage"])
async def test_stream_is_byte_exact(gateway: Harness, asks: bool) -> None:
    """Each event is one write with the upstream's very bytes; the usage event only on request."""
    async with Upstream((head(), *map(piece, EVENTS), END)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        options = b',"stream_options":{"include_usage":true}' if asks else b""
        answer_head, chunks = await raw_stream(gateway, STREAMED[:-1] + options + b"}")
    assert chunks == (EVENTS if asks else [*EVENTS[:2], EVENTS[3]])
    lines = answer_head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    assert "content-type: text/event-stream; charset=utf-8" in lines
    assert "x-accel-buffering: no" in lines
    assert "cache-control: private, no-store" in lines
    assert not any(line.startswith(("content-length", "content-encoding")) for line in lines)


async def test_events_are_not_held_back(gateway: Harness) -> None:
    """An event is with the client before the next one is made, the role before the first token
    excepted: until there is content another target may still be tried."""
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        await send({"type": "http.response.body", "body": GOOD_EVENTS[1], "more_body": True})
        await release.wait()
        rest = b"".join(GOOD_EVENTS[2:])
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async with Server(slow) as upstream:
        gateway.configure(backend("b", f"{upstream.base_url}/v1") + route("m", "b"))
        async with gateway.client.stream(
            "POST", CHAT, content=STREAMED, headers=gateway.auth
        ) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == GOOD_EVENTS[1]
            release.set()
            rest = b"".join([piece async for piece in pieces])
    assert rest == b"".join([*GOOD_EVENTS[2:4], GOOD_EVENTS[5]])


async def test_whole_answer_is_byte_exact(gateway: Harness) -> None:
    """A whole answer is the upstream's very bytes, with its length."""
    body = (
        b'{ "id":"c","choices":[{"index":0,"message":{"content":"\\u00e9"},"finish_reason":"stop"}'
        b'],"usage":{"prompt_tokens":1,"completion_tokens":1},"x":1.0E+2 }\n'
    )
    async with Upstream(whole(body)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        answer = await gateway.client.post(CHAT, content=BODY, headers=gateway.auth)
    assert answer.content == body
    assert answer.headers["content-length"] == str(len(body))


async def test_request_is_byte_exact(gateway: Harness) -> None:
    """What the client sent goes up as it came: unknown fields, order, white space, floats."""
    body = (
        b'{ "x_new": {"b":1.0e-07,"a":[1e400]}, "model":"m","temperature":0.10,'
        b'"messages":[{"role":"user","content":"\\u00e9","x":123456789012345678901234}]}'
    )
    async with Upstream(whole(b"{}", 500)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        await gateway.client.post(CHAT, content=body, headers=gateway.auth)
        assert upstream.received[0].body == body


# --- headers both ways ------------------------------------------------------------------------


async def test_request_headers_are_an_allow_list(gateway: Harness) -> None:
    """Only our own headers go up: nothing of the client's, and above all not its key."""
    async with Upstream(whole(b"{}", 500)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        answer = await gateway.client.post(
            CHAT,
            content=BODY,
            headers={
                **gateway.auth,
                "cookie": "session=canary",
                "x-forwarded-for": "203.0.113.9",
                "forwarded": "for=203.0.113.9",
                "x-stainless-lang": "python",
                "x-stainless-retry-count": "1",
                "x-meterline-priority": "9",
                "openai-organization": "org-canary",
                "openai-beta": "x",
                "baggage": "user=canary",
                "tracestate": "x=canary",
                "proxy-authorization": "Basic canary",
                "te": "trailers",
                "x-request-id": "mine",
            },
        )
        sent = upstream.received[0].headers
    assert set(sent) == {
        *("host", "content-type", "user-agent", "accept-encoding", "authorization"),
        *("accept", "x-request-id", "traceparent", "content-length"),
    }
    assert sent["authorization"] == "Bearer upstream-canary-4711"
    assert sent["x-request-id"] == answer.headers["x-request-id"] != "mine"
    assert sent["user-agent"].startswith("meterline/")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_response_headers_are_an_allow_list(gateway: Harness, streamed: bool) -> None:
    """Nothing that an upstream puts into its headers comes down."""
    extra = {
        "set_cookie": "a=canary",
        "x_upstream_key": "canary",
        "server": "canary",
        "x_ratelimit_remaining_requests": "9",
        "openai_organization": "canary",
        "access_control_allow_origin": "*",
        "x_request_id": "theirs",
    }
    events = (head(**extra), *map(piece, GOOD_EVENTS), END)
    body = json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})
    at_once = (head(200, "application/json", **extra), piece(body.encode()), END)
    async with Upstream(events if streamed else at_once) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        answer = await gateway.client.post(
            CHAT, content=STREAMED if streamed else BODY, headers=gateway.auth
        )
    assert answer.status_code == 200
    own = {
        *("content-type", "cache-control", "vary", "x-content-type-options", "openai-version"),
        *("x-request-id", "openai-processing-ms", "x-meterline-overhead-ms", "date"),
        *("x-meterline-cache", "x-meterline-model", "x-meterline-backend"),
        "x-meterline-attempts",
    }
    own |= (
        {"x-accel-buffering", "transfer-encoding"}
        if streamed
        else {"content-length", "x-meterline-cost-usd"}
    )
    assert set(answer.headers) == own
    assert "canary" not in str(answer.headers)
    assert answer.headers["x-request-id"] != "theirs"
    assert 0 <= float(answer.headers["x-meterline-overhead-ms"]) < 5_000


async def test_cache_salt_is_the_tenants(gateway: Harness) -> None:
    """An engine gets a salt that we derive from the tenant, whatever the client put there: the
    same for one tenant, another for another, and never the client's."""
    tables = backend("e", "http://127.0.0.1:1/v1").replace('kind = "openai"', 'kind = "engine"')
    async with Upstream(whole(b"{}", 500)) as upstream:
        gateway.configure(
            tables.replace("http://127.0.0.1:1/v1", upstream.base_url) + route("m", "e")
        )
        tenants = gateway.service.tenants
        other = await tenants.create_tenant("salted", {}, actor="test")
        issued = await tenants.create_key(other.id, name="k", actor="test")
        salted = BODY[:-1] + b',"cache_salt":"mine-canary","priority":-5}'
        for key in (gateway.key, gateway.key, issued.secret.reveal()):
            await gateway.client.post(
                CHAT, content=salted, headers={"authorization": f"Bearer {key}"}
            )
        bodies = [json.loads(request.body) for request in upstream.received]
    salts = [body["cache_salt"] for body in bodies]
    assert salts[0] == salts[1] != salts[2]
    assert "mine-canary" not in salts
    assert all(len(salt) == 64 for salt in salts)
    assert not any("priority" in body for body in bodies)


# --- secrets ----------------------------------------------------------------------------------


async def test_no_secret_gets_out(gateway: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Client key, upstream key and admin key are in no log line, span, metric, row or answer,
    however the request ends."""
    caplog.set_level(logging.DEBUG)
    leaky = {"error": {"message": f"key {ENVIRONMENT['UPSTREAM_KEY']}", "type": "x", "code": "y"}}
    seen: list[str] = []
    wrong = gateway.key[:-1] + ("a" if gateway.key[-1] != "a" else "b")
    for status in (200, 400, 401, 429, 500):
        async with Upstream(whole(leaky, status)) as upstream:
            gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
            for key in (gateway.key, wrong, ADMIN_KEY, f"x{ADMIN_KEY}"):
                for body in (BODY, STREAMED, b'{"model": "' + key.encode() + b'", "messages": 7}'):
                    answer = await gateway.client.post(
                        CHAT, content=body, headers={"authorization": f"Bearer {key}"}
                    )
                    seen.append(f"{answer.headers}{answer.text}")
    for path in ("/v1/models", "/admin/v1/tenants", "/admin/v1/keys/nope", "/readyz", "/metrics"):
        for key in (gateway.key, wrong, ADMIN_KEY):
            answer = await gateway.client.get(path, headers={"authorization": f"Bearer {key}"})
            seen.append(f"{answer.headers}{answer.text}")
    await gateway.service.worker.flush()
    formatter = JsonFormatter()
    seen += [formatter.format(line) for line in caplog.records if line.name != "httpcore.http11"]
    async with gateway.engine.connect() as db:
        tables = (
            await db.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
        ).scalars()
        for table in list(tables):
            rows = await db.execute(text(f'SELECT * FROM "{table}"'))
            seen += [str(row) for row in rows]
    data = gateway.config_path.parent / "data"
    seen += [
        file.read_bytes().decode("latin-1")
        for file in data.rglob("*")
        if file.is_file() and file.name not in ("admin-key", "key-pepper")
    ]
    assert len(seen) > 100
    everything = "\n".join(seen)
    for name, secret in (
        ("client", gateway.key.rsplit("-", 1)[1]),
        ("mistyped", wrong.rsplit("-", 1)[1]),
        ("upstream", ENVIRONMENT["UPSTREAM_KEY"]),
        ("admin", ADMIN_KEY),
    ):
        at = everything.find(secret)
        assert at < 0, f"{name}: …{everything[max(0, at - 200) : at + 10]}…"


# --- who may call what ------------------------------------------------------------------------

DOCUMENTED = {"public", "tenant", "admin", "loopback or admin"}


def every_route(gateway: Harness) -> list[tuple[str, str, str]]:
    """(method, path, caller) of every route; fails for one that does not say who may call."""
    found = []
    for one in gateway.service.app.routes:
        path = one.path_format.replace("{", "").replace("}", "")
        handlers: dict[str, Any] = getattr(one, "route_handler_map", None) or {}
        if not handlers:
            handler = one.route_handler
            assert isinstance(handler, ASGIRouteHandler)
            handlers = {"POST": handler}
        for method, found_handler in handlers.items():
            handler = found_handler[0] if isinstance(found_handler, tuple) else found_handler
            assert isinstance(handler, HTTPRouteHandler | ASGIRouteHandler)
            if path.startswith("/schema") or method == "OPTIONS":
                continue  # the framework's own: the document, and the list of methods
            assert handler.opt.get("caller") in DOCUMENTED, f"{method} {path} does not say"
            found.append((method, path, handler.opt["caller"]))
    return found


async def test_every_route_says_who_may_call_and_means_it(gateway: Harness) -> None:
    """Deny by default: each route refuses every key but the kind that it declares."""
    routes = every_route(gateway)
    assert {caller for *_, caller in routes} == DOCUMENTED
    assert len(routes) > 15
    keys = {
        "none": {},
        "nonsense": {"authorization": "Bearer sk-nonsense"},
        "tenant": gateway.auth,
        "admin": ADMIN,
    }
    for method, path, caller in routes:
        for name, headers in keys.items():
            body = BODY if caller == "tenant" else b"{}"
            answer = await gateway.client.request(
                method, path, content=body, headers=headers | {"content-type": "application/json"}
            )
            if caller in ("tenant", "admin") and name != caller:
                if path.startswith("/v1/messages"):  # Anthropic's errors have their own shape
                    assert answer.status_code == 401
                    assert answer.json()["error"]["type"] == "authentication_error"
                else:
                    check_shape(answer, 401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            else:
                assert answer.status_code not in (401, 403), f"{method} {path} as {name}"


async def test_metrics_beyond_loopback_need_the_admin_key(gateway: Harness) -> None:
    """Metrics are open on this machine; behind a proxy or from elsewhere they need the key."""
    local = await gateway.client.get("/metrics")
    assert local.status_code == 200
    assert local.headers["content-type"].startswith("text/plain; version=0.0.4")
    proxied = {"x-forwarded-for": "203.0.113.9"}
    check_shape(await gateway.client.get("/metrics", headers=proxied), 401, "invalid_api_key")
    tenant = proxied | gateway.auth
    check_shape(await gateway.client.get("/metrics", headers=tenant), 401, "invalid_api_key")
    assert (await gateway.client.get("/metrics", headers=proxied | ADMIN)).status_code == 200
    transport = httpx.ASGITransport(app=gateway.service.app, client=("203.0.113.9", 1))  # type: ignore[arg-type]  # litestar is ASGI
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as far:
        check_shape(await far.get("/metrics"), 401, "invalid_api_key")
        assert (await far.get("/metrics", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("reason", "headers"),
    [
        ("missing", {}),
        ("wrong", {"authorization": "Bearer sk-ml-x"}),
        ("ambiguous", {"authorization": "Bearer a", "x-api-key": "b"}),
    ],
)
async def test_refusals_are_counted_by_reason(
    gateway: Harness, reason: str, headers: dict[str, str]
) -> None:
    """A request without a valid key raises the counter of its reason, and no other."""

    async def counts() -> dict[str, float]:
        lines = (await gateway.client.get("/metrics")).text.splitlines()
        name = "meterline_unauthenticated_requests_total{"
        return {
            line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(name)
        }

    before = await counts()
    await gateway.client.post(CHAT, content=BODY, headers=headers)
    after = await counts()
    assert {key for key in after if after[key] != before[key]} == {reason}


# --- the document -----------------------------------------------------------------------------


async def test_openapi(gateway: Harness) -> None:
    """/schema is an OpenAPI 3.1 document; every route in it exists, and every route is in it."""
    answer = await gateway.client.get("/schema")
    assert answer.status_code == 200
    document = answer.json()
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    for path in (CHAT, "/v1/completions"):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rsplit("/", 1)[1]
        assert "model" in document["components"]["schemas"][name]["properties"]
        assert {"200", "400", "401", "404", "413", "502", "503"} <= set(
            paths[path]["post"]["responses"]
        )
    documented = {
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, operations in paths.items()
        for method in operations
    }
    exist = {(method, path) for method, path, _ in every_route(gateway)}
    assert documented <= exist
    assert exist - documented <= {
        ("POST", "/chat/completions"),
        ("POST", "/completions"),
        ("POST", "/embeddings"),
        ("POST", "/responses"),
        *(("HEAD", path) for path in ("/livez", "/health", "/readyz")),
    }
    refs = {part.split('"')[0] for part in answer.text.split('"$ref":"#/components/schemas/')[1:]}
    assert refs <= set(document["components"]["schemas"])


async def test_events_helper_reads_what_clients_read(gateway: Harness) -> None:
    """A stream of the scripted upstream ends with a finish reason and then [DONE]."""
    answer = await gateway.client.post(CHAT, content=STREAMED, headers=gateway.auth)
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
