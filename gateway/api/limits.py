"""`/admin/v1/limits` and `/admin/v1/budgets`: what tenants may use, for who has the admin key.

Parses, asks `Allowances`, renders. The guard is the admin router's."""

from decimal import Decimal
from typing import Annotated

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import JSONBody, PathParameter, QueryParameter, SkipValidation
from msgspec import Meta, Struct

from gateway.allowances import Budget, BudgetScope, Counts, Limit, Mode, Scope, WindowKind
from gateway.budgets import Allowances

ACTOR = "admin"

Store = NamedDependency[SkipValidation[Allowances]]
OfTenant = Annotated[str | None, QueryParameter(description="Only this tenant's (id or name).")]
LimitId = Annotated[str, PathParameter(description="The limit's id.")]
BudgetId = Annotated[str, PathParameter(description="The budget's id.")]
Subject = Annotated[
    str | None,
    Meta(description="Key (id or public id), user, route or model; null: each of the scope."),
]
Strict = Annotated[bool, Meta(description="With the shared counters away: refuse.")]


class NewLimit(Struct, kw_only=True, forbid_unknown_fields=True):
    """A limit to set. The one of the same scope, subject, kind and period is replaced."""

    tenant: Annotated[str, Meta(description="The tenant's id or name.")]
    counts: Counts
    amount: Annotated[Decimal, Meta(description="0: none allowed. Of spend: US dollars.")]
    per_s: Annotated[int | None, Meta(description="Seconds; none for concurrency.")] = None
    scope: Scope = "tenant"
    subject: Subject = None
    strict: Strict = False


class NewBudget(Struct, kw_only=True, forbid_unknown_fields=True):
    """A budget to set. The one of the same scope, subject and window is replaced."""

    tenant: Annotated[str, Meta(description="The tenant's id or name.")]
    amount_usd: Annotated[Decimal, Meta(description="US dollars. 0: none allowed.")]
    window: WindowKind = "month"
    hours: Annotated[int | None, Meta(description="Length of a rolling window.")] = None
    zone: Annotated[str, Meta(description="IANA time zone of calendar windows.")] = "UTC"
    mode: Mode = "hard"
    downgrade_to: Annotated[
        str | None, Meta(description="Of mode downgrade: the cheaper route's model.")
    ] = None
    scope: BudgetScope = "tenant"
    subject: Subject = None
    strict: Strict = False


class LimitList(Struct, kw_only=True):
    """All of them, by age."""

    data: list[Limit]
    object: str = "list"


class BudgetList(Struct, kw_only=True):
    """All of them, by age."""

    data: list[Budget]
    object: str = "list"


class LimitController(Controller):
    """Limits."""

    path = "/limits"
    tags = ("limits",)
    opt = {"area": "limits"}  # noqa: RUF012  # the framework's form

    @put("/", summary="Set a limit")
    async def put_limit(self, data: JSONBody[NewLimit], allowances: Store) -> Limit:
        return await allowances.set_limit(
            data.tenant,
            data.counts,
            data.amount,
            per_s=data.per_s,
            scope=data.scope,
            subject=data.subject,
            strict=data.strict,
            actor=ACTOR,
        )

    @get("/", summary="List limits")
    async def list_limits(self, allowances: Store, tenant: OfTenant = None) -> LimitList:
        return LimitList(data=await allowances.limits(tenant))

    @delete("/{limit_id:str}", status_code=200, summary="Remove a limit")
    async def remove(self, limit_id: LimitId, allowances: Store) -> Limit:
        return await allowances.remove_limit(limit_id, actor=ACTOR)


class BudgetController(Controller):
    """Budgets."""

    path = "/budgets"
    tags = ("budgets",)
    opt = {"area": "budgets"}  # noqa: RUF012  # the framework's form

    @put("/", summary="Set a budget")
    async def put_budget(self, data: JSONBody[NewBudget], allowances: Store) -> Budget:
        return await allowances.set_budget(
            data.tenant,
            data.amount_usd,
            window=data.window,
            hours=data.hours,
            zone=data.zone,
            mode=data.mode,
            downgrade_to=data.downgrade_to,
            scope=data.scope,
            subject=data.subject,
            strict=data.strict,
            actor=ACTOR,
        )

    @get("/", summary="List budgets")
    async def list_budgets(self, allowances: Store, tenant: OfTenant = None) -> BudgetList:
        return BudgetList(data=await allowances.budgets(tenant))

    @delete("/{budget_id:str}", status_code=200, summary="Remove a budget")
    async def remove(self, budget_id: BudgetId, allowances: Store) -> Budget:
        return await allowances.remove_budget(budget_id, actor=ACTOR)
