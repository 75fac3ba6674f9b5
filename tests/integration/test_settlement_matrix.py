"""Every way out of a request, whole and streamed: exactly one record, with the right outcome,
tokens and cost, in memory, on the log, in the database, in the metrics and in the trace.

Each cell is a real client on a real socket, the gateway as it is started in production, and a real
HTTP server upstream.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct

from backends.base import ChatRequest, Event, Timeouts
from backends.settings import Script
from gateway.dispatch import Upstream as GatewayUpstream
from telemetry.record import Outcome, RequestRecord
from telemetry.tracing import spans_of
from telemetry.usage import UsageSource
from tests.fakes.gateway import (
    Harness,
    Server,
    backend,
    error_of,
    events_of,
    route,
    running,
    scripted,
)
from tests.fakes.ledger import FillingDisk
from tests.fakes.upstream import (
    CUT,
    END,
    GOOD_EVENTS,
    STALL,
    Step,
    Upstream,
    event,
    head,
    piece,
    whole,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "say hello to me"  # four tokens for the script
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
QUICK = "timeouts = { connect_s = 1.0, first_token_s = 0.3, inter_token_s = 0.3, total_s = 0.6 }"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module; each cell gives it other backends and routes."""
    prices = backend("b", "http://127.0.0.1:1/v1")
    prices += backend("c", "http://127.0.0.1:1/v1", price='"3", output = "5"')
    async with running(tmp_path_factory.mktemp("gateway"), tables=prices) as harness:
        yield harness
        assert not await harness.broken_laws()


class Tried(Struct, frozen=True):
    """One attempt as it must stand in the books. `tokens`: input and output, None for nothing."""

    backend: str
    outcome: Outcome
    code: str | None = None
    tokens: tuple[int, int] | None = None
    source: UsageSource = UsageSource.NONE
    price: tuple[int, int] = (1, 2)  # dollars for 1 M tokens, in and out
    status: int | None = None

    @property
    def cost(self) -> Decimal:
        if self.tokens is None:
            return Decimal(0)
        return Decimal(self.tokens[0] * self.price[0] + self.tokens[1] * self.price[1]) / 10**6


class Must(Struct, frozen=True):
    """How a request must stand in every book."""

    outcome: Outcome
    status: int
    code: str | None
    tried: tuple[Tried, ...] = ()
    tenant: bool = True
    model: str | None = "m"
    stream: bool = False


def body_of(surface: str, *, stream: bool, model: str = "m", **more: Any) -> bytes:
    """A small request, as compact JSON."""
    fields: dict[str, Any] = {"model": model}
    if surface == "chat":
        fields["messages"] = [{"role": "user", "content": TEXT}]
    else:
        fields["prompt"] = TEXT
    if stream:
        fields["stream"] = True
    return json.dumps(fields | more, separators=(",", ":")).encode()


