"""What operators keep to themselves stays there: a canary in each upstream key, URL, header and
error body is found nowhere; clients choose no host; only listed headers go up."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import text

from gateway.config import ConfigInvalid
from telemetry.logs import JsonFormatter
from telemetry.reports.explain import tell
from tests.fakes.gateway import ADMIN_KEY, ENVIRONMENT, Harness, backend, route, running
from tests.fakes.upstream import CUT, END, STALL, Step, Upstream, delta, event, head, piece, whole
from tests.services import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "canary4711"
MESSAGES = [{"role": "user", "content": "hi"}]
KEY = ENVIRONMENT["UPSTREAM_KEY"]
QUICK = "timeouts = { connect_s = 0.5, first_token_s = 0.3, inter_token_s = 0.3, total_s = 0.6 }"
HEADERS = {"x_secret": f"h-{CANARY}", "set_cookie": f"c-{CANARY}", "x_request_id": "fine"}
ERROR = {"error": {"message": f"key {KEY} at HOST", "type": f"{KEY}", "code": KEY, "param": KEY}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module."""
    async with running(
        tmp_path_factory.mktemp("gateway"), tables=backend("b", "http://127.0.0.1:1/v1")
    ) as harness:
        yield harness


def answers(port: int) -> dict[str, tuple[Step, ...]]:
    """Upstreams that put what is secret into all they say."""
    error = json.loads(json.dumps(ERROR).replace("HOST", f"127.0.0.1:{port}"))
    body = json.dumps(error).encode()
    found: dict[str, tuple[Step, ...]] = {
        f"status {status}": (head(status, "application/json", **HEADERS), piece(body), END)
        for status in (200, 302, 400, 401, 404, 413, 422, 429, 500, 503)
    }
    found |= {
        "redirect": (head(307, "text/plain", location=f"http://{CANARY}.example/"), END),
        "event": (head(**HEADERS), piece(event(delta("x"))), piece(event(error)), END),
        "first event": (head(**HEADERS), piece(event(error)), END),
        "cut": (head(**HEADERS), piece(event(delta("x"))), CUT),
        "garbage": (head(200, "application/json", **HEADERS), piece(KEY.encode()), END),
        "not HTTP": (KEY.encode() + b"\r\n\r\n", CUT),
        "html": (head(200, "text/html"), piece(KEY.encode()), END),
        "stall": (STALL,),
    }
    return found


async def everything(gateway: Harness, caplog: pytest.LogCaptureFixture) -> list[str]:
    """All that the gateway has written anywhere, and the stories of all requests."""
    await gateway.service.worker.flush()
    formatter = JsonFormatter()
    seen = [formatter.format(line) for line in caplog.records if line.name != "httpcore.http11"]
    seen += [line.getMessage() + str(line.__dict__) for line in caplog.records]
    async with gateway.engine.connect() as db:
        tables = await db.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
        for table in list(tables.scalars()):
            seen += [str(row) for row in await db.execute(text(f'SELECT * FROM "{table}"'))]
    data = gateway.config_path.parent / "data"
    seen += [
        file.read_bytes().decode("latin-1")
        for file in data.rglob("*")
        if file.is_file() and file.name not in ("admin-key", "key-pepper")
    ]
    seen += [str(tell(record)) for record in gateway.settled]
    seen.append(gateway.service.metrics.render(openmetrics=True).decode())
    for path in ("/readyz", "/admin/v1/backends", "/v1/models", "/schema"):
        headers = {"authorization": f"Bearer {ADMIN_KEY}"} if "admin" in path else gateway.auth
        answer = await gateway.client.get(path, headers=headers)
        seen.append(f"{answer.headers}{answer.text}")
    return seen


async def test_a_canary_is_found_nowhere(
    gateway: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """However an upstream fails, whole or streamed, with several keys or one, over servers that
    refuse: its keys, its path and what it says of them are in no answer, log, span, metric, row or
    story."""
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    tried = 0
    names = list(answers(0))
    for name in names:
        async with Upstream(()) as upstream:
            upstream.steps = list(answers(upstream.port)[name])
            url = f"http://127.0.0.1:{upstream.port}/path-{CANARY}/v1"
            keys = 'api_keys = ["env:UPSTREAM_KEY"]'
            one = backend("b", url, more=QUICK)
            two = one.replace('api_key = "env:UPSTREAM_KEY"', keys)
            for table in (one, two):
                gateway.configure(table + route("m", "b"))
                for stream in (False, True):
                    gateway.forget_failures()
                    body = {
                        "model": "m",
                        "messages": MESSAGES,
                        "stream": stream,
                    }
                    answer = await gateway.client.post(
                        "/v1/chat/completions", json=body, headers=gateway.auth
                    )
                    seen.append(f"{answer.headers}{answer.text}")
                    tried += len(upstream.received) > 0
    dead = f"http://127.0.0.1:{free_port()}/path-{CANARY}/v1"
    gateway.configure(backend("b", dead) + route("m", "b"))
    answer = await gateway.client.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": MESSAGES},
        headers=gateway.auth,
    )
    seen.append(f"{answer.headers}{answer.text}")
    assert tried == 4 * len(names)
    seen += await everything(gateway, caplog)
    assert len(seen) > 200
    for secret in (CANARY, KEY):
        found = [one for one in seen if secret in one]
        assert not found, found[0][max(0, found[0].find(secret) - 200) :][:400]


