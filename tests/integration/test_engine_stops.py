"""A client that leaves is billed to the token: the gateway asks the engine to stop, and the engine
says what it computed. One real gateway with one real engine child, and a real OTLP receiver."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from sqlalchemy import select
from typing_extensions import override

from backends.base import Cancellable
from backends.registry import build
from backends.settings import BackendSettings
from gateway.app import Service, open_service
from gateway.config import load
from telemetry.database import open_engine
from telemetry.tables import ChargeLineRow, RequestRow, UsageEventRow
from tests import services
from tests.fakes.gguf import tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

LONG: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 7_000,
    "ignore_eos": True,
}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RATE_PER_HOUR = Decimal("36")  # 0.01 a second


class _Quiet(uvicorn.Server):
    @override
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Running:
    """The gateway, its engine, and what came of each."""

    def __init__(self, service: Service, base_url: str, key: str, database_url: str) -> None:
        self.service = service
        self.base_url = base_url
        self.headers = {"authorization": f"Bearer {key}"}
        self.spans: list[tuple[str, Span]] = []
        self._database = open_engine(database_url)
        path = str(service.engines["local"].process.socket_path)
        self.engine = httpx.AsyncClient(
            base_url="http://engine", transport=httpx.AsyncHTTPTransport(uds=path), timeout=20
        )

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.base_url, headers=self.headers, timeout=30)

    async def metric(self, series: str) -> float:
        """The sum of the engine's samples that begin with this text."""
        text = (await self.engine.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(series)]
        assert lines, series
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def until(self, series: str, least: float) -> None:
        async with asyncio.timeout(30):
            while await self.metric(series) < least:
                await asyncio.sleep(0.02)

    async def quiet(self) -> None:
        """Nothing is open in either process."""
        async with asyncio.timeout(30):
            while (
                self.service.gateway.ledger.in_flight
                or await self.metric(RUNNING) + await self.metric(WAITING) > 0
            ):
                await asyncio.sleep(0.02)

    async def booked(self) -> tuple[list[Any], list[Any], list[Any]]:
        """All requests, usage events and charge lines, oldest first."""
        await self.service.worker.flush()
        async with self._database.connect() as db:
            requests = await db.execute(select(RequestRow.__table__).order_by("opened_at"))
            events = await db.execute(select(UsageEventRow.__table__).order_by("occurred_at"))
            lines = await db.execute(select(ChargeLineRow.__table__))
            return list(requests), list(events), list(lines)

    async def aclose(self) -> None:
        await self.engine.aclose()
        await self._database.dispose()


