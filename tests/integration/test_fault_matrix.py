"""What fails upstream × how it was asked × whether there is another: the status that the client
sees, a row for each attempt, the circuit that opens, the deadline, and nothing sent twice."""

import asyncio
import contextlib
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct

from backends.settings import Script
from gateway.health import FAULTS, Fault, State
from gateway.routing import Target
from telemetry.record import Outcome, RequestRecord
from tests.fakes.gateway import Harness, backend, error_of, events_of, route, running
from tests.fakes.upstream import CUT, RESET, STALL, Step, Upstream, delta, event, head, piece, whole
from tests.services import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = "timeouts = { connect_s = 0.5, first_token_s = 0.3, inter_token_s = 0.3, total_s = 0.6 }"
ONE_FAILURE = "[health]\nfailures = 1\nopen_s = 60\nopen_max_s = 60\n"
GOOD = Script(output_tokens=3)
WHOLE_HEAD = head(200, "application/json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module; each test gives it other backends and routes."""
    prices = backend("bad", "http://127.0.0.1:1/v1") + backend("good", "http://127.0.0.1:1/v1")
    folder = tmp_path_factory.mktemp("gateway")
    async with running(folder, server="ping_s = 0.1", tables=prices) as harness:
        yield harness
        assert not await harness.broken_laws()


class Failing(Struct, frozen=True):
    """One way to fail. `steps`: what the upstream plays, whole and streamed; None: it is gone."""

    steps: tuple[Sequence[Step], Sequence[Step]] | None
    status: int  # of the client's answer, without another backend
    code: str
    outcome: Outcome = Outcome.UPSTREAM_ERROR
    fault: Fault = "endpoint"
    retry_after: str | None = None


def status(number: int, **headers: str) -> tuple[Sequence[Step], Sequence[Step]]:
    """The same error answer, whole and streamed."""
    body = b'{"error":{"message":"m","type":"t","code":"c"}}'
    answer = (head(number, "application/json", **headers), piece(body), b"0\r\n\r\n")
    return answer, answer


FAILING = {
    "connect refused": Failing(None, 502, "upstream_unavailable"),
    "TLS wrong": Failing(None, 502, "upstream_unavailable"),
    "401": Failing(status(401), 502, "upstream_auth", fault="credential"),
    "402": Failing(status(402), 502, "upstream_auth", fault="credential"),
    "429": Failing(
        status(429, retry_after="20"),
        429,
        "upstream_rate_limited",
        fault="limit",
        retry_after="20",
    ),
    "500": Failing(status(500), 502, "upstream_failed"),
    "200 with error": Failing(
        (whole({"error": {"message": "m"}}), (head(), piece(event({"error": {"message": "m"}})))),
        502,
        "upstream_failed",
    ),
    "stall": Failing(
        ((WHOLE_HEAD, STALL), (head(), piece(event(delta(""))), STALL)),
        504,
        "upstream_timeout",
        Outcome.TIMEOUT,
    ),
    "stall in the middle": Failing(
        (
            (WHOLE_HEAD, piece(b'{"choices":[{"index":0,"message":{"content":"Hel'), STALL),
            (head(), piece(b": waiting\n\n"), piece(event(delta("")) + b"data: {"), STALL),
        ),
        504,
        "upstream_timeout",
        Outcome.TIMEOUT,
    ),
    "stall at once": Failing(((STALL,), (STALL,)), 504, "upstream_timeout", Outcome.TIMEOUT),
    "error after the first events": Failing(
        (
            whole({"error": {"message": "m", "type": "server_error"}}),
            (
                head(),
                piece(event(delta(""))),
                piece(event({"error": {"message": "m", "type": "server_error"}})),
            ),
        ),
        502,
        "upstream_failed",
    ),
    "done without a word": Failing(
        (
            whole({"choices": []}),
            (head(), piece(event(delta(""))), piece(event(b"[DONE]")), b"0\r\n\r\n"),
        ),
        502,
        "upstream_truncated",
        Outcome.TRUNCATED,
    ),
    "cut before content": Failing(
        ((WHOLE_HEAD, piece(b'{"cho'), CUT), (head(), piece(event(delta(""))), CUT)),
        502,
        "upstream_truncated",
        Outcome.TRUNCATED,
    ),
    "garbage": Failing(
        ((WHOLE_HEAD, piece(b"garbage"), b"0\r\n\r\n"), (head(), piece(b"data: {garbage\n\n"))),
        502,
        "upstream_protocol",
    ),
}


def tables(bad_url: str, gateway: Harness, *targets: str, attempts: int | None = None) -> str:
    """Both backends, and a route to these."""
    more = "" if attempts is None else f"attempts = {attempts}\n"
    return (
        backend("bad", bad_url, more=QUICK)
        + backend("good", gateway.scripted_url)
        + route("m", *targets)
        + more
    )


async def ask(gateway: Harness, *, stream: bool, **more: Any) -> httpx.Response:
    """One request, read to its end."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **more}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=gateway.auth)


async def settled(gateway: Harness, before: int) -> RequestRecord:
    """The one record that was added."""
    records = await gateway.next_settled(before + 1)
    assert len(records) == before + 1
    return records[-1]


def tried(record: RequestRecord) -> list[tuple[str, str, Outcome | None]]:
    """Backend, reason and outcome of each attempt."""
    return [(one.backend, one.reason, one.outcome) for one in record.attempts]


def states(gateway: Harness, name: str) -> dict[Fault, State]:
    """The circuits of a backend."""
    health = gateway.service.gateway.runtimes.health
    return {fault: health.state(Target(name, "m", 1), fault) for fault in FAULTS}


def opened(fault: Fault | None) -> dict[Fault, State]:
    """All closed but this one."""
    return {one: State.OPEN if one == fault else State.CLOSED for one in FAULTS}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """Of a server that nobody vouches for."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", folder / "k.pem", "-out", folder / "c.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "c.pem", folder / "k.pem")
    return context


@contextlib.asynccontextmanager
async def upstream_of(
    failing: Failing, certificate: ssl.SSLContext | None = None, *, stream: bool
) -> AsyncIterator[tuple[str, Upstream]]:
    """The failing upstream and its URL."""
    if failing.steps is None and certificate is not None:
        upstream = Upstream(whole({}))
        server = await asyncio.start_server(upstream._serve, "127.0.0.1", 0, ssl=certificate)
        async with server:
            yield f"https://localhost:{server.sockets[0].getsockname()[1]}/v1", upstream
        return
    if failing.steps is None:
        yield f"http://127.0.0.1:{free_port()}/v1", Upstream(())
        return
    async with Upstream(failing.steps[stream]) as upstream:
        yield upstream.base_url, upstream


@pytest.mark.parametrize("has_fallback", [True, False], ids=["fallback", "alone"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", FAILING)
async def test_a_failure_before_content(
    gateway: Harness,
    certificate: ssl.SSLContext,
    name: str,
    stream: bool,
    has_fallback: bool,
) -> None:
    """Another backend answers as if nothing had been; without one the client is told what it was.
    Either way its circuit is open afterwards, and the next request does not go there."""
    failing = FAILING[name]
    gateway.play(GOOD)
    tls = certificate if name == "TLS wrong" else None
    async with upstream_of(failing, tls, stream=stream) as (bad_url, upstream):
        names = ("bad", "good") if has_fallback else ("bad",)
        gateway.configure(tables(bad_url, gateway, *names) + ONE_FAILURE)
        before = len(gateway.settled)
        began = time.monotonic()
        answer = await ask(gateway, stream=stream)
        assert time.monotonic() - began < 3
        record = await settled(gateway, before)
        first = ("bad", "primary", failing.outcome)
        assert record.attempts[0].error_code == failing.code
        if has_fallback:
            assert answer.status_code == 200
            assert answer.headers["x-meterline-backend"] == "good"
            assert answer.headers["x-meterline-attempts"] == "2"
            assert not stream or events_of(answer.text)[-1] == "[DONE]"
            assert tried(record) == [first, ("good", "fallback", Outcome.OK)]
        else:
            assert answer.status_code == failing.status
            assert error_of(answer.text)["code"] == failing.code
            assert answer.headers.get("retry-after") == failing.retry_after
            assert tried(record) == [first]
        assert states(gateway, "bad") == opened(failing.fault)
        assert states(gateway, "good") == opened(None)

        answer = await ask(gateway, stream=stream)
        record = await settled(gateway, before + 1)
        if has_fallback:
            assert answer.status_code == 200
            assert tried(record) == [("good", "primary", Outcome.OK)]
        else:
            assert answer.status_code == (429 if failing.fault == "limit" else 503)
            assert 0 < int(answer.headers["retry-after"]) <= 60
            assert tried(record) == []
        assert len(upstream.received) == (failing.steps is not None)


@pytest.mark.parametrize("has_fallback", [True, False], ids=["fallback", "alone"])
@pytest.mark.parametrize("ending", ["cut", "stall", "error event", "garbage", "done", "reset"])
async def test_a_failure_after_content(gateway: Harness, ending: str, has_fallback: bool) -> None:
    """Text that was sent is never sent again: the stream ends with an error and without [DONE],
    whatever else there is and however many attempts are left. The circuit hears of it."""
    end: dict[str, Step] = {
        "cut": CUT,
        "stall": STALL,
        "error event": piece(event({"error": {"message": "m"}})),
        "garbage": piece(b"data: {garbage\n\n"),
        "done": piece(event(b"[DONE]")) + b"0\r\n\r\n",
        "reset": RESET,
    }
    gateway.play(GOOD)
    async with Upstream((head(), piece(event(delta("Hel"))), end[ending])) as upstream:
        names = ("bad", "good") if has_fallback else ("bad",)
        gateway.configure(tables(upstream.base_url, gateway, *names, attempts=5) + ONE_FAILURE)
        before = len(gateway.settled)
        began = time.monotonic()
        answer = await ask(gateway, stream=True)
        assert time.monotonic() - began < 3
        record = await settled(gateway, before)
        assert answer.status_code == 200
        assert record.outcome in (Outcome.TRUNCATED, Outcome.TIMEOUT, Outcome.UPSTREAM_ERROR)
        assert (record.outcome is Outcome.TRUNCATED) == (ending in ("cut", "done", "reset"))
        *texts, error = [one for one in events_of(answer.text) if not one.startswith(":")]
        assert json.loads(error)["error"]["code"].startswith("upstream_")
        assert [json.loads(text)["choices"][0]["delta"]["content"] for text in texts] == ["Hel"]
        assert [one.backend for one in record.attempts] == ["bad"]
        assert len(upstream.received) == 1
        assert states(gateway, "bad") == opened("endpoint")


async def test_the_metric_shows_the_circuit(gateway: Harness) -> None:
    """Open, and how often it opened."""
    gateway.configure(tables(f"http://127.0.0.1:{free_port()}/v1", gateway, "bad") + ONE_FAILURE)
    await ask(gateway, stream=False)
    text = gateway.service.metrics.render(openmetrics=False).decode()
    assert 'meterline_circuit_state{backend="bad",fault="endpoint"} 2.0' in text
    assert 'meterline_circuit_opened_total{backend="bad",fault="endpoint"}' in text


# --- retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_backend_is_asked_again(gateway: Harness, stream: bool) -> None:
    """With attempts to spare, one that failed and has no deputy gets a second try, as a row."""
    gateway.play(Script(output_tokens=3, fail="500", fail_every=2))
    gateway.configure(tables(gateway.scripted_url, gateway, "good", attempts=3))
    before = len(gateway.settled)
    await ask(gateway, stream=stream)
    answer = await ask(gateway, stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-meterline-attempts"] == "2"
    record = (await gateway.next_settled(before + 2))[-1]
    assert tried(record) == [
        ("good", "primary", Outcome.UPSTREAM_ERROR),
        ("good", "retry", Outcome.OK),
    ]


async def test_deputies_come_before_second_tries(gateway: Harness) -> None:
    """Nobody waits while another backend can answer; the budget ends it, all targets together."""
    gateway.play(Script(fail="500"))
    url = f"http://127.0.0.1:{free_port()}/v1"
    gateway.configure(tables(url, gateway, "bad", "good", attempts=3))
    before = len(gateway.settled)
    answer = await ask(gateway, stream=False)
    assert answer.status_code == 502
    record = await settled(gateway, before)
    assert [(one.backend, one.reason) for one in record.attempts] == [
        ("bad", "primary"),
        ("good", "fallback"),
        ("bad", "retry"),
    ]


async def test_one_attempt_is_one(gateway: Harness) -> None:
    """A route may say that there is no fallback although there are targets."""
    gateway.play(GOOD)
    url = f"http://127.0.0.1:{free_port()}/v1"
    gateway.configure(tables(url, gateway, "bad", "good", attempts=1))
    before = len(gateway.settled)
    assert (await ask(gateway, stream=False)).status_code == 502
    assert len((await settled(gateway, before)).attempts) == 1


async def test_a_short_retry_after_is_waited_for(gateway: Harness) -> None:
    """And not cut short: the limit is the backend's word."""
    gateway.play(Script(output_tokens=3, fail="429", fail_every=2))
    gateway.configure(tables(gateway.scripted_url, gateway, "good", attempts=2))
    await ask(gateway, stream=False)
    began = time.monotonic()
    answer = await ask(gateway, stream=False)
    assert answer.status_code == 200
    assert 1.0 <= time.monotonic() - began < 4.0


async def test_a_long_retry_after_is_the_clients(gateway: Harness) -> None:
    """Nobody is kept waiting for what may take minutes."""
    async with Upstream(status(429, retry_after="90")[0]) as upstream:
        gateway.configure(tables(upstream.base_url, gateway, "bad", attempts=5))
        began = time.monotonic()
        answer = await ask(gateway, stream=False)
        assert time.monotonic() - began < 2
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "90"
        assert len(upstream.received) == 1


async def test_a_refused_request_is_not_tried_again(gateway: Harness) -> None:
    """What the request is to blame for is so everywhere."""
    async with Upstream(status(400)[0]) as upstream:
        gateway.configure(tables(upstream.base_url, gateway, "bad", "good", attempts=5))
        assert (await ask(gateway, stream=False)).status_code == 400
        assert len(upstream.received) == 1
        assert states(gateway, "bad") == opened(None)


async def test_a_backend_that_recovers_is_found(gateway: Harness) -> None:
    """One request tries it when the time is over, and its success lets the others back."""
    player = gateway.play(Script(output_tokens=3, fail="500"))
    short = "[health]\nfailures = 1\nopen_s = 0.2\n"
    gateway.configure(tables(gateway.scripted_url, gateway, "good") + short)
    assert (await ask(gateway, stream=False)).status_code == 502
    assert (await ask(gateway, stream=False)).status_code == 503
    assert len(player.books.entries) == 0
    gateway.play(GOOD)
    await asyncio.sleep(0.25)
    answers = await asyncio.gather(*(ask(gateway, stream=False) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers).count(200) >= 1
    assert (await ask(gateway, stream=False)).status_code == 200
    assert states(gateway, "good") == opened(None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_clients_own_timeout_ends_it(gateway: Harness, stream: bool) -> None:
    """All attempts together end before the client has given up; the backend is not to blame."""
    slow = "timeouts = { connect_s = 5, first_token_s = 30, inter_token_s = 30, total_s = 30 }"
    async with Upstream((STALL,)) as upstream:
        gateway.configure(
            backend("bad", upstream.base_url, more=slow)
            + backend("good", upstream.base_url, more=slow)
            + route("m", "bad", "good")
            + ONE_FAILURE
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        headers = gateway.auth | {"x-stainless-timeout": "0.5"}
        began = time.monotonic()
        answer = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert time.monotonic() - began < 5
        assert answer.status_code == 504
        assert len(upstream.received) == 1
        assert "x-stainless-timeout" not in upstream.received[0].headers
        assert states(gateway, "bad") == opened(None)


# --- capability -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
    ],
    ids=["tools", "json_schema", "logprobs", "n"],
)
async def test_a_target_gets_only_what_it_can_do(
    gateway: Harness, asked: dict[str, Any], param: str
) -> None:
    """Not even as a fallback; and where nobody can, the request is refused before it costs."""
    gateway.play(GOOD)
    lacks = 'lacks = ["tools", "json_schema", "logprobs", "n"]'
    head_ = backend("bad", gateway.scripted_url) + backend("good", gateway.scripted_url)
    able = f'{{ backend = "bad", {lacks} }}, {{ backend = "good", weight = 0 }}'
    gateway.configure(f'{head_}[[routes]]\nmodel = "m"\ntargets = [{able}]\n')
    assert (await ask(gateway, stream=False)).headers["x-meterline-backend"] == "bad"
    answer = await ask(gateway, stream=False, **asked)
    assert answer.status_code == 200
    assert answer.headers["x-meterline-backend"] == "good"
    unable = f'{{ backend = "bad", {lacks} }}'
    gateway.configure(f'{head_}[[routes]]\nmodel = "m"\ntargets = [{unable}]\n')
    answer = await ask(gateway, stream=False, **asked)
    assert answer.status_code == 400
    error = error_of(answer.text)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


# --- pings ------------------------------------------------------------------------------------


async def test_a_silent_stream_says_that_it_lives(gateway: Harness) -> None:
    """Comments between events while nothing comes, none after the end; the events are unchanged."""
    gateway.play(Script(output_tokens=2, inter_token_s=0.45))
    gateway.configure(backend("good", gateway.scripted_url) + route("m", "good"))
    answer = await ask(gateway, stream=True)
    parts = answer.text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert 2 <= parts.count(": ping") <= 10
    assert all(part == ": ping" or part.startswith("data: ") for part in parts[:-1])