async def test_clients_choose_no_host(gateway: Harness) -> None:
    """Nothing in a body, a header or a path moves a request anywhere but to the operator's host."""
    async with Upstream(whole({}, 500)) as trap, Upstream(whole({}, 500)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        theirs = trap.base_url
        fields = ("base_url", "api_base", "api_url", "url", "host", "endpoint", "custom_host")
        body: dict[str, Any] = {
            "model": "m",
            "messages": MESSAGES,
            **dict.fromkeys(fields, theirs),
        }
        headers = gateway.auth | {
            "x-forwarded-host": f"127.0.0.1:{trap.port}",
            "x-base-url": theirs,
            "x-meterline-backend": theirs,
            "forwarded": f"host=127.0.0.1:{trap.port}",
            "x-portkey-custom-host": theirs,
            "host": f"127.0.0.1:{trap.port}",
        }
        for model in ("m", theirs, f"{theirs}/m", "b/m", "@b/m", "//b"):
            await gateway.client.post(
                "/v1/chat/completions", json=body | {"model": model}, headers=headers
            )
        for path in (f"/v1/proxy/{theirs}", f"//127.0.0.1:{trap.port}/v1/chat/completions"):
            await gateway.client.post(path, json=body, headers=headers)
        assert trap.connections == 0
        assert upstream.received
        hosts = {received.headers["host"] for received in upstream.received}
        assert hosts == {f"127.0.0.1:{upstream.port}"}


async def test_only_listed_headers_go_up(gateway: Harness) -> None:
    """An upstream that echoes what it got shows no header of the client, and our key alone."""
    async with Upstream(whole({}, 500)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        mine = {
            **gateway.auth,
            "cookie": f"a={CANARY}",
            "proxy-authorization": f"Basic {CANARY}",
            "x-forwarded-for": "10.1.2.3",
            "x-real-ip": "10.1.2.3",
            "x-stainless-lang": CANARY,
            "openai-organization": CANARY,
            "openai-project": CANARY,
            "baggage": f"k={CANARY}",
            "tracestate": f"k={CANARY}",
            "x-meterline-tags": CANARY,
            "x-amz-security-token": CANARY,
            "user-agent": CANARY,
            "accept-language": CANARY,
        }
        body = {"model": "m", "messages": MESSAGES}
        await gateway.client.post("/v1/chat/completions", json=body, headers=mine)
        (received,) = upstream.received
    assert set(received.headers) == {
        *("host", "content-type", "content-length", "user-agent", "accept", "accept-encoding"),
        *("authorization", "x-request-id", "traceparent"),
    }
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert CANARY not in str(received.headers)


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:pass@up.example/v1", "http://up.example/v1?key=x", "ftp://up.example/v1"),
        *("http://up.example/v1#x", "file:///etc/passwd", "gopher://up.example/"),
    ],
)
async def test_urls_that_would_carry_a_secret_are_refused(gateway: Harness, url: str) -> None:
    """In the config, with a line that does not repeat them."""
    with pytest.raises(ConfigInvalid) as refused:
        gateway.configure(backend("b", url) + route("m", "b"))
    assert "pass" not in str(refused.value)
    with contextlib.suppress(ConfigInvalid):
        several = backend("b", "x", more=f'urls = ["{url}", "http://b.example/v1"]')
        gateway.configure(several.replace('base_url = "x"\n', "") + route("m", "b"))
        raise AssertionError("it was taken")


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "[::1]", "10.0.0.1", "[::ffff:127.0.0.1]", "[64:ff9b::a9fe:a9fe]", "0"],
)
async def test_an_internal_address_needs_leave(gateway: Harness, host: str) -> None:
    """An operator's URL that points inside is refused at the connection unless it may be private,
    whether it is the only one or one of several."""
    inside = f"http://{host}:{free_port()}/v1"
    for table in (
        backend("b", inside),
        backend("b", "x", more=f'urls = ["{inside}"]').replace('base_url = "x"\n', ""),
    ):
        gateway.configure(table.replace("allow_private = true", "") + route("m", "b"))
        answer = await gateway.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": MESSAGES},
            headers=gateway.auth,
        )
        assert answer.status_code == 502
        assert "internal address" in answer.json()["error"]["message"]
        assert host not in answer.text