class Books:
    """What the books said before, so that a cell can say what was added."""

    def __init__(self, gateway: Harness) -> None:
        ledger = gateway.service.gateway.ledger
        self._gateway = gateway
        self._settled = len(gateway.settled)
        self._opened, self._admitted = ledger.opened, ledger.admitted
        self._totals = gateway.requests_total()

    async def one(self, must: Must, request_id: str | None = None) -> RequestRecord:
        """Assert that exactly this one request was added, everywhere, and return its record."""
        gateway, ledger = self._gateway, self._gateway.service.gateway.ledger
        settled = await gateway.next_settled(self._settled + 1)
        assert len(settled) == self._settled + 1
        record = settled[-1]
        assert request_id is None or record.request_id == request_id
        assert (record.outcome, record.status, record.error_code) == (
            must.outcome,
            must.status,
            must.code,
        )
        assert record.tenant_id == (gateway.tenant_id if must.tenant else None)
        assert record.asked_model == must.model
        assert record.stream == must.stream
        self._check_attempts(record, must)
        self._check_ledger(admitted=bool(must.tried))
        self._check_trace(record)
        await self._check_rows(record, must)
        totals = gateway.requests_total()
        assert {
            name: count - self._totals.get(name, 0)
            for name, count in totals.items()
            if count != self._totals.get(name, 0)
        } == {must.outcome.value: 1}
        assert ledger.observer_errors == ledger.rate_errors == 0
        assert set(gateway.service.worker.residuals().values()) == {0}
        return record

    @staticmethod
    def _check_attempts(record: RequestRecord, must: Must) -> None:
        assert [
            Tried(
                attempt.backend,
                attempt.outcome or Outcome.ABANDONED,
                attempt.error_code,
                None
                if attempt.usage is None
                else (attempt.usage.input_tokens, attempt.usage.output_tokens),
                attempt.usage_source,
                tried.price,
                attempt.http_status,
            )
            for attempt, tried in zip(record.attempts, must.tried, strict=True)
        ] == list(must.tried)
        assert record.cost == sum((tried.cost for tried in must.tried), Decimal(0))
        for attempt, tried in zip(record.attempts, must.tried, strict=True):
            assert sum((charge.amount or 0 for charge in attempt.charges), Decimal(0)) == tried.cost
            assert all(charge.amount is not None for charge in attempt.charges)
            assert attempt.ended_ns is not None
            assert record.ended_ns is not None
            assert record.opened_ns <= attempt.started_ns <= attempt.ended_ns <= record.ended_ns

    def _check_ledger(self, *, admitted: bool) -> None:
        ledger = self._gateway.service.gateway.ledger
        assert ledger.in_flight == 0
        assert ledger.wal.outstanding == 0
        assert ledger.opened == ledger.settled == self._opened + 1
        assert ledger.admitted == self._admitted + admitted

    @staticmethod
    def _check_trace(record: RequestRecord) -> None:
        spans = spans_of(record)
        root = spans[0]
        assert root.kind == "server"
        assert len({span.span_id for span in spans}) == len(spans)
        assert {span.trace_id for span in spans} == {record.trace_id}
        assert all(span.parent_span_id == root.span_id for span in spans[1:])
        assert all(
            root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in spans[1:]
        )
        assert [span.kind for span in spans].count("client") == len(record.attempts)
        assert [span.name for span in spans].count("settle") == 1

    async def _check_rows(self, record: RequestRecord, must: Must) -> None:
        rows = await self._gateway.rows(record.request_id)
        (request,) = rows.requests
        assert (request.outcome, request.status, request.error_code) == (
            must.outcome.value,
            must.status,
            must.code,
        )
        assert [event.outcome for event in sorted(rows.events, key=lambda row: row.attempt_no)] == [
            tried.outcome.value for tried in must.tried
        ]
        assert [event.is_final for event in rows.events].count(True) == bool(must.tried)
        assert sum(event.in_uncached_text for event in rows.events) == sum(
            tried.tokens[0] for tried in must.tried if tried.tokens
        )
        assert sum(event.out_text for event in rows.events) == sum(
            tried.tokens[1] for tried in must.tried if tried.tokens
        )
        assert sum((line.amount for line in rows.lines), Decimal(0)) == sum(
            (tried.cost for tried in must.tried), Decimal(0)
        )


def check_answer(answer: httpx.Response) -> None:
    """What is in every answer of the gateway."""
    assert len(answer.headers["x-request-id"]) == 36
    assert answer.headers["cache-control"] == "private, no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["openai-version"] == "2020-10-01"


def check_error(answer: httpx.Response, must: Must) -> dict[str, Any]:
    """An error answer: status, shape, and retry hints that fit."""
    check_answer(answer)
    assert answer.status_code == must.status
    assert answer.headers["content-type"] == "application/json"
    error = error_of(answer.text)
    assert error["code"] == must.code
    assert answer.headers["x-should-retry"] == ("true" if must.status in RETRIED else "false")
    assert ("www-authenticate" in answer.headers) == (must.status == 401)
    return error


RETRIED = (429, 502, 503, 504)


async def ask(gateway: Harness, surface: str, body: bytes, **headers: str) -> httpx.Response:
    """One request, read to its end."""
    return await gateway.client.post(
        PATHS[surface],
        content=body,
        headers={"content-type": "application/json", **gateway.auth}
        | {name.replace("_", "-"): value for name, value in headers.items()},
    )


everything = pytest.mark.parametrize(
    ("surface", "stream"),
    [("chat", False), ("chat", True), ("completions", False), ("completions", True)],
    ids=["chat-whole", "chat-streamed", "completions-whole", "completions-streamed"],
)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# --- served -----------------------------------------------------------------------------------


def text_of(answer: httpx.Response, *, stream: bool) -> str:
    """What the first choice says."""
    chunks = events_of(answer.text)[:-1] if stream else [answer.text]
    text = ""
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            if choice["index"] == 0:
                part = choice.get("message") or choice.get("delta") or choice
                text += part.get("content") or part.get("text") or ""
    return text


@everything
async def test_ok(gateway: Harness, surface: str, stream: bool) -> None:
    """A served request is billed with the tokens that the backend reports."""
    player = gateway.play(Script(output_tokens=3))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    answer = await ask(gateway, surface, body_of(surface, stream=stream))
    assert answer.status_code == 200
    check_answer(answer)
    assert text_of(answer, stream=stream) == "the quick brown"
    if stream:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert events_of(answer.text)[-1] == "[DONE]"
        assert "x-meterline-cost-usd" not in answer.headers
    else:
        assert answer.headers["x-meterline-cost-usd"] == "0.00001"
    assert answer.headers["x-meterline-backend"] == "b"
    assert answer.headers["x-meterline-model"] == "m"
    assert answer.headers["x-meterline-attempts"] == "1"
    record = await books.one(
        Must(
            Outcome.OK,
            200,
            None,
            (Tried("b", Outcome.OK, None, (4, 3), UsageSource.REPORTED, status=200),),
            stream=stream,
        ),
        answer.headers["x-request-id"],
    )
    assert player.books.served == {record.request_id: 3}


