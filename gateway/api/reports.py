"""`/admin/v1/reports`: the reports of the command line, as JSON or CSV, for the admin key.

Parses, asks the `Desk`, renders. Must not know SQL or how a report is made.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, TypeAlias

from litestar import Request, Response, Router, get
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.params import PathParameter, QueryParameter, SkipValidation

from gateway.api.guards import guard, principal_of
from gateway.auth import Admin
from gateway.errors import BadRequest, NotFound
from gateway.tenants import Tenants
from telemetry.capacity.allocation import POLICIES
from telemetry.reports.chargeback import GroupingInvalid, dimensions
from telemetry.reports.desk import SHEETS, Desk
from telemetry.reports.period import Period, PeriodInvalid, parse_period
from telemetry.reports.render import chargeback_csv, chargeback_json
from telemetry.reports.sheet import sheet_csv, sheet_json

Only: TypeAlias = frozenset[str] | None
Reports = NamedDependency[SkipValidation[Desk]]
Start = Annotated[
    str | None,
    QueryParameter(name="from", description="First day or hour; default: first of this month."),
]
End = Annotated[
    str | None,
    QueryParameter(name="to", description="Day or hour after the last; default: tomorrow."),
]
Zone = Annotated[str, QueryParameter(name="tz", description="Whose midnights.")]
Form = Annotated[Literal["json", "csv"], QueryParameter(name="format", description="json or csv.")]
Name = Annotated[str, PathParameter(description=f"One of {', '.join(SHEETS)}.")]


@get("/chargeback", summary="Cost by any dimensions")
async def chargeback_report(
    desk: Reports,
    only: NamedDependency[SkipValidation[Only]],
    start: Start = None,
    end: End = None,
    zone: Zone = "UTC",
    by: Annotated[str, QueryParameter(description="Dimensions, with commas.")] = "tenant,model",
    basis: Annotated[str, QueryParameter(description="usage or full.")] = "usage",
    idle_policy: Annotated[str, QueryParameter(description="Who pays for idle time.")] = "keep",
    form: Form = "json",
) -> Response[bytes]:
    """A role for one tenant sees it and what is below it. On the full basis, owned hardware stands
    at its bill, idle time by the named policy."""
    policy = next((name for name in POLICIES if name == idle_policy), None)
    if policy is None:
        raise BadRequest(f"use any of {', '.join(POLICIES)}", param="idle_policy")
    if basis not in ("usage", "full"):
        raise BadRequest("use usage or full", param="basis")
    try:
        report = await desk.chargeback(
            _period(start, end, zone),
            dimensions(by),
            basis="full" if basis == "full" else "usage",
            policy=policy,
            only=only,
        )
    except GroupingInvalid as error:
        raise BadRequest(str(error), param="by") from error
    return _answer(chargeback_csv(report) if form == "csv" else chargeback_json(report), form)


@get("/{name:str}", summary="Capacity, savings, waste, variance or forecast")
async def sheet_report(
    request: Request[Any, Any, Any],
    name: Name,
    desk: Reports,
    start: Start = None,
    end: End = None,
    zone: Zone = "UTC",
    form: Form = "json",
) -> Response[bytes]:
    """Variance is against the period of the same length just before."""
    principal_of(request).require_all()  # these are over all tenants
    known = next((sheet for sheet in SHEETS if sheet == name), None)
    if known is None:
        raise NotFound(f"no such report: use chargeback or any of {', '.join(SHEETS)}")
    sheet = await desk.sheet(known, _period(start, end, zone), today=datetime.now(UTC).date())
    return _answer(sheet_csv(sheet) if form == "csv" else sheet_json(sheet), form)


def create_reports_router(desk: Desk, admin: Admin, tenants: Tenants) -> Router:
    """The routes under `/admin/v1/reports`, guarded."""

    async def only(request: Request[Any, Any, Any]) -> Only:
        """The tenants that the asker's role is for; None: all."""
        principal = principal_of(request)
        within = principal.tenant_id
        return None if within is None else frozenset(await tenants.subtree(within))

    return Router(
        path="/admin/v1/reports",
        route_handlers=[chargeback_report, sheet_report],
        guards=[guard(admin)],
        opt={"caller": "admin", "area": "reports"},
        tags=["reports"],
        dependencies={
            "desk": Provide(lambda: desk, sync_to_thread=False),
            "only": Provide(only),
        },
        response_headers=[ResponseHeader(name="cache-control", value="private, no-store")],
    )


def _period(start: str | None, end: str | None, zone: str) -> Period:
    today = datetime.now(UTC).date()
    first = start or today.replace(day=1).isoformat()
    try:
        return parse_period(first, end or (today + timedelta(days=1)).isoformat(), zone)
    except PeriodInvalid as error:
        raise BadRequest(str(error), param="from") from error


def _answer(text: str, form: str) -> Response[bytes]:
    kind = "text/csv; charset=utf-8" if form == "csv" else "application/json"
    return Response(text.encode(), media_type=kind)
