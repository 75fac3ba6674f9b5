"""Liveness, readiness, metrics. Cheap, and without a key, but for metrics seen from elsewhere."""

from typing import Any

from litestar import HttpMethod, MediaType, Request, Response, get, route
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from gateway.auth import Admin, read_credential
from gateway.config import is_loopback
from gateway.errors import NotFound
from gateway.pipeline import Gateway
from gateway.readiness import Readiness, ReadinessState
from gateway.workers import Place, TargetGroup, target_groups
from telemetry.metrics import Metrics

PROBE = (HttpMethod.GET, HttpMethod.HEAD)  # load balancers ask with either


@route(
    ["/livez", "/health"],
    http_method=PROBE,
    status_code=200,
    opt={"caller": "public"},
    tags=["health"],
    media_type=MediaType.TEXT,
    summary="Liveness",
)
async def livez() -> str:
    """The process answers. Caller: anyone."""
    return "ok"


@route(
    "/readyz",
    http_method=PROBE,
    status_code=200,
    opt={"caller": "public"},
    tags=["health"],
    summary="Readiness",
)
async def readyz(
    readiness: NamedDependency[SkipValidation[Readiness]],
) -> Response[ReadinessState]:
    """Whether requests should be sent here. Caller: anyone."""
    state = readiness.state()
    return Response(state, status_code=200 if state.ready else 503)


@get("/metrics", opt={"caller": "loopback or admin"}, tags=["health"], summary="Prometheus")
async def metrics(
    request: Request[Any, Any, Any],
    metrics: NamedDependency[SkipValidation[Metrics]],
    admin: NamedDependency[SkipValidation[Admin]],
    gateway: NamedDependency[SkipValidation[Gateway]],
    place: NamedDependency[SkipValidation[Place | None]],
) -> Response[bytes]:
    """Prometheus text, or OpenMetrics if asked for. Caller: this machine, the admin key, or anyone
    if `telemetry.metrics_public` is set."""
    _check_scraper(request, admin, gateway)
    if place is not None and _local_port(request) != _port_of(place.targets[place.slot]):
        raise NotFound(
            "Each worker has a scrape target of its own: GET /metrics/targets lists them."
        )
    open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
    media = (
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
        if open_metrics
        else "text/plain; version=0.0.4; charset=utf-8"
    )
    return Response(metrics.render(openmetrics=open_metrics), headers={"content-type": media})


@get("/metrics/targets", opt={"caller": "loopback or admin"}, tags=["health"], summary="Targets")
async def targets(
    request: Request[Any, Any, Any],
    admin: NamedDependency[SkipValidation[Admin]],
    gateway: NamedDependency[SkipValidation[Gateway]],
    place: NamedDependency[SkipValidation[Place | None]],
) -> list[TargetGroup]:
    """Where to scrape, as Prometheus's http_sd reads it: one target for each worker, on the host
    that was asked. Caller: as of `/metrics`."""
    _check_scraper(request, admin, gateway)
    found = [f":{_local_port(request)}"] if place is None else place.targets
    host = request.url.hostname or "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return target_groups([f"{shown}:{_port_of(target)}" for target in found])


def _check_scraper(request: Request[Any, Any, Any], admin: Admin, gateway: Gateway) -> None:
    direct = request.client is not None and "x-forwarded-for" not in request.headers
    local = direct and is_loopback(request.client.host) if request.client else False
    if not local and not gateway.runtimes.current.config.telemetry.metrics_public:
        admin.check(read_credential(request.scope["headers"]))


def _local_port(request: Request[Any, Any, Any]) -> int | None:
    server = request.scope.get("server")
    return None if server is None else server[1]


def _port_of(target: str) -> int:
    return int(target.rpartition(":")[2])