@everything
async def test_ok_two_choices(gateway: Harness, surface: str, stream: bool) -> None:
    """Two choices are billed as what both generated."""
    gateway.play(Script(output_tokens=3))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    answer = await ask(gateway, surface, body_of(surface, stream=stream, n=2, max_tokens=2))
    assert answer.status_code == 200
    record = await books.one(
        Must(
            Outcome.OK,
            200,
            None,
            (Tried("b", Outcome.OK, None, (4, 4), UsageSource.REPORTED, status=200),),
            stream=stream,
        )
    )
    assert record.output_limit == 4
    assert record.attempts[0].finish_reasons == ("length", "length")


@everything
async def test_ok_without_usage(gateway: Harness, surface: str, stream: bool) -> None:
    """A backend that reports no usage is billed by what passed, marked as estimated."""
    gateway.play(Script(output_tokens=3, report_usage=False))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    body = body_of(surface, stream=stream)
    answer = await ask(gateway, surface, body)
    assert answer.status_code == 200
    # Streamed: a token a chunk. Whole: "the quick brown" is 15 bytes, 4 to a token.
    tokens = (len(body) // 4, 3 if stream else 4)
    await books.one(
        Must(
            Outcome.OK,
            200,
            None,
            (Tried("b", Outcome.OK, None, tokens, UsageSource.ESTIMATED, status=200),),
            stream=stream,
        )
    )


# --- refused before anything is sent upstream -------------------------------------------------

REFUSALS: dict[str, tuple[Must, dict[str, str | None], bytes | None, str | None]] = {
    # name: what must be, headers that differ, the body if it differs, the error's param
    "invalid key": (
        Must(Outcome.CLIENT_ERROR, 401, "invalid_api_key", tenant=False, model=None),
        {"authorization": "Bearer sk-ml-nothing-like-it"},
        None,
        None,
    ),
    "missing key": (
        Must(Outcome.CLIENT_ERROR, 401, "invalid_api_key", tenant=False, model=None),
        {"authorization": None},
        None,
        None,
    ),
    "unknown model": (
        Must(Outcome.CLIENT_ERROR, 404, "model_not_found", model="nope"),
        {},
        b'{"model":"nope","messages":[{"role":"user"}],"prompt":"x"}',
        "model",
    ),
    "bad JSON": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        {},
        b'{"model": "m", "messages": [',
        None,
    ),
    "no JSON object": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_type", model=None),
        {},
        b"[1, 2]",
        None,
    ),
    "empty body": (Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None), {}, b"", None),
    "nested too deeply": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        {},
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        None,
    ),
    "not UTF-8": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_json", model=None),
        {},
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        None,
    ),
    "wrong type": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_type", model=None),
        {},
        b'{"model":"m","messages":[{"role":7,"content":"x"}],"prompt":"x","n":"two"}',
        "messages[0].role|n",
    ),
    "missing field": (
        Must(Outcome.CLIENT_ERROR, 400, "missing_required_parameter", model=None),
        {},
        b'{"model":"m"}',
        "messages|prompt",
    ),
    "value out of range": (
        Must(Outcome.CLIENT_ERROR, 400, "invalid_value", model=None),
        {},
        b'{"model":"m","max_tokens":0,"messages":[{"role":"user"}],"prompt":"x"}',
        "max_tokens",
    ),
    "too large": (
        Must(Outcome.CLIENT_ERROR, 413, "request_too_large", model=None),
        {},
        b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 1_100_000),
        None,
    ),
    "wrong media type": (
        Must(Outcome.CLIENT_ERROR, 415, "unsupported_media_type", model=None),
        {"content-type": "multipart/form-data; boundary=x"},
        None,
        None,
    ),
    "compressed": (
        Must(Outcome.CLIENT_ERROR, 415, "unsupported_media_type", model=None),
        {"content-encoding": "compress"},
        None,
        None,
    ),
}


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize("name", list(REFUSALS))
async def test_refused(gateway: Harness, name: str, surface: str) -> None:
    """A refused request is one record without attempts, tokens or cost, and an error that says
    what to mend; nothing goes upstream."""
    must, changed, body, param = REFUSALS[name]
    async with Upstream(whole({})) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        headers: dict[str, str | None] = {
            "content-type": "application/json",
            "x-client-request-id": "mine-1",
            **gateway.auth,
            **changed,
        }
        answer = await gateway.client.post(
            PATHS[surface],
            content=body_of(surface, stream=False) if body is None else body,
            headers={key: value for key, value in headers.items() if value is not None},
        )
        error = check_error(answer, must)
        assert error["param"] in (param.split("|") if param else [None])
        record = await books.one(must, answer.headers["x-request-id"])
        assert record.client_request_id == "mine-1"
        assert not upstream.received


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_refused_body_is_read_so_that_the_answer_arrives(
    gateway: Harness, declared: bool
) -> None:
    """A client that sends far more than sockets hold still gets its 413: a connection closed on
    unread bytes would be reset under the answer."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1_000_000

    books = Books(gateway)
    length = {"content-length": "20000000"} if declared else {}
    answer = await gateway.client.post(
        PATHS["chat"], content=pieces(), headers=gateway.auth | length
    )
    must = Must(Outcome.CLIENT_ERROR, 413, "request_too_large", model=None)
    check_error(answer, must)
    assert answer.headers["connection"] == "close"
    await books.one(must, answer.headers["x-request-id"])


@both
async def test_model_outside_the_keys_list(gateway: Harness, stream: bool) -> None:
    """A model that exists but is not on the key's list looks like one that does not."""
    async with Upstream(whole({})) as upstream:
        tables = backend("b", upstream.base_url) + route("m", "b") + route("other", "b")
        gateway.configure(tables)
        tenants = gateway.service.tenants
        issued = await tenants.create_key(
            gateway.tenant_id, name="narrow", model_allow=["m"], actor="test"
        )
        books = Books(gateway)
        must = Must(Outcome.CLIENT_ERROR, 404, "model_not_found", model="other", stream=stream)
        answer = await ask(
            gateway,
            "chat",
            body_of("chat", stream=stream, model="other"),
            authorization=f"Bearer {issued.secret.reveal()}",
        )
        assert check_error(answer, must)["param"] == "model"
        record = await books.one(must)
        assert record.key_id == issued.key.id
        assert not upstream.received