RUNNING = "meterline_engine_running_requests"
WAITING = "meterline_engine_waiting_requests"
DECODED = 'meterline_engine_tokens_total{model="tiny",phase="decode"}'
PREFILLED = 'meterline_engine_tokens_total{model="tiny",phase="prefill"}'
CHARGED = "meterline_engine_charged_seconds_total"
KV_USAGE = "meterline_engine_kv_cache_usage_ratio"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Up once for all tests here: their order does not matter, each looks at its own request."""
    folder = tmp_path_factory.mktemp("stops")
    model = tiny_llama(folder / "tiny.gguf", context=8_000)
    port = services.free_port()
    (folder / "meterline.toml").write_text(
        f"""
        [server]
        admin_key = "env:ADMIN_KEY"
        [store]
        data_dir = "{folder}/data"
        [telemetry]
        otlp_endpoint = "http://127.0.0.1:{port}"
        [[engines]]
        name = "local"
        model = "{model}"
        max_batch_size = 1
        gpu = {{ rate_per_hour = "{RATE_PER_HOUR}" }}
        [[routes]]
        model = "tiny"
        targets = [{{ backend = "local", model = "tiny" }}]
        """
    )
    config = load(folder / "meterline.toml")
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port, listen_on_all_interfaces=False)
    listener = socket.create_server(("127.0.0.1", 0))
    async with (
        OtelTapHttpProtobufReceiver(settings) as tap,
        open_service(config, environment={"ADMIN_KEY": "admin-0123456789abcdef"}) as service,
    ):
        assert await service.engines["local"].process.wait_ready(60)
        tenant = await service.tenants.create_tenant("acme", {}, actor="test")
        issued = await service.tenants.create_key(tenant.id, name="k", actor="test")
        server = _Quiet(
            uvicorn.Config(service.app, http="httptools", lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        made = Running(
            service,
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            issued.secret.reveal(),
            config.database_url,
        )

        async def collect() -> None:
            async for span in tap.stream_traces():
                made.spans.append((span.name, span))

        collecting = asyncio.create_task(collect())
        try:
            yield made
        finally:
            await made.aclose()
            server.should_exit = True
            await serving
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
    listener.close()


@contextlib.asynccontextmanager
async def asking(running: Running, body: dict[str, Any]) -> AsyncIterator[asyncio.Task[None]]:
    """A client that asks and does not read; leaving the scope closes its connection."""

    async def ask() -> None:
        async with (
            running.client() as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            assert response.status_code == 200
            await asyncio.Event().wait()

    task = asyncio.create_task(ask())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_pays_for_what_was_computed(
    running: Running, stream: bool
) -> None:
    """One record, client_disconnect, with the engine's own counts and times, priced exactly."""
    await running.quiet()
    before, booked = await asyncio.gather(
        asyncio.gather(*(running.metric(name) for name in (DECODED, PREFILLED, CHARGED))),
        running.booked(),
    )
    async with asking(running, {**LONG, "stream": stream}):
        await running.until(DECODED, before[0] + 50)
    await running.quiet()
    requests, events, lines = (
        new[len(old) :] for new, old in zip(await running.booked(), booked, strict=True)
    )
    [request], [event] = requests, events
    assert (request.outcome, request.status) == ("client_disconnect", 499)
    assert (event.usage_source, event.usage_quality) == ("engine", "exact")
    decoded = await running.metric(DECODED) - before[0]
    assert event.out_text == decoded + 1  # the first one comes out of the prompt's last step
    assert event.in_uncached_text == await running.metric(PREFILLED) - before[1] > 0
    device_us = (
        event.engine_us_prefill + event.engine_us_decode + event.engine_us_sampling
        + event.engine_us_recompute
    )  # fmt: skip
    assert device_us > 0
    charged_s = await running.metric(CHARGED) - before[2]
    assert charged_s == pytest.approx(device_us / 1e6, abs=2e-6)
    amounts = [line.amount for line in lines]
    assert sum(amounts) == Decimal(device_us) * RATE_PER_HOUR / 3_600_000_000
    assert await running.metric(KV_USAGE) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_the_queue_pays_nothing(running: Running, stream: bool) -> None:
    """Nothing was computed for it, says the engine, and the one before it goes on."""
    await running.quiet()
    _, booked, priced = await running.booked()
    async with asking(running, {**LONG, "stream": True}):
        await running.until(RUNNING, 1)
        async with asking(running, {**LONG, "stream": stream}):
            await running.until(WAITING, 1)
        async with asyncio.timeout(10):
            while running.service.gateway.ledger.in_flight > 1:
                await asyncio.sleep(0.02)
        assert await running.metric(WAITING) == 0
        assert await running.metric(RUNNING) == 1
        requests, events, lines = await running.booked()
        [event] = events[len(booked) :]
        assert event.outcome == "client_disconnect" or requests[-1].outcome == "client_disconnect"
        assert (event.usage_source, event.in_uncached_text, event.out_text) == ("engine", 0, 0)
        assert (event.engine_us_prefill, event.engine_us_decode) == (0, 0)
        assert sum(line.amount for line in lines[len(priced) :]) == 0
    await running.quiet()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_told_to_stop_the_engine_ends_its_answer_properly(
    running: Running, stream: bool
) -> None:
    """Each choice has a finish reason, the usage is there, and a stream ends with [DONE]."""
    await running.quiet()
    decoded = await running.metric(DECODED)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    asked = asyncio.create_task(
        running.engine.post(
            "/v1/chat/completions",
            json={**LONG, "n": 2, "max_tokens": 3_000, "stream": stream, **options},
            headers={"x-request-id": "one"},
        )
    )
    await running.until(DECODED, decoded + 20)
    assert (await running.engine.post("/v1/requests/other/cancel")).status_code == 404
    told = await running.engine.post("/v1/requests/one/cancel")
    assert (told.status_code, told.json()["cancelled"]) == (200, 1)
    answer = await asked
    assert answer.status_code == 200
    assert answer.text.count('"finish_reason":"cancelled"') == 2
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == await running.metric(DECODED) - decoded + 1
        assert usage["meterline"]["device_us"]["decode"] > 0
    assert (await running.engine.post("/v1/requests/one/cancel")).status_code == 404
    assert (await running.engine.get("/v1/requests/one/cancel")).status_code == 405


async def test_one_trace_from_the_caller_to_the_engines_phases(running: Running) -> None:
    """SERVER under the caller's span, CLIENT under it, and the engine's four phases inside the
    attempt's time; no parent is missing."""
    await running.quiet()
    async with running.client() as client:
        answer = await client.post(
            "/v1/chat/completions",
            json={**LONG, "max_tokens": 20},
            headers={"traceparent": CALLER},
        )
    assert answer.status_code == 200
    trace_id, caller = CALLER.split("-")[1:3]
    phases = {"queue", "prefill", "decode", "sampling"}
    found: dict[str, Span] = {}
    async with asyncio.timeout(20):
        while not phases | {"chat tiny", "POST /v1/chat/completions"} <= found.keys():
            await asyncio.sleep(0.05)
            found = {n: s for n, s in running.spans if s.trace_id.hex() == trace_id}
    outside = {s.parent_span_id.hex() for s in found.values()} - {
        s.span_id.hex() for s in found.values()
    }
    assert outside == {caller}
    root, attempt = found["POST /v1/chat/completions"], found["chat tiny"]
    assert (root.kind, attempt.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert attempt.parent_span_id == root.span_id
    assert {"auth", "route", "admit"} <= found.keys()
    for name in phases:
        span = found[name]
        assert span.parent_span_id == attempt.span_id
        assert attempt.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= attempt.end_time_unix_nano


async def test_only_our_engine_is_asked_to_stop(running: Running) -> None:
    """A vendor has no such route; a cancel that finds nobody is False and raises nothing."""
    assert isinstance(running.service.engines["local"], Cancellable)
    assert not await running.service.engines["local"].cancel("nobody")
    vendor = build(BackendSettings(name="v", kind="openai", base_url="https://up.test/v1"), ())
    assert not isinstance(vendor, Cancellable)
    gone = build(BackendSettings(name="e", kind="engine", base_url="unix:///nowhere.sock"), ())
    assert isinstance(gone, Cancellable)
    assert not await gone.cancel("any")
    for backend in (vendor, gone):
        await backend.aclose()
