"""Limits and budgets through the whole gateway: real sockets, real database, real settlement."""

import asyncio
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from litestar.routes import ASGIRoute

from backends.settings import Script
from gateway.allowances import Scope
from gateway.budgets import Allowances
from gateway.limits.arithmetic import BudgetState
from gateway.tenants import KeyChange
from telemetry.record import Outcome
from telemetry.tracing import spans_of
from tests import services
from tests.fakes.gateway import Harness, backend, error_of, events_of, route, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITED = "[limits.key]\nrequests_per_minute = 3\n"
PATHS = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    *("/v1/embeddings", "/embeddings", "/v1/responses", "/responses"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CREDENTIALS = ("authorization", "x-api-key", "api-key")
SCOPES: tuple[Scope, ...] = ("tenant", "key", "user", "route", "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["process", "redis"])
async def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Harness]:
    """One gateway with counters in process, one with counters on Redis; a tenant for each test."""
    with services.redis() as redis:
        store = f'redis = "{redis.url}"' if request.param == "redis" else ""
        prices = backend("b", "http://127.0.0.1:1/v1", price='"1", output = "2"')
        prices += "[limits]\nstore_budget_ms = 1000\n"  # a busy machine may sleep for 50 ms
        folder = tmp_path_factory.mktemp("gateway")
        async with running(folder, store=store, tables=prices) as harness:
            yield harness
            assert harness.service.gateway.limits.open_holds == 0


@pytest_asyncio.fixture(loop_scope="module")
async def tenant(gateway: Harness) -> str:
    """A fresh tenant with a key, and one backend that answers with four tokens."""
    await gateway.issue(f"t{len(gateway.settled)}x{id(object())}")
    configure(gateway)
    gateway.play(Script(output_tokens=4))
    return gateway.tenant_id


def configure(gateway: Harness, more: str = "") -> None:
    gateway.configure(
        backend("b", gateway.scripted_url, price='"1", output = "2"') + route("m", "b") + more
    )


def allowances(gateway: Harness) -> Allowances:
    return Allowances(gateway.service.tenants)


async def obeyed(gateway: Harness) -> None:
    """Until the gateway has heard of what was just set: on a busy machine a query may time out."""
    auth = gateway.service.gateway.auth
    await auth.refresh()
    while auth.is_offline:
        await asyncio.sleep(0.05)
        await auth.refresh()


async def ask(gateway: Harness, path: str = PATHS[0], **more: Any) -> httpx.Response:
    """A request of the test's tenant; `via` names the header that carries the key."""
    via = more.pop("via", "authorization")
    key = f"Bearer {gateway.key}" if via == "authorization" else gateway.key
    match path.removeprefix("/v1").split("/")[1:]:
        case ["completions"]:
            asked: dict[str, Any] = {"prompt": "hi"}
        case ["embeddings" | "responses"]:
            asked = {"input": "hi"}
        case ["messages"]:
            asked = MESSAGES | {"max_tokens": 4}
        case _:
            asked = MESSAGES
    return await gateway.client.post(path, headers={via: key}, json={"model": "m"} | asked | more)


async def budget_of(gateway: Harness, key: str) -> BudgetState:
    found = await gateway.service.gateway.limits.budget(gateway.tenant_id, key)
    assert found is not None
    return found


@pytest.mark.parametrize("scope", SCOPES)
async def test_every_billable_route_passes_the_choke_point(
    gateway: Harness, tenant: str, scope: Scope
) -> None:
    """Every path that generates, by every header that carries a key, counts on every scope: a
    limit of as many requests as there are ways lets each in once, and then none. (A way that the
    backend cannot serve has passed here all the same.)"""
    ways = [(path, via) for path in PATHS for via in CREDENTIALS]
    if scope == "user":
        ways = [way for way in ways if way[0] != PATHS[-1]]  # it names no user
    if gateway.service.gateway.limits.is_shared:
        ways = ways[::5]  # the ways in are those of the other parameter; here it is the counters
    subject = {"key": gateway.key_id, "user": "u1", "route": "m", "model": "m"}.get(scope)
    await allowances(gateway).set_limit(
        tenant, "requests", Decimal(len(ways)), per_s=3600, scope=scope, subject=subject, actor="t"
    )
    await obeyed(gateway)
    for path, via in ways:
        await ask(gateway, path, via=via, **_of_user(path))
    for path, via in ways:
        refused = await ask(gateway, path, via=via, **_of_user(path))
        assert refused.status_code == 429, (path, via)
    if scope == "user":
        assert (await ask(gateway, user="u2")).status_code == 200


def _of_user(path: str) -> dict[str, Any]:
    """How this surface names the end user."""
    return {"metadata": {"user_id": "u1"}} if "messages" in path else {"user": "u1"}


async def test_every_route_that_generates_is_one_of_them(gateway: Harness) -> None:
    """The list above is the app's own: a new route that takes a tenant's key must be added."""
    billable = {
        route_.path
        for route_ in gateway.service.app.routes
        if isinstance(route_, ASGIRoute) and route_.route_handler.opt.get("caller") == "tenant"
    }
    assert billable == set(PATHS)


async def test_a_refusal_says_which_limit_and_when(gateway: Harness, tenant: str) -> None:
    """429, the OpenAI shape, retry hints that SDKs read, and the headers on every answer."""
    configure(gateway, LIMITED)
    for left in (2, 1, 0):
        answer = await ask(gateway)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = await ask(gateway)
    assert refused.status_code == 429
    error = error_of(refused.text)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "3 requests per minute are allowed for this API key" in error["message"]
    assert refused.headers["x-should-retry"] == "true"
    assert 0 < int(refused.headers["retry-after-ms"]) <= 61_000
    assert 0 < int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert gateway.settled[-1].outcome is Outcome.RATE_LIMITED
    assert not gateway.settled[-1].attempts


async def test_a_budget_in_parallel_is_spent_once(gateway: Harness, tenant: str) -> None:
    """Sixty at once on a budget that holds seven: seven pass. Then the truth is less than
    what was held, and exactly the ledger's."""
    first = await ask(gateway, max_tokens=4)  # after it the estimate of input stands still
    assert first.status_code == 200
    await gateway.service.worker.flush()
    await allowances(gateway).set_budget(tenant, Decimal("0.05"), actor="t")
    await obeyed(gateway)
    gateway.play(Script(output_tokens=4, first_token_s=1.5))
    many = await asyncio.gather(*(ask(gateway, max_tokens=3500) for _ in range(60)))
    codes = [answer.status_code for answer in many]
    assert (codes.count(200), codes.count(429)) == (7, 53)
    refused = next(answer for answer in many if answer.status_code == 429)
    error = error_of(refused.text)
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "monthly budget of $0.05 of your account" in error["message"]
    await gateway.service.worker.flush()
    key = "b:tenant::month:UTC"
    state = await budget_of(gateway, key)
    spent = sum((r.cost for r in gateway.settled if r.tenant_id == tenant and r.cost), Decimal(0))
    assert (state.held, state.spent) == (0, int(spent * 10**9))
    await gateway.service.gateway.limits.rebase()
    assert await budget_of(gateway, key) == state


@pytest.mark.parametrize("path", PATHS[:4:2])
async def test_a_long_stream_ends_well_when_no_budget_holds_more(
    gateway: Harness, tenant: str, path: str
) -> None:
    """A stream without max_tokens grows its reservation; when the budget refuses, it ends with
    finish_reason length, its usage and [DONE], and what was generated is settled."""
    # 1024 tokens are held at $2 per million; room for 400 more, and the answer has 3000.
    await allowances(gateway).set_budget(tenant, Decimal("0.0029"), actor="t")
    await obeyed(gateway)
    configure(
        gateway, route(f"long{len(path)}", "b")
    )  # of its own, so that nothing was learned of it
    ended = gateway.service.gateway.limits.counts.streams_ended
    gateway.play(Script(output_tokens=3000, text="word"))
    more = {"model": f"long{len(path)}", "stream": True}
    answer = await ask(gateway, path, **more, stream_options={"include_usage": True})
    assert answer.status_code == 200, answer.text
    *_, last, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    chunk = json.loads(last)
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["meterline"]["ended_by"] == "insufficient_quota"
    record = gateway.settled[-1]
    assert (record.outcome, record.status) == (Outcome.BUDGET_REFUSED, 200)
    assert record.attempts[0].finish_reasons == ("length",)
    served = record.attempts[0].usage
    assert served is not None
    assert json.loads(usage)["usage"]["completion_tokens"] == served.output_tokens
    assert 1280 <= served.output_tokens <= 1450
    assert gateway.service.gateway.limits.counts.streams_ended == ended + 1
    state = await budget_of(gateway, "b:tenant::month:UTC")
    assert record.cost is not None
    assert (state.held, state.spent) == (0, int(record.cost * 10**9))
    assert state.spent <= 2_900_000
    gateway.play(Script(output_tokens=3))
    assert (await ask(gateway, path, **more)).status_code == 429
    assert await gateway.broken_laws() == []


async def test_a_long_response_ends_incomplete_when_no_budget_holds_more(
    gateway: Harness, tenant: str
) -> None:
    """The Responses API says it in its own words: the open item is closed, the response is
    incomplete with its usage, and what was generated is settled."""
    await allowances(gateway).set_budget(tenant, Decimal("0.0029"), actor="t")
    await obeyed(gateway)
    configure(gateway, route("long-response", "b"))  # of its own: nothing was learned of it
    gateway.play(Script(output_tokens=3000, text="word"))
    answer = await ask(gateway, "/v1/responses", model="long-response", stream=True, store=False)
    assert answer.status_code == 200, answer.text
    events = [json.loads(part.partition("data: ")[2]) for part in answer.text.split("\n\n") if part]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-4:]] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == events[-4]["text"]
    record = gateway.settled[-1]
    assert (record.outcome, record.status) == (Outcome.BUDGET_REFUSED, 200)
    served = record.attempts[0].usage
    assert served is not None
    assert response["usage"]["output_tokens"] == served.output_tokens
    state = await budget_of(gateway, "b:tenant::month:UTC")
    assert record.cost is not None
    assert (state.held, state.spent) == (0, int(record.cost * 10**9))
    assert await gateway.broken_laws() == []