# --- upstream fails before content ------------------------------------------------------------

CONTEXT = {
    "error": {
        "message": "maximum context length is 8 tokens",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}


def failing(status: int, body: Any, **headers: str) -> tuple[Step, ...]:
    """An answer with an error status."""
    return (
        head(status, "application/json", **headers),
        piece(json.dumps(body).encode()),
        END,
    )


ERROR = {"error": {"message": "secret-upstream-text", "type": "server_error", "code": None}}

# steps of the upstream; status and code for the client; outcome of request and attempt; code and
# status of the attempt
BEFORE: dict[str, tuple[tuple[Step, ...], int, str, Outcome, Outcome, str, int | None]] = {
    "auth": (
        failing(401, ERROR),
        502,
        "upstream_auth",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_auth",
        401,
    ),
    "rate limit": (
        failing(429, ERROR, retry_after="7"),
        429,
        "upstream_rate_limited",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_rate_limited",
        429,
    ),
    "500": (
        failing(500, ERROR),
        502,
        "upstream_failed",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_failed",
        500,
    ),
    "context": (
        failing(400, CONTEXT),
        400,
        "context_length_exceeded",
        Outcome.CLIENT_ERROR,
        Outcome.CLIENT_ERROR,
        "upstream_refused",
        400,
    ),
    "model unknown there": (
        failing(404, ERROR),
        502,
        "upstream_refused",
        Outcome.UPSTREAM_ERROR,
        Outcome.CLIENT_ERROR,
        "upstream_refused",
        404,
    ),
    "stall": (
        (STALL,),
        504,
        "upstream_timeout",
        Outcome.TIMEOUT,
        Outcome.TIMEOUT,
        "upstream_timeout",
        None,
    ),
    "closes at once": (
        (CUT,),
        502,
        "upstream_failed",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_failed",
        None,
    ),
    "cut before content": (
        (head(200, "application/json"), piece(b'{"choices": ['), CUT),
        502,
        "upstream_truncated",
        Outcome.UPSTREAM_ERROR,
        Outcome.TRUNCATED,
        "upstream_truncated",
        None,
    ),
    "garbage": (
        whole(b"<garbage>", 200, "text/plain"),
        502,
        "upstream_truncated|upstream_protocol",
        Outcome.UPSTREAM_ERROR,
        Outcome.TRUNCATED,
        "upstream_truncated|upstream_protocol",
        None,
    ),
    "error under 200": (
        whole(ERROR),
        502,
        "upstream_failed",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_failed",
        None,
    ),
    "html": (
        whole(b"<html>", 200, "text/html"),
        502,
        "upstream_protocol",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_protocol",
        None,
    ),
    "redirect": (
        (head(302, "text/plain", location="http://127.0.0.1:1/"), END),
        502,
        "upstream_protocol",
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ERROR,
        "upstream_protocol",
        302,
    ),
}


@everything
@pytest.mark.parametrize("name", list(BEFORE))
async def test_fails_before_content(
    gateway: Harness, name: str, surface: str, stream: bool
) -> None:
    """An upstream that fails before any content is an error status, never a begun stream, and
    costs nothing."""
    steps, status, code, outcome, tried, tried_code, http_status = BEFORE[name]
    if "|" in code:  # whole: no JSON. Streamed: nothing that is an event
        tried = Outcome.TRUNCATED if stream else Outcome.UPSTREAM_ERROR
        code = tried_code = code.split("|")[0 if stream else 1]
    if name == "cut before content" and stream:
        code = tried_code = "upstream_protocol"  # JSON, though a stream was asked for
        tried = Outcome.UPSTREAM_ERROR
    async with Upstream(steps) as upstream:
        gateway.configure(backend("b", upstream.base_url, more=QUICK) + route("m", "b"))
        books = Books(gateway)
        answer = await ask(gateway, surface, body_of(surface, stream=stream))
        must = Must(
            outcome,
            status,
            code,
            (Tried("b", tried, tried_code, status=http_status),),
            stream=stream,
        )
        error = check_error(answer, must)
        assert "secret-upstream-text" not in answer.text
        assert str(upstream.port) not in answer.text
        if name == "rate limit":
            assert answer.headers["retry-after"] == "7"
            assert answer.headers["retry-after-ms"] == "7000"
        if name == "context":
            assert error == CONTEXT["error"]
        await books.one(must, answer.headers["x-request-id"])
        assert len(upstream.received) == 1


@everything
async def test_connection_refused(gateway: Harness, surface: str, stream: bool) -> None:
    """An upstream that is not there is a 502 that may be retried."""
    async with Upstream(()) as gone:
        tables = backend("b", gone.base_url, more=QUICK) + route("m", "b")
    gateway.configure(tables)
    books = Books(gateway)
    answer = await ask(gateway, surface, body_of(surface, stream=stream))
    must = Must(
        Outcome.UPSTREAM_ERROR,
        502,
        "upstream_unavailable",
        (Tried("b", Outcome.UPSTREAM_ERROR, "upstream_unavailable"),),
        stream=stream,
    )
    check_error(answer, must)
    await books.one(must, answer.headers["x-request-id"])


# --- upstream fails after content -------------------------------------------------------------

AFTER = {
    "stall": (Outcome.TIMEOUT, "upstream_timeout"),
    "cut": (Outcome.TRUNCATED, "upstream_truncated"),
    "garbage": (Outcome.UPSTREAM_ERROR, "upstream_protocol"),
    "error_event": (Outcome.UPSTREAM_ERROR, "upstream_failed"),
}


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize("fail", list(AFTER))
async def test_stream_breaks(gateway: Harness, fail: Any, surface: str) -> None:
    """A stream that breaks ends with an error event and no [DONE]; what was read is billed."""
    outcome, code = AFTER[fail]
    player = gateway.play(Script(output_tokens=9, fail=fail, fail_after=2))
    tables = backend("b", gateway.scripted_url, more=QUICK) + route("m", "b")
    gateway.configure(tables)
    books = Books(gateway)
    body = body_of(surface, stream=True)
    answer = await ask(gateway, surface, body)
    assert answer.status_code == 200
    check_answer(answer)
    events = events_of(answer.text)
    assert "[DONE]" not in events
    assert error_of(events[-1])["code"] == code
    assert "scripted failure" not in answer.text
    tried = Tried("b", outcome, code, (len(body) // 4, 2), UsageSource.ESTIMATED)
    record = await books.one(Must(outcome, 200, code, (tried,), stream=True))
    assert record.request_id == answer.headers["x-request-id"]
    assert player.books.served == {record.request_id: 2}


async def test_done_without_finish_reason(gateway: Harness) -> None:
    """An upstream that says [DONE] though a choice is open was cut, whatever it says."""
    steps = (head(), *map(piece, GOOD_EVENTS[:2]), piece(event(b"[DONE]")), END)
    async with Upstream(steps) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        body = body_of("chat", stream=True)
        answer = await ask(gateway, "chat", body)
        assert error_of(events_of(answer.text)[-1])["code"] == "upstream_truncated"
        tried = Tried(
            "b",
            Outcome.TRUNCATED,
            "upstream_truncated",
            (len(body) // 4, 1),
            UsageSource.ESTIMATED,
        )
        await books.one(Must(Outcome.TRUNCATED, 200, "upstream_truncated", (tried,), stream=True))


# --- more than one target ---------------------------------------------------------------------

FALLS_BACK: dict[str, tuple[tuple[Step, ...], Tried]] = {
    "500": (
        failing(500, ERROR),
        Tried("b", Outcome.UPSTREAM_ERROR, "upstream_failed", status=500),
    ),
    "429": (
        failing(429, ERROR),
        Tried("b", Outcome.UPSTREAM_ERROR, "upstream_rate_limited", status=429),
    ),
    "401": (
        failing(401, ERROR),
        Tried("b", Outcome.UPSTREAM_ERROR, "upstream_auth", status=401),
    ),
    "404": (
        failing(404, ERROR),
        Tried("b", Outcome.CLIENT_ERROR, "upstream_refused", status=404),
    ),
    "stall": ((STALL,), Tried("b", Outcome.TIMEOUT, "upstream_timeout")),
    "reset": ((CUT,), Tried("b", Outcome.UPSTREAM_ERROR, "upstream_failed")),
}


@both
@pytest.mark.parametrize("name", list(FALLS_BACK))
async def test_falls_back(gateway: Harness, name: str, stream: bool) -> None:
    """When the first target fails before content the next one answers: two attempts, and each is
    priced as the backend and model that it was."""
    steps, first = FALLS_BACK[name]
    gateway.play(Script(output_tokens=3))
    async with Upstream(steps) as broken:
        gateway.configure(
            backend("b", broken.base_url, more=QUICK)
            + backend("c", gateway.scripted_url, price='"3", output = "5"')
            + route("m", "b=small", "c=large")
        )
        books = Books(gateway)
        answer = await ask(gateway, "chat", body_of("chat", stream=stream))
        assert answer.status_code == 200
        assert answer.headers["x-meterline-attempts"] == "2"
        assert answer.headers["x-meterline-backend"] == "c"
        assert answer.headers["x-meterline-model"] == "large"
        second = Tried(
            "c", Outcome.OK, None, (4, 3), UsageSource.REPORTED, price=(3, 5), status=200
        )
        record = await books.one(Must(Outcome.OK, 200, None, (first, second), stream=stream))
        assert record.cost == Decimal("0.000027")
        assert [attempt.model for attempt in record.attempts] == ["small", "large"]
        assert [attempt.reason for attempt in record.attempts] == ["primary", "fallback"]
        assert json.loads(broken.received[0].body)["model"] == "small"


@both
async def test_refused_requests_do_not_fall_back(gateway: Harness, stream: bool) -> None:
    """What is wrong with the request is wrong everywhere: no second target is asked."""
    async with Upstream(failing(400, CONTEXT)) as first, Upstream(()) as second:
        gateway.configure(
            backend("b", first.base_url) + backend("c", second.base_url) + route("m", "b", "c")
        )
        books = Books(gateway)
        answer = await ask(gateway, "chat", body_of("chat", stream=stream))
        must = Must(
            Outcome.CLIENT_ERROR,
            400,
            "context_length_exceeded",
            (Tried("b", Outcome.CLIENT_ERROR, "upstream_refused", status=400),),
            stream=stream,
        )
        check_error(answer, must)
        await books.one(must)
        assert not second.received


@both
async def test_all_targets_down(gateway: Harness, stream: bool) -> None:
    """When every target fails the client hears of the last one, with the shortest wait of all."""
    async with (
        Upstream(failing(429, ERROR, retry_after_ms="1500")) as first,
        Upstream(failing(429, ERROR, retry_after="30")) as second,
    ):
        gateway.configure(
            backend("b", first.base_url) + backend("c", second.base_url) + route("m", "b", "c")
        )
        books = Books(gateway)
        answer = await ask(gateway, "chat", body_of("chat", stream=stream))
        limited = (Outcome.UPSTREAM_ERROR, "upstream_rate_limited")
        must = Must(
            Outcome.UPSTREAM_ERROR,
            429,
            "upstream_rate_limited",
            (Tried("b", *limited, status=429), Tried("c", *limited, status=429)),
            stream=stream,
        )
        check_error(answer, must)
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["retry-after-ms"] == "1500"
        await books.one(must)


# --- the client leaves ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asking(gateway: Harness, body: bytes) -> AsyncIterator[httpx.Response]:
    """A request on a connection of its own, which is cut when the scope is left."""
    async with (
        httpx.AsyncClient(base_url=gateway.server.base_url, timeout=20) as client,
        client.stream(
            "POST",
            PATHS["chat"],
            content=body,
            headers={"content-type": "application/json", **gateway.auth},
        ) as answer,
    ):
        yield answer


async def until(condition: Any) -> None:
    """Wait until it is true."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@both
async def test_client_leaves_before_the_first_token(gateway: Harness, stream: bool) -> None:
    """A client that leaves while the upstream thinks: it is cut off, and nothing is billed."""
    async with Upstream((STALL,)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)

        async def leave() -> None:
            async with asking(gateway, body_of("chat", stream=stream)):
                pass

        client = asyncio.create_task(leave())
        await until(lambda: upstream.received)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await until(lambda: upstream.gone_at is not None)
        gone = (Outcome.CLIENT_DISCONNECT, "client_disconnect")
        must = Must(gone[0], 499, gone[1], (Tried("b", *gone),), stream=stream)
        await books.one(must)


async def test_client_leaves_mid_stream(gateway: Harness) -> None:
    """A client that leaves after two tokens pays for two tokens."""
    async with scripted(Script(output_tokens=9, fail="stall", fail_after=2)) as (upstream, app):
        gateway.configure(backend("b", f"{upstream.base_url}/v1") + route("m", "b"))
        books = Books(gateway)
        body = body_of("chat", stream=True)
        async with asking(gateway, body) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count("\n\n") == 3:  # the role and two tokens
                    break
        gone = (Outcome.CLIENT_DISCONNECT, "client_disconnect")
        tried = Tried("b", *gone, (len(body) // 4, 2), UsageSource.ESTIMATED)
        record = await books.one(Must(gone[0], 499, gone[1], (tried,), stream=True))
        assert app.player.books.served == {record.request_id: 2}
        assert record.chunks == 2
        await until(lambda: upstream.connections == 0)


async def test_client_leaves_after_the_last_content(gateway: Harness) -> None:
    """A client that leaves between the finish reason and the end pays for all that was sent."""
    steps = (head(), *map(piece, GOOD_EVENTS[:4]), STALL)
    async with Upstream(steps) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        body = body_of("chat", stream=True)
        async with asking(gateway, body) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if '"finish_reason": "stop"' in seen:
                    break
        gone = (Outcome.CLIENT_DISCONNECT, "client_disconnect")
        tried = Tried("b", *gone, (len(body) // 4, 2), UsageSource.ESTIMATED)
        await books.one(Must(gone[0], 499, gone[1], (tried,), stream=True))
        await until(lambda: upstream.gone_at is not None)


async def test_client_leaves_while_sending(gateway: Harness) -> None:
    """A client that leaves before its body is complete is a disconnect, and nothing was asked."""
    async with Upstream(()) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"content-type: application/json\r\nauthorization: Bearer "
            + gateway.key.encode()
            + b'\r\n\r\n{"model":'
        )
        await writer.drain()
        await until(lambda: gateway.server.connections > 0)
        await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        await books.one(Must(Outcome.CLIENT_DISCONNECT, 499, "client_disconnect", model=None))
        assert not upstream.received


# --- the gateway stops, or has a defect -------------------------------------------------------


async def test_shutdown_before_the_first_token(gateway: Harness) -> None:
    """When the grace ends before an answer began, the client gets a 503 that says to retry."""
    async with Upstream((STALL,)) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        for stream in (False, True):
            upstream.received.clear()
            books = Books(gateway)
            async with Server(gateway.service.app, grace_s=0) as front:
                body = body_of("chat", stream=stream)
                asked = asyncio.create_task(
                    httpx.AsyncClient(base_url=front.base_url).post(
                        PATHS["chat"], content=body, headers=gateway.auth
                    )
                )
                await until(lambda: upstream.received)
                await front.stop()
                answer = await asked
            must = Must(
                Outcome.SHED,
                503,
                "shutting_down",
                (Tried("b", Outcome.SHED, "shutting_down"),),
                stream=stream,
            )
            check_error(answer, must)
            await books.one(must, answer.headers["x-request-id"])


async def test_shutdown_mid_stream(gateway: Harness) -> None:
    """When the grace ends inside a stream it ends with an error event, and is billed so far."""
    player = gateway.play(Script(output_tokens=9, fail="stall", fail_after=2))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    body = body_of("chat", stream=True)
    async with (
        Server(gateway.service.app, grace_s=0) as front,
        httpx.AsyncClient(base_url=front.base_url) as client,
        client.stream("POST", PATHS["chat"], content=body, headers=gateway.auth) as answer,
    ):
        seen, stopping = "", None
        async for text in answer.aiter_text():
            seen += text
            if stopping is None and seen.count("\n\n") == 3:
                stopping = asyncio.create_task(front.stop())
        assert stopping is not None
        await stopping
    events = events_of(seen)
    assert error_of(events[-1])["code"] == "shutting_down"
    assert "[DONE]" not in events
    cut = (Outcome.TRUNCATED, "shutting_down")
    tried = Tried("b", *cut, (len(body) // 4, 2), UsageSource.ESTIMATED)
    record = await books.one(Must(cut[0], 200, cut[1], (tried,), stream=True))
    assert player.books.served == {record.request_id: 2}


@both
async def test_refused_while_draining(gateway: Harness, stream: bool) -> None:
    """A request that comes while the gateway drains is told to go elsewhere."""
    async with Upstream(()) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        books = Books(gateway)
        gateway.service.gateway.draining = True
        try:
            assert (await gateway.client.get("/readyz")).status_code == 503
            answer = await ask(gateway, "chat", body_of("chat", stream=stream))
        finally:
            gateway.service.gateway.draining = False
        must = Must(Outcome.SHED, 503, "shutting_down", model=None)
        check_error(answer, must)
        await books.one(must)
        assert not upstream.received


@both
async def test_log_refuses_intents(gateway: Harness, stream: bool) -> None:
    """When the log cannot take an intent nothing is sent upstream, and the request is recorded
    once the disk has room."""
    async with Upstream(()) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        wal = gateway.service.gateway.ledger.wal
        real, full = wal.disk, FillingDisk()
        full.may_write = full.may_allocate = False
        books = Books(gateway)
        wal.disk = full
        try:
            answer = await ask(gateway, "chat", body_of("chat", stream=stream))
            assert (await gateway.client.get("/readyz")).status_code == 503
        finally:
            wal.disk = real
        must = Must(Outcome.INTERNAL_ERROR, 503, "ledger_unavailable", stream=stream)
        check_error(answer, must)
        await until(lambda: wal.waiting == 0)
        await books.one(must, answer.headers["x-request-id"])
        assert not upstream.received
        assert (await gateway.client.get("/readyz")).status_code == 200


class Defective:
    """A backend with a bug: it raises what no backend may raise, at once or inside the stream."""

    name = "b"
    provider = "scripted"

    def __init__(self, *events: Event) -> None:
        self._events = events

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        for given in self._events:
            yield given
        raise RuntimeError("planted-canary-defect")

    async def is_ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        return None


@both
async def test_defect(gateway: Harness, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A defect of ours is a 500 without its text, and a settled record."""
    async with Upstream(()) as upstream:
        gateway.configure(backend("b", upstream.base_url) + route("m", "b"))
        upstreams = gateway.service.gateway.runtimes.current.upstreams
        assert isinstance(upstreams, dict)
        upstreams["b"] = GatewayUpstream(Defective(), Timeouts())
        books = Books(gateway)
        answer = await ask(gateway, "chat", body_of("chat", stream=stream))
        broke = (Outcome.INTERNAL_ERROR, "internal_error")
        must = Must(broke[0], 500, broke[1], (Tried("b", *broke),), stream=stream)
        check_answer(answer)
        assert answer.status_code == 500
        assert error_of(answer.text)["code"] == "internal_error"
        assert "planted" not in answer.text
        assert answer.headers["x-request-id"] in [
            getattr(line, "request_id", None) for line in caplog.records
        ]
        await books.one(must, answer.headers["x-request-id"])


async def test_task_cancelled(gateway: Harness) -> None:
    """A cancelled request task, without a server behind it, settles before the cancellation goes
    on, at whatever point it comes."""
    gateway.play(Script(output_tokens=9, fail="stall", fail_after=2))
    gateway.configure(backend("b", gateway.scripted_url) + route("m", "b"))
    books = Books(gateway)
    body = body_of("chat", stream=True)
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": PATHS["chat"],
        "raw_path": PATHS["chat"].encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {gateway.key}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    task = asyncio.create_task(gateway.service.app(scope, receive, send))  # type: ignore[arg-type]  # plain dicts
    await until(lambda: len(sent) == 4)  # the head, the role, two tokens
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    cut = (Outcome.TRUNCATED, "shutting_down")
    tried = Tried("b", *cut, (len(body) // 4, 2), UsageSource.ESTIMATED)
    await books.one(Must(cut[0], 200, cut[1], (tried,), stream=True))
    assert sent[-1]["more_body"] is False
    assert b'"shutting_down"' in sent[-1]["body"]


async def test_every_request_is_in_the_books_once(gateway: Harness) -> None:
    """After all of the above: as many rows as requests, and every law holds."""
    await gateway.service.worker.flush()
    ids = [record.request_id for record in gateway.settled]
    assert len(set(ids)) == len(ids)
    assert len(ids) == gateway.service.gateway.ledger.opened > 50
    assert not await gateway.broken_laws()


async def test_data_folder(gateway: Harness) -> None:
    """Nothing of a request stays behind but rows: no slot is in use, no intent open."""
    await gateway.service.worker.flush()
    folder = Path(gateway.service.gateway.ledger.wal.folder)
    assert gateway.service.gateway.ledger.wal.outstanding == 0
    assert len(list(folder.glob("progress-*.slots"))) == 1
