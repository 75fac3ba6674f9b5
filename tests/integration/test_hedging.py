"""A slow first attempt gets a rival: before content only, within a share of the tokens, and whoever
loses is cancelled and booked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from backends.settings import Script
from gateway.config import HedgeSettings
from gateway.hedging import Hedge
from telemetry.record import Outcome, RequestRecord
from telemetry.usage import UsageSource
from tests.fakes.gateway import Harness, backend, events_of, running, scripted
from tests.fakes.upstream import CUT, GOOD, STALL, Pause, Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module."""
    prices = backend("slow", "http://127.0.0.1:1/v1") + backend("fast", "http://127.0.0.1:1/v1")
    async with running(tmp_path_factory.mktemp("gateway"), tables=prices) as harness:
        yield harness
        assert not await harness.broken_laws()


def tables(slow: str, fast: str, model: str, hedge: str = "share = 0.5, least_s = 0.15") -> str:
    """A route that tries `slow` first and may hedge with `fast`."""
    quick = "timeouts = { first_token_s = 5 }"
    return (
        backend("slow", slow, more=quick)
        + backend("fast", fast)
        + f'[[routes]]\nmodel = "{model}"\nhedge = {{ {hedge} }}\n'
        + 'targets = [{ backend = "slow" }, { backend = "fast", weight = 0 }]\n'
    )


async def ask(gateway: Harness, model: str, *, stream: bool = True, **more: Any) -> httpx.Response:
    """One request, read to its end."""
    messages = [{"role": "user", "content": "hi " * 40}]
    body = {"model": model, "messages": messages, "stream": stream, **more}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=gateway.auth)


def warmed(gateway: Harness, model: str, *, tokens: int = 100_000) -> Hedge:
    """The route's hedge, which has seen enough quick streams and tokens."""
    hedges = gateway.service.gateway.runtimes.hedges
    hedge = hedges.of(model, HedgeSettings(share=0.5, least_s=0.15))
    hedge.asked(tokens)
    for _ in range(100):
        hedge.observe(0.01)
    return hedge


async def last(gateway: Harness) -> RequestRecord:
    """The newest record."""
    return (await gateway.next_settled(len(gateway.settled)))[-1]


def counted(gateway: Harness, result: str) -> bool:
    """Whether the metric counts hedges that ended so."""
    text = gateway.service.metrics.render(openmetrics=False).decode()
    lines = [one for one in text.splitlines() if f'hedges_total{{result="{result}"' in one]
    return any(not one.endswith(" 0.0") for one in lines)


async def test_the_rival_wins(gateway: Harness) -> None:
    """The client gets the rival's answer alone; the slow one is cancelled and pays its input."""
    gateway.play(Script(output_tokens=3))
    async with Upstream((STALL,)) as slow:
        gateway.configure(tables(slow.base_url, gateway.scripted_url, "m1"))
        warmed(gateway, "m1")
        answer = await ask(gateway, "m1")
        assert answer.status_code == 200
        assert answer.headers["x-meterline-backend"] == "fast"
        assert events_of(answer.text)[-1] == "[DONE]"
        async with asyncio.timeout(5):
            while slow.gone_at is None:
                await asyncio.sleep(0.005)
    record = await last(gateway)
    assert record.outcome is Outcome.OK
    lost, won = record.attempts
    assert (lost.backend, lost.reason, lost.error_code) == ("slow", "primary", "hedge_lost")
    assert (won.backend, won.reason, won.outcome) == ("fast", "hedge", Outcome.OK)
    assert lost.usage is not None and lost.usage.total_tokens == record.input_estimate > 0
    assert lost.usage_source is UsageSource.ESTIMATED
    assert lost.charges and lost.charges[0].amount
    assert counted(gateway, "won")
    rows = await gateway.rows(record.request_id)
    assert len(rows.events) == 2