async def test_a_stream_that_fits_is_left_alone(gateway: Harness, tenant: str) -> None:
    """Growing holds more than was spent for a while, and gives it back."""
    await allowances(gateway).set_budget(tenant, Decimal("0.01"), actor="t")
    await obeyed(gateway)
    gateway.play(Script(output_tokens=3000, text="word"))
    answer = await ask(gateway, stream=True)
    assert json.loads(events_of(answer.text)[-2])["choices"][0]["finish_reason"] == "stop"
    assert gateway.settled[-1].outcome is Outcome.OK
    state = await budget_of(gateway, "b:tenant::month:UTC")
    assert state.held == 0
    assert state.spent >= 6_000_000


async def test_a_spent_budget_goes_on_with_a_cheaper_model(gateway: Harness, tenant: str) -> None:
    """Mode downgrade: the cheaper route answers and says so in header, record and span; who wants
    no other model, or may not use that one, is refused; its own limits hold too."""
    routes = 'cheaper = "small"\n' + route("small", "b=little")
    configure(gateway, routes)
    made = allowances(gateway)
    await made.set_budget(tenant, Decimal("0.000001"), mode="downgrade", actor="t")
    await made.set_limit(
        tenant, "requests", Decimal(2), per_s=3600, scope="model", subject="little", actor="t"
    )
    await obeyed(gateway)
    before = gateway.service.gateway.limits.counts.downgraded
    answer = await ask(gateway, max_tokens=4)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-meterline-degraded"] == "cheaper-model;budget"
    assert answer.headers["x-meterline-model"] == "little"
    record = gateway.settled[-1]
    assert (record.asked_model, record.degraded) == ("m", "cheaper-model;budget")
    assert record.attempts[0].model == "little"
    assert spans_of(record)[0].attributes["meterline.degraded"] == "cheaper-model;budget"
    (row,) = (await gateway.rows(record.request_id)).requests
    assert json.loads(row.record)["degraded"] == "cheaper-model;budget"
    key = f"Bearer {gateway.key}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    headers = {"authorization": key, "x-meterline-allow-degrade": "false"}
    strict = await gateway.client.post(PATHS[0], headers=headers, json=body)
    assert (strict.status_code, error_of(strict.text)["code"]) == (429, "insufficient_quota")
    assert (await ask(gateway, max_tokens=4)).status_code == 200
    refused = await ask(gateway, max_tokens=4)  # the limit of the model that would answer
    assert (refused.status_code, error_of(refused.text)["code"]) == (429, "rate_limit_exceeded")
    await gateway.service.tenants.change_key(
        gateway.key_id, KeyChange(model_allow=["m"]), actor="t"
    )
    await obeyed(gateway)
    barred = await ask(gateway, max_tokens=4)
    assert (barred.status_code, error_of(barred.text)["code"]) == (429, "insufficient_quota")
    state = await budget_of(gateway, "b:tenant::month:UTC")
    cost = sum((r.cost for r in gateway.settled if r.tenant_id == tenant and r.cost), Decimal(0))
    assert (state.held, state.spent) == (0, int(cost * 10**9))
    assert gateway.service.gateway.limits.counts.downgraded == before + 3


