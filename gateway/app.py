"""The composition root: every object of the gateway is built here, in order, and passed on.

`open_service` builds what runs, `create_app` its HTTP face. What can be wrong at start is found
while opening, as a `StartupError` with one clear line, before anything listens.
"""

import asyncio
import contextlib
import functools
import logging
import platform
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from msgspec import Struct
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from backends import registry
from backends.supervisor import EngineTelemetry, Supervised
from gateway import secrets
from gateway.api import completions, health, models, openapi, problems, responses
from gateway.api.admin import create_admin_router
from gateway.api.idempotency import Idempotency
from gateway.api.reports import create_reports_router
from gateway.api.shared_answers import SharedAnswers
from gateway.auth import Admin, AdminKeyInvalid, Auth
from gateway.budgets import LedgerSpend
from gateway.config import Config, ConfigInvalid, check_references, resolve
from gateway.errors import GatewayError
from gateway.health import Fault, Health, State
from gateway.heartbeats import Heartbeats
from gateway.keys import KeyRing, PepperInvalid
from gateway.limits import CounterClient, Limits, MemoryStore, RedisStore, Slices
from gateway.pipeline import Gateway
from gateway.readiness import Readiness
from gateway.refusals import Refusals
from gateway.responses import ResponseStore
from gateway.runtime import ConfigWatcher, RuntimeHolder
from gateway.tenants import Tenants, tenant_names
from gateway.workers import Place
from telemetry import books, logs
from telemetry import metrics as metric
from telemetry.books import BackendPrices
from telemetry.clock import Clock, SystemClock
from telemetry.database import DatabaseUrlInvalid, open_engine
from telemetry.ids import new_span_id
from telemetry.ledger import Ledger, LedgerError, WalLocked, WriteAheadLog
from telemetry.ledger.worker import LedgerWorker
from telemetry.metrics import Metrics
from telemetry.pricing import PriceBook, rate
from telemetry.record import Attempt, Charge
from telemetry.redaction import Secret
from telemetry.reports.desk import Desk
from telemetry.tracing import FileSink, OtlpSink, SpanExport

log = logging.getLogger(__name__)

VERSION = version("meterline")
BOOKS_EVERY_S = 30.0  # how often a running gateway looks for newly published prices
CHECK_S = 30.0  # for an engine to look at its model's file, at start
FLUSH_S = 10.0  # for the ledger, at shutdown
LOCAL_PATIENCE_S = 5.0  # a budget's counter begins with a question to the ledger
WAL_FOLDERS = 64  # gateway processes that may share one data folder


class StartupError(Exception):
    """The gateway cannot start. One line, which says what to do."""


class Service(Struct, frozen=True, kw_only=True):
    """Everything that runs in one gateway process."""

    app: Litestar
    gateway: Gateway
    tenants: Tenants
    metrics: Metrics
    worker: LedgerWorker
    engines: Mapping[str, Supervised]
    watcher: ConfigWatcher | None  # None: there is no file to watch
    new_admin_key: Secret | None  # made at this start: shown once, never again