async def test_the_first_one_wins_after_all(gateway: Harness) -> None:
    """The rival is cancelled and booked under `hedge`, and the answer's tokens are the first's."""
    async with (
        Upstream((Pause(0.4), *GOOD)) as slow,
        Upstream((STALL,)) as rival,
    ):
        gateway.configure(tables(slow.base_url, rival.base_url, "m2"))
        warmed(gateway, "m2")
        answer = await ask(gateway, "m2")
        assert answer.headers["x-meterline-backend"] == "slow"
        assert events_of(answer.text)[-1] == "[DONE]"
        assert len(rival.received) == 1
    record = await last(gateway)
    won, lost = record.attempts
    assert (won.outcome, won.first_token_ns is not None) == (Outcome.OK, True)
    assert (lost.reason, lost.error_code, lost.first_token_ns) == ("hedge", "hedge_lost", None)
    assert lost.usage is not None and lost.usage.in_uncached_text == record.input_estimate
    assert counted(gateway, "lost")


async def test_both_fail(gateway: Harness) -> None:
    """Each is asked once, and the client hears of the first one's failure."""
    async with (
        Upstream((Pause(0.4), CUT)) as slow,
        Upstream((CUT,)) as rival,
    ):
        gateway.configure(tables(slow.base_url, rival.base_url, "m3"))
        warmed(gateway, "m3")
        answer = await ask(gateway, "m3")
        assert answer.status_code == 502
        assert (len(slow.received), len(rival.received)) == (1, 1)
    record = await last(gateway)
    assert [one.reason for one in record.attempts] == ["primary", "hedge"]
    assert counted(gateway, "failed")


async def test_no_rival_where_none_is_due(gateway: Harness) -> None:
    """Not for whole answers, not without the route's word, not before enough is known, not beyond
    the share, and not for a quick answer."""
    gateway.play(Script(output_tokens=3))
    async with scripted(Script(output_tokens=2, first_token_s=0.3)) as (server, _):
        slow = f"{server.base_url}/v1"
        gateway.configure(tables(slow, gateway.scripted_url, "m4"))
        assert len((await _asked(gateway, "m4")).attempts) == 1  # nothing is known yet
        hedge = warmed(gateway, "m4", tokens=0)
        hedge.settings = HedgeSettings(share=0.01, least_s=0.05)
        gateway.configure(tables(slow, gateway.scripted_url, "m4", "share = 0.01, least_s = 0.05"))
        assert len((await _asked(gateway, "m4")).attempts) == 1  # no budget
        assert counted(gateway, "no_budget")
        gateway.configure(tables(slow, gateway.scripted_url, "m4"))
        warmed(gateway, "m4")
        assert len((await _asked(gateway, "m4", stream=False)).attempts) == 1
        assert len((await _asked(gateway, "m4")).attempts) == 2
    gateway.configure(tables(gateway.scripted_url, gateway.scripted_url, "m4"))
    assert len((await _asked(gateway, "m4")).attempts) == 1


async def _asked(gateway: Harness, model: str, *, stream: bool = True) -> RequestRecord:
    assert (await ask(gateway, model, stream=stream)).status_code == 200
    return await last(gateway)


async def test_a_client_that_leaves_ends_both(gateway: Harness) -> None:
    """Both upstreams are cancelled, and one record is settled."""
    async with Upstream((STALL,)) as slow, Upstream((STALL,)) as rival:
        gateway.configure(tables(slow.base_url, rival.base_url, "m5"))
        warmed(gateway, "m5")
        before = len(gateway.settled)
        task = asyncio.create_task(ask(gateway, "m5"))
        async with asyncio.timeout(5):
            while not rival.received:
                await asyncio.sleep(0.005)
            task.cancel()
            while slow.gone_at is None or rival.gone_at is None:
                await asyncio.sleep(0.005)
        record = (await gateway.next_settled(before + 1))[-1]
    assert record.outcome is Outcome.CLIENT_DISCONNECT
    assert len(record.attempts) == 2