async def test_a_tree_counts_at_every_level_in_one_step(gateway: Harness, tenant: str) -> None:
    """Two teams below one organisation: what the organisation may, both together may; a team's own
    limit holds besides; a request that one level refuses takes from none; what is above is named
    without its amount; and the ledger's word on the organisation is what all below it spent."""
    tenants, made = gateway.service.tenants, allowances(gateway)
    keys = []
    for name in ("a", "b"):
        team = await tenants.create_tenant(name, {}, parent=tenant, actor="t")
        issued = await tenants.create_key(team.id, name="k", actor="t")
        keys.append(issued.secret.reveal())
    await made.set_limit(tenant, "requests", Decimal(5), per_s=3600, actor="t")
    await made.set_limit(team.id, "requests", Decimal(2), per_s=3600, actor="t")
    await made.set_budget(tenant, Decimal(1), actor="t")
    await obeyed(gateway)
    codes = []
    for key in (keys[1],) * 4 + (keys[0],) * 4:
        gateway.key = key
        answer = await ask(gateway, max_tokens=4)
        codes.append(answer.status_code)
    assert codes == [200, 200, 429, 429, 200, 200, 200, 429]
    message = error_of(answer.text)["message"]
    assert "5 requests per hour are allowed for an account above yours" in message
    await gateway.service.worker.flush()
    key = "b:tenant::month:UTC"
    cost = sum((r.cost for r in gateway.settled[-8:] if r.cost), Decimal(0))
    for _ in range(2):
        state = await budget_of(gateway, key)
        assert (state.held, state.spent) == (0, int(cost * 10**9))
        await gateway.service.gateway.limits.rebase()
    await made.set_budget(tenant, Decimal("0.00002"), actor="t")
    await made.set_limit(tenant, "requests", Decimal(50), per_s=3600, actor="t")
    await obeyed(gateway)
    refused = error_of((await ask(gateway, max_tokens=400)).text)
    assert refused["code"] == "insufficient_quota"
    assert "monthly budget of an account above yours" in refused["message"]
    assert "0.00002" not in refused["message"]


