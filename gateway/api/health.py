"""Liveness, readiness, metrics. Cheap, and without a key, but for metrics seen from elsewhere."""

from typing import Any

from litestar import HttpMethod, MediaType, Request, Response, get, route
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from gateway.auth import Admin, read_credential
from gateway.config import is_loopback
from gateway.pipeline import Gateway
from gateway.readiness import Readiness, ReadinessState
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
) -> Response[bytes]:
    """Prometheus text, or OpenMetrics if asked for. Caller: this machine, the admin key, or anyone
    if `telemetry.metrics_public` is set."""
    direct = request.client is not None and "x-forwarded-for" not in request.headers
    local = direct and is_loopback(request.client.host) if request.client else False
    if not local and not gateway.runtimes.current.config.telemetry.metrics_public:
        admin.check(read_credential(request.scope["headers"]))
    open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
    media = (
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
        if open_metrics
        else "text/plain; version=0.0.4; charset=utf-8"
    )
    return Response(metrics.render(openmetrics=open_metrics), headers={"content-type": media})