class Prices:
    """The price book in force. Replaced when a book is published, read at each settlement."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self.book = PriceBook()
        self._published = 0
        self._engine = engine
        self._clock = clock

    def rate(self, attempt: Attempt) -> tuple[Charge, ...]:
        return rate(attempt, self.book)

    async def publish(self, config: Config) -> None:
        """Publish what the price catalogue and the config say, where it is new, and take it up."""
        now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
        await books.seed_from_genai_prices(self._engine, now)
        bought = [
            BackendPrices(b.name, registry.provider_of(b), price=b.price, gpu=b.gpu)
            for b in config.backends
        ]
        owned = [BackendPrices(e.name, registry.ENGINE_PROVIDER, gpu=e.gpu) for e in config.engines]
        await books.publish_config_prices(self._engine, [*bought, *owned], now)
        await self._load()

    async def keep_current(self) -> None:
        """Take up what `meterline price publish` published meanwhile. Runs until cancelled."""
        while True:
            await asyncio.sleep(BOOKS_EVERY_S)
            try:
                if await books.published_count(self._engine) != self._published:
                    await self._load()
            except (SQLAlchemyError, OSError) as error:  # the book in force goes on
                log.warning("price_books_unreadable", extra={"reason": type(error).__name__})

    async def _load(self) -> None:
        # Counted first: what is published while they are read is found at the next look.
        self._published = await books.published_count(self._engine)
        self.book = await books.load(self._engine)


@contextlib.asynccontextmanager
async def open_service(
    config: Config,
    *,
    environment: Mapping[str, str],
    config_path: Path | None = None,
    adapt: Callable[[Config], Config] = lambda written: written,
    clock: Clock | None = None,
    place: Place | None = None,
) -> AsyncIterator[Service]:
    """Open all parts in order, close them in reverse. Raises StartupError.

    `adapt` is what the command line changed of the file, and holds for a reloaded one too. `place`
    is this worker's among several: engines, and counters without Redis, are then the parent's."""
    async with contextlib.AsyncExitStack() as stack:
        with _as_startup_errors():
            service = await _build(
                config, environment, config_path, adapt, clock or SystemClock(), stack, place
            )
        yield service


async def _build(
    config: Config,
    environment: Mapping[str, str],
    config_path: Path | None,
    adapt: Callable[[Config], Config],
    clock: Clock,
    stack: contextlib.AsyncExitStack,
    place: Place | None,
) -> Service:
    check_references(config, environment)
    data = Path(config.store.data_dir)
    # First: what is wrong with a model must not leave a database.
    if place is None:
        engines = await start_engines(config, stack, private_folder(stack))
    else:
        engines = await _attend_engines(config, stack, place)

    url = resolve(config.database_url, environment)
    engine = open_engine(url)
    stack.push_async_callback(engine.dispose)
    await _bring_up_to_date(engine)

    ring = KeyRing(secrets.pepper(config, environment))
    tenants = Tenants(engine, ring, clock)
    await tenants.verify_pepper()
    admin_key, new_admin_key = secrets.admin_key(config, environment)
    auth = await stack.enter_async_context(Auth(tenants, ring, clock))

    prices = Prices(engine, clock)
    await prices.publish(config)
    await stack.enter_async_context(_running(prices.keep_current))

    wal = _open_wal(config, clock)
    stack.callback(wal.close)  # also closed by the ledger; twice is once
    metrics = Metrics(
        CollectorRegistry(), max_models=config.telemetry.max_model_labels, node=wal.node
    )
    wal.on_fsync = lambda seconds: metrics.measure(metric.WAL_FSYNC, seconds, node=wal.node)
    spans = _open_spans(config, data, metrics)
    stack.callback(spans.close)
    ledger = Ledger(
        wal=wal,
        rate=prices.rate,
        clock=clock,
        observers=(metrics.observe, spans.observe, logs.log_request),
    )
    stack.callback(ledger.close)
    worker = LedgerWorker(engine, ledger=ledger, rate=prices.rate, clock=clock)
    stack.push_async_callback(_last_flush, worker)
    await stack.enter_async_context(_running(worker.run))

    health = Health(clock, config.health, on_change=functools.partial(_circuit_changed, metrics))
    runtimes = RuntimeHolder(
        config,
        engines=engines,
        build=registry.build,
        environment=environment,
        salt_key=ring.digest("cache-salt"),
        clock=clock,
        health=health,
    )
    stack.push_async_callback(runtimes.aclose)
    limits = await _open_limits(
        config, environment, stack, node=wal.node, engine=engine, prices=prices,
        runtimes=runtimes, clock=clock, place=place,
    )  # fmt: skip
    ledger.observers.append(limits.settle)
    await stack.enter_async_context(_running(limits.run))
    watcher = None
    if config_path is not None:
        watcher = ConfigWatcher(config_path, runtimes, adapt=adapt, after=prices.publish)
        await stack.enter_async_context(_running(watcher.run))

    await stack.enter_async_context(_running(Heartbeats(runtimes, engine, clock).run))

    gateway = Gateway(
        runtimes=runtimes,
        auth=auth,
        limits=limits,
        ledger=ledger,
        refusals=Refusals(clock),
        responses=ResponseStore(engine, clock, lambda: runtimes.current.config.responses),
    )
    _watch(metrics, gateway, worker, runtimes)
    shared_answers = None
    if config.store.redis is not None:
        redis = resolve(config.store.redis, environment)
        shared_answers = SharedAnswers(redis, ttl_s=config.server.idempotency_ttl_s)
        stack.push_async_callback(shared_answers.aclose)
    idempotency = Idempotency(
        clock,
        ttl_s=config.server.idempotency_ttl_s,
        most_bytes=config.server.idempotency_mb * 1_000_000,
        shared=shared_answers,
    )
    stack.push_async_callback(idempotency.aclose)
    app = create_app(
        gateway=gateway,
        metrics=metrics,
        admin=Admin(admin_key.reveal()),
        tenants=tenants,
        desk=Desk(engine, functools.partial(tenant_names, tenants)),
        readiness=Readiness(gateway=gateway, engines=engines, worker=worker),
        place=place,
        idempotency=idempotency,
    )
    return Service(
        app=app,
        gateway=gateway,
        tenants=tenants,
        metrics=metrics,
        worker=worker,
        engines=engines,
        watcher=watcher,
        new_admin_key=new_admin_key,
    )


async def _open_limits(
    config: Config,
    environment: Mapping[str, str],
    stack: contextlib.AsyncExitStack,
    *,
    node: str,
    engine: AsyncEngine,
    prices: Prices,
    runtimes: RuntimeHolder,
    clock: Clock,
    place: Place | None,
) -> Limits:
    """Counters in this process, in the parent of several workers, or on the Redis that all
    replicas share."""
    settings = config.limits
    shared: RedisStore | None = None
    siblings: CounterClient | None = None
    if config.store.redis is not None:
        shared = RedisStore(
            resolve(config.store.redis, environment),
            node=f"{platform.node()}/{node}/{new_span_id()}",
            budget_s=settings.store_budget_ms / 1000,
        )
    elif place is not None and place.counters is not None:
        siblings = CounterClient(Path(place.counters), budget_s=LOCAL_PATIENCE_S)
        await stack.enter_async_context(siblings)
    processes = 1 if place is None else len(place.targets)
    limits = Limits(
        shared or siblings or MemoryStore(clock),
        slices=Slices(MemoryStore(clock), settings.offline_share),
        replicas=lambda: processes if shared is None else shared.replicas,
        is_up=lambda: shared.is_up if shared is not None else siblings is None or siblings.is_up,
        spend=LedgerSpend(engine),
        prices=lambda: prices.book,
        provider_of=lambda name: runtimes.current.upstreams[name].backend.provider,
        settings=lambda: (runtimes.current.config.limits, runtimes.current.config.budgets),
        clock=clock,
        patience_s=LOCAL_PATIENCE_S if shared is None else settings.store_budget_ms / 1000,
    )
    if shared is not None:
        shared.on_recovered = limits.recovered
        await stack.enter_async_context(shared)
    return limits


def create_app(
    *,
    gateway: Gateway,
    metrics: Metrics,
    admin: Admin,
    tenants: Tenants,
    desk: Desk,
    readiness: Readiness,
    idempotency: Idempotency,
    place: Place | None = None,
) -> Litestar:
    """The HTTP face. Every route names in `opt["caller"]` who may call it."""

    def keep(config: AppConfig) -> AppConfig:
        config.state.gateway = gateway
        config.state.idempotency = idempotency
        return config

    app = Litestar(
        route_handlers=[
            completions.chat,
            completions.completions,
            completions.embeddings,
            completions.responses,
            completions.messages,
            completions.count_tokens,
            responses.read_response,
            responses.delete_response,
            models.list_models,
            models.one_model,
            health.livez,
            health.readyz,
            health.metrics,
            health.targets,
            create_admin_router(tenants, admin),
            create_reports_router(desk, admin),
        ],
        dependencies={
            "gateway": Provide(lambda: gateway, sync_to_thread=False),
            "metrics": Provide(lambda: metrics, sync_to_thread=False),
            "admin": Provide(lambda: admin, sync_to_thread=False),
            "responses": Provide(lambda: gateway.responses, sync_to_thread=False),
            "readiness": Provide(lambda: readiness, sync_to_thread=False),
            "place": Provide(lambda: place, sync_to_thread=False),
        },
        exception_handlers={GatewayError: problems.handle, Exception: problems.handle},
        after_request=problems.stamp,
        openapi_config=OpenAPIConfig(
            title="Meterline",
            version=VERSION,
            path="/schema",
            render_plugins=[JsonRenderPlugin(path="/")],
        ),
        on_app_init=[keep],
        logging_config=None,  # telemetry.logs owns logging
        request_max_body_size=1_000_000,  # admin bodies; completions have their own limit
    )
    openapi.add_completions(app.openapi_schema)
    return app


def private_folder(stack: contextlib.AsyncExitStack) -> Path:
    """For sockets: nobody else's, and its path is short enough for one. Gone with the stack."""
    folder = Path(tempfile.mkdtemp(prefix="meterline-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


async def start_engines(
    config: Config, stack: contextlib.AsyncExitStack, sockets: Path
) -> dict[str, Supervised]:
    """The `[[engines]]` as children of this process. Raises StartupError for one that refuses."""
    data = Path(config.store.data_dir)
    _check_folder(data)
    engines: dict[str, Supervised] = {}
    for settings in config.engines:
        child = registry.build_engine(
            settings,
            sockets / f"{settings.name}.sock",
            EngineTelemetry(
                otlp_endpoint=config.telemetry.otlp_endpoint,
                spans_file=spans_file(data, f"engine-{settings.name}"),
            ),
        )
        stack.push_async_callback(child.aclose)
        await child.process.start()
        engines[settings.name] = child
    await _check_engines(engines)
    return engines


async def _attend_engines(
    config: Config, stack: contextlib.AsyncExitStack, place: Place
) -> dict[str, Supervised]:
    _check_folder(Path(config.store.data_dir))
    engines: dict[str, Supervised] = {}
    for settings in config.engines:
        socket_path = place.engines.get(settings.name)
        if socket_path is None:
            raise StartupError(f"engine {settings.name} is new: restart the whole gateway for it")
        child = registry.attend_engine(settings, Path(socket_path))
        stack.push_async_callback(child.aclose)
        await child.process.start()
        engines[settings.name] = child
    return engines


def _check_folder(data: Path) -> None:
    """The data folder must take files: say so now, not at the first request."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data):
            pass
    except OSError as error:
        raise StartupError(
            f"the data folder {data} cannot be written: {error.strerror}; "
            "set [store] data_dir to one that can"
        ) from None


async def _check_engines(engines: Mapping[str, Supervised]) -> None:
    """Each engine has looked at its settings and its model's file, and goes on by itself."""
    for name, engine in engines.items():
        if not await engine.process.wait_checked(CHECK_S):
            state = engine.process.state
            if state.phase == "failed":
                raise StartupError(f"engine {name}: {state.reason}")


async def _bring_up_to_date(engine: AsyncEngine) -> None:
    """SQLite is this process's own and is migrated; a shared database is an operator's decision."""
    if engine.dialect.name == "sqlite":
        await migrations.upgrade_engine(engine)
    elif not await migrations.is_current(engine):
        raise StartupError("the database has not the newest tables: run `meterline migrate` first")


def _open_wal(config: Config, clock: Clock) -> WriteAheadLog:
    """The first log folder that no other process holds."""
    for number in range(WAL_FOLDERS):
        with contextlib.suppress(WalLocked):
            return WriteAheadLog.open(config.wal_dir, f"gateway-{number}", clock=clock)
    raise StartupError(f"{config.wal_dir} is in use by {WAL_FOLDERS} other gateways")


def _open_spans(config: Config, data: Path, metrics: Metrics) -> SpanExport:
    settings = config.telemetry
    return SpanExport(
        OtlpSink(settings.otlp_endpoint) if settings.otlp_endpoint else FileSink(spans_file(data)),
        service_name=settings.service_name,
        service_version=VERSION,
        on_exported=functools.partial(metrics.add, metric.SPANS_EXPORTED),
        on_dropped=lambda count, reason: metrics.add(metric.SPANS_DROPPED, count, reason=reason),
    )


def spans_file(data: Path, service: str = "gateway") -> Path:
    return data / "spans" / f"{service}.jsonl"


async def _last_flush(worker: LedgerWorker) -> None:
    """Everything into the database before it closes. What it refuses stays in the log."""
    try:
        async with asyncio.timeout(FLUSH_S):
            await worker.flush()
    except (SQLAlchemyError, OSError, TimeoutError):
        log.warning("ledger_not_flushed", extra={"hint": "it is shipped at the next start"})


def _watch(
    metrics: Metrics, gateway: Gateway, worker: LedgerWorker, runtimes: RuntimeHolder
) -> None:
    """Gauges and totals that are kept elsewhere and read at each scrape."""
    ledger, wal, node = gateway.ledger, gateway.ledger.wal, metrics.node
    metrics.info(metric.BUILD_INFO, {"version": VERSION, "python": platform.python_version()})
    for route in metric.ROUTE.values:
        metrics.watch(metric.IN_FLIGHT, functools.partial(ledger.count, route), route=route)
        metrics.watch(
            metric.OPEN_STREAMS, functools.partial(ledger.count, route, streams=True), route=route
        )
    metrics.watch(metric.ADMITTED, lambda: ledger.admitted, node=node)
    metrics.watch(metric.INTENTS_OPEN, lambda: wal.outstanding, node=node)
    metrics.watch(metric.WAL_APPENDED, lambda: wal.appended, node=node)
    metrics.watch(metric.WAL_SHIPPED, lambda: worker.shipper.shipped, node=node)
    metrics.watch(metric.WAL_PENDING_BYTES, wal.pending_bytes, node=node)
    metrics.watch(metric.WAL_OLDEST_PENDING, lambda: time.time() - worker.lag_s, node=node)
    metrics.watch(metric.ROLLUP_LAG, lambda: worker.lag_s)
    for law in ("requests", "wal"):
        metrics.watch(
            metric.CONSERVATION_RESIDUAL, functools.partial(_residual, worker, law), law=law
        )
    metrics.watch(metric.OBSERVER_ERRORS, lambda: ledger.observer_errors, kind="metrics")
    _watch_limits(metrics, gateway.limits)
    metrics.watch(metric.CONFIG_RELOADS, lambda: runtimes.reloads, result="applied")
    metrics.watch(metric.CONFIG_RELOADS, lambda: runtimes.reload_failures, result="rejected")
    for reason in metric.UNAUTHENTICATED.label("reason").values:
        metrics.watch(
            metric.UNAUTHENTICATED,
            functools.partial(gateway.refusals.counts.__getitem__, reason),
            reason=reason,
        )
    metrics.expect(
        (upstream.backend.provider, target.model)
        for route in gateway.runtimes.current.routes.values()
        for target in route.targets
        if (upstream := gateway.runtimes.current.upstreams.get(target.backend))
    )


def _circuit_changed(metrics: Metrics, backend: str, fault: Fault, state: State) -> None:
    metrics.set(metric.CIRCUIT_STATE, state, backend=backend, fault=fault)
    if state is State.OPEN:
        metrics.add(metric.CIRCUIT_OPENED, backend=backend, fault=fault)
        log.warning("circuit_opened", extra={"backend": backend, "fault": fault})


def _watch_limits(metrics: Metrics, limits: Limits) -> None:
    counts = limits.counts
    for scope in metric.LIMIT_SCOPE.values:
        for counted in metric.COUNTED.values:
            read = functools.partial(counts.of, scope, counted)
            metrics.watch(metric.LIMIT_REFUSALS, read, scope=scope, counted=counted)
    metrics.watch(metric.LIMITS_DEGRADED, lambda: limits.mode != "ok")
    metrics.watch(metric.LIMIT_HOLDS, lambda: limits.open_holds)
    metrics.watch(metric.SLICE_ADMITTED, lambda: counts.sliced)
    metrics.watch(metric.BUDGET_OVERRUNS, lambda: counts.soft_overruns)


def _residual(worker: LedgerWorker, law: str) -> float:
    return worker.residuals()[law]


@contextlib.asynccontextmanager
async def _running(work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """A task that lives as long as the scope."""
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _as_startup_errors() -> Iterator[None]:
    """What can be wrong at start, as one line each. Messages hold no secret and no URL."""
    try:
        yield
    except ConfigInvalid as error:
        raise StartupError("; ".join(error.problems)) from error
    except (PepperInvalid, AdminKeyInvalid, DatabaseUrlInvalid, LedgerError) as error:
        raise StartupError(str(error)) from error
    except GatewayError as error:
        raise StartupError(error.message) from error
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise StartupError(
            f"the database cannot be used ({type(error).__name__}): "
            "check [store] database and that the server runs"
        ) from error