async def test_hidden_spend_comes_from_the_ledger(gateway: Harness, tenant: str) -> None:
    """A budget that is set after money was spent in its window begins with what was spent."""
    for _ in range(3):
        await ask(gateway, max_tokens=4)
    await gateway.service.worker.flush()
    cost = sum((r.cost for r in gateway.settled if r.tenant_id == tenant and r.cost), Decimal(0))
    for window, hours in (("month", None), ("rolling", 24), ("lifetime", None)):
        await allowances(gateway).set_budget(
            tenant,
            Decimal(1),
            window=window,
            hours=hours,
            actor="t",  # type: ignore[arg-type]  # one of them
        )
    await obeyed(gateway)
    assert (await ask(gateway, max_tokens=4)).status_code == 200
    one = gateway.settled[-1].cost
    assert one is not None
    for key in ("b:tenant::month:UTC", "b:tenant::rolling24:", "b:tenant::lifetime:"):
        assert (await budget_of(gateway, key)).spent == int((cost + one) * 10**9), key


@pytest.mark.parametrize("mode", ["soft", "throttle"])
async def test_soft_alerts_and_throttle_slows(gateway: Harness, tenant: str, mode: Any) -> None:
    """A spent soft budget refuses nobody and alerts once; a spent throttling one lets six through
    a minute."""
    overruns = gateway.service.gateway.limits.counts.soft_overruns
    await allowances(gateway).set_budget(tenant, Decimal("0.000001"), mode=mode, actor="t")
    await obeyed(gateway)
    codes = [(await ask(gateway, max_tokens=4)).status_code for _ in range(9)]
    assert codes.count(200) == (9 if mode == "soft" else 6)
    alerts = gateway.service.gateway.limits.counts.soft_overruns - overruns
    assert alerts == 1


async def test_whatever_the_exit_nothing_stays_held(gateway: Harness, tenant: str) -> None:
    """Upstream failures, refusals, hang-ups, wrong bodies: all places are free afterwards."""
    # A backend of its own: its circuits stay open for a while, and other tests need theirs.
    gateway.configure(backend("f", gateway.scripted_url) + route("m", "f"))
    await allowances(gateway).set_limit(tenant, "concurrency", Decimal(2), per_s=None, actor="t")
    await obeyed(gateway)
    for script in (
        Script(fail="500"),
        Script(fail="refuse"),
        Script(fail="cut", output_tokens=9),
        Script(fail="429"),
        Script(first_token_s=5),
    ):
        gateway.play(script)
        for stream in (False, True):
            try:
                async with asyncio.timeout(0.2 if script.first_token_s else 5):
                    await ask(gateway, stream=stream)
            except TimeoutError:
                pass
    assert (await ask(gateway, model="nobody")).status_code == 404
    await gateway.next_settled(len(gateway.settled))
    # Another backend: the gateway now leaves the one that failed alone for a while.
    gateway.configure(backend("c", gateway.scripted_url) + route("m", "c"))
    gateway.play(Script(output_tokens=4, first_token_s=0.4))
    answers = await asyncio.gather(*(ask(gateway) for _ in range(5)))
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429]
    codes = {error_of(a.text)["code"] for a in answers if a.status_code == 429}
    assert codes == {"rate_limit_exceeded"}


async def test_zero_means_none_and_absent_means_no_limit(gateway: Harness, tenant: str) -> None:
    """A limit of 0 refuses at once, and not to be retried; removing it allows all again."""
    made = await allowances(gateway).set_limit(tenant, "tokens", Decimal(0), per_s=60, actor="t")
    await obeyed(gateway)
    refused = await ask(gateway)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    await allowances(gateway).remove_limit(made.id, actor="t")
    await obeyed(gateway)
    answer = await ask(gateway)
    assert answer.status_code == 200, answer.text
    assert "x-ratelimit-limit-tokens" not in answer.headers


async def test_a_request_larger_than_its_limit_is_told_so(gateway: Harness, tenant: str) -> None:
    """Waiting would not help: x-should-retry is false, and the message says what to lower."""
    await allowances(gateway).set_limit(tenant, "tokens", Decimal(500), per_s=60, actor="t")
    await obeyed(gateway)
    refused = await ask(gateway, max_tokens=1000)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert "lower max_tokens" in error_of(refused.text)["message"]
    assert (await ask(gateway)).status_code == 200  # without max_tokens the estimate is cut to fit


async def test_readyz_says_how_limits_are_kept(gateway: Harness) -> None:
    """ok, while the counters answer."""
    answer = await gateway.client.get("/readyz")
    assert json.loads(answer.text)["limits"] == "ok"
    scrape = gateway.service.metrics.render(openmetrics=False).decode()
    assert "meterline_limits_degraded 0.0" in scrape


async def test_an_outage_of_redis_is_bounded_and_heals(tmp_path: Path) -> None:
    """With Redis killed, the replica spends its slice and says so; strict limits refuse; when it is
    back, emptied, budgets are what the ledger says."""
    with services.redis() as redis:
        prices = backend("b", "http://127.0.0.1:1/v1", price='"1", output = "2"')
        async with running(tmp_path, store=f'redis = "{redis.url}"', tables=prices) as gateway:
            configure(gateway)
            gateway.play(Script(output_tokens=4))
            limits = gateway.service.gateway.limits
            made = allowances(gateway)
            await made.set_budget(gateway.tenant_id, Decimal(1), actor="t")
            await made.set_limit(gateway.tenant_id, "requests", Decimal(20), per_s=3600, actor="t")
            await obeyed(gateway)
            assert (await ask(gateway)).status_code == 200
            limits.store.replicas = 1  # as after three heartbeats
            redis.kill()
            codes = [await ask(gateway) for _ in range(15)]
            assert [a.status_code for a in codes].count(200) == 10  # half of 20
            assert {a.headers["x-meterline-limits"] for a in codes} == {"degraded"}
            assert limits.mode != "ok"
            await made.set_limit(
                gateway.tenant_id, "tokens", Decimal(10**6), per_s=60, strict=True, actor="t"
            )
            await obeyed(gateway)
            refused = await ask(gateway)
            assert refused.status_code == 503
            assert error_of(refused.text)["code"] == "limits_unavailable"
            redis.start()
            async with asyncio.timeout(10):
                while limits.mode != "ok":
                    await asyncio.sleep(0.02)
            await gateway.service.worker.flush()
            assert (await ask(gateway)).status_code == 200
            await gateway.service.worker.flush()
            await limits.rebase()
            state = await budget_of(gateway, "b:tenant::month:UTC")
            cost = sum((r.cost for r in gateway.settled if r.cost), Decimal(0))
            assert (state.held, state.spent) == (0, int(cost * 10**9))
