"""`/admin/v1`: tenants, their keys, administrators and what they did.

Parses, asks `Tenants`, renders. Must not know SQL or how keys are stored. Invariants: every route
is behind the admin guard and says so in `opt["caller"]`, and in `opt["area"]` for whom it is; a
secret is in the answer to the request that made it and nowhere else.
"""

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

from litestar import Controller, Request, Router, delete, get, patch, post
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, PathParameter, QueryParameter, SkipValidation
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import asdict
from typing_extensions import override

from gateway.admins import AdminKey, Admins, AuditLine
from gateway.api.guards import guard, principal_of, request_id_of
from gateway.api.limits import BudgetController, LimitController
from gateway.auth import Admin
from gateway.budgets import Allowances
from gateway.keys import SCOPES, KeyRing
from gateway.roles import Role
from gateway.tenants import (
    MAX_PAGE,
    IssuedKey,
    Key,
    KeyChange,
    Page,
    Tenant,
    TenantChange,
    Tenants,
)

ADMIN = "admin"  # the actor in the audit log, and who may call

Store = NamedDependency[SkipValidation[Tenants]]
Administrators = NamedDependency[SkipValidation[Admins]]
TenantRef = Annotated[
    str, PathParameter(description="The tenant's id, or its name where no other has it.")
]
Below = Annotated[
    str | None, QueryParameter(description="Only this tenant (id, path, name) and all below it.")
]
KeyRef = Annotated[str, PathParameter(description="The key's id, or its public id.")]
After = Annotated[str | None, QueryParameter(description="Continue after the item with this id.")]
Limit = Annotated[int, QueryParameter(description=f"Items in the answer, 1 to {MAX_PAGE}.")]

ModelAllow = Annotated[
    list[str] | None,
    Meta(
        description="Models the key may ask for: names, and starts of names followed by `*`. "
        "null: all. An empty list: none."
    ),
]
TargetAllow = Annotated[
    list[str] | None,
    Meta(
        description="Where its requests may go: `BACKEND/MODEL`, and starts of it followed by `*`. "
        "null: anywhere. An empty list: nowhere."
    ),
]
KeyScopes = Annotated[
    list[str] | None,
    Meta(description=f"What it may do, of {', '.join(SCOPES)}. null: all. Empty: nothing."),
]
IpAllow = Annotated[
    list[str] | None,
    Meta(description="Networks (CIDR) it may be used from. null: any. An empty list: none."),
]
ExpiresAt = Annotated[
    datetime | None,
    Meta(description="When the key stops working, with time zone. null: never."),
]


Parent = Annotated[
    str | None, Meta(description="Id, path or name of the tenant above. null: at the top.")
]
TenantKind = Annotated[
    str | None, Meta(description="What it is to you: organisation, team, project, …")
]
CostCentre = Annotated[
    str | None, Meta(description="Where it is booked. null: as its nearest ancestor.")
]
Currency = Annotated[
    str | None, Meta(description="Three letters (ISO 4217). null: as its nearest ancestor.")
]
Labels = Annotated[dict[str, str], Meta(description="Free facts.")]


class NewTenant(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Annotated[str, Meta(description="Unique among the living tenants of its parent.")]
    parent: Parent = None
    kind: TenantKind = None
    cost_centre: CostCentre = None
    currency: Currency = None
    labels: Labels = field(default_factory=dict)


class TenantPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is absent stays. A new parent moves all below along."""

    name: Annotated[str, Meta(description="Unique at its place.")] | UnsetType = UNSET
    parent: Parent | UnsetType = UNSET
    kind: TenantKind | UnsetType = UNSET
    cost_centre: CostCentre | UnsetType = UNSET
    currency: Currency | UnsetType = UNSET
    labels: Labels | UnsetType = UNSET


class TenantList(Struct, kw_only=True):
    """Some tenants, oldest first."""

    data: list[Tenant]
    has_more: Annotated[bool, Meta(description="More follow `last_id`.")]
    last_id: Annotated[str | None, Meta(description="Pass it as `after` to continue.")]
    object: Literal["list"] = "list"


class NewKey(Struct, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    name: Annotated[str, Meta(description="What it is for.")] = ""
    model_allow: ModelAllow = None
    target_allow: TargetAllow = None
    scopes: KeyScopes = None
    ip_allow: IpAllow = None
    expires_at: ExpiresAt = None


class KeyPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is absent stays."""

    name: Annotated[str, Meta(description="What it is for.")] | UnsetType = UNSET
    model_allow: ModelAllow | UnsetType = UNSET
    target_allow: TargetAllow | UnsetType = UNSET
    scopes: KeyScopes | UnsetType = UNSET
    ip_allow: IpAllow | UnsetType = UNSET
    expires_at: ExpiresAt | UnsetType = UNSET


class Rotation(Struct, kw_only=True, forbid_unknown_fields=True):
    """How to hand over from the old key to the new one."""

    grace_s: Annotated[
        float, Meta(description="Seconds that the old key still works. 0: not at all.")
    ] = 0.0


class KeyWithSecret(Key, frozen=True, kw_only=True):
    """A new key with its secret, shown this once."""

    key: Annotated[str, Meta(description="The whole key. It cannot be shown again.")]

    @override
    def __repr__(self) -> str:
        return f"KeyWithSecret(id={self.id!r}, …)"

    @override
    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.id)]


class KeyList(Struct, kw_only=True):
    """Some keys, oldest first."""

    data: list[Key]
    has_more: Annotated[bool, Meta(description="More follow `last_id`.")]
    last_id: Annotated[str | None, Meta(description="Pass it as `after` to continue.")]
    object: Literal["list"] = "list"


class TenantController(Controller):
    """Tenants, and the keys under one."""

    path = "/tenants"
    tags = ("tenants",)
    opt = {"area": "tenants"}  # noqa: RUF012  # the framework's form

    @post("/", summary="Create a tenant")
    async def create(self, data: JSONBody[NewTenant], tenants: Store) -> Tenant:
        return await tenants.create_tenant(
            data.name,
            data.labels,
            parent=data.parent,
            kind=data.kind,
            cost_centre=data.cost_centre,
            currency=data.currency,
            actor=ADMIN,
        )

    @get("/", summary="List tenants")
    async def list_tenants(
        self, tenants: Store, after: After = None, limit: Limit = 20, below: Below = None
    ) -> TenantList:
        page = await tenants.tenants(after=after, limit=limit, below=below)
        return TenantList(
            data=page.items,
            has_more=page.has_more,
            last_id=_last_id(page),
        )

    @get("/{tenant:str}", summary="Show a tenant")
    async def show(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.tenant(tenant)

    @patch("/{tenant:str}", summary="Rename or move a tenant, or change its facts")
    async def change(
        self, tenant: TenantRef, data: JSONBody[TenantPatch], tenants: Store
    ) -> Tenant:
        return await tenants.change_tenant(tenant, TenantChange(**asdict(data)), actor=ADMIN)

    @post(
        "/{tenant:str}/suspend",
        status_code=200,
        summary="Refuse all keys of a tenant and of all below it",
    )
    async def suspend(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.suspend_tenant(tenant, actor=ADMIN)

    @post("/{tenant:str}/resume", status_code=200, summary="Accept a tenant's keys again")
    async def resume(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.resume_tenant(tenant, actor=ADMIN)

    @delete("/{tenant:str}", status_code=200, summary="Delete a tenant and revoke its keys")
    async def delete(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.delete_tenant(tenant, actor=ADMIN)

    @post("/{tenant:str}/keys", opt={"area": "keys"}, summary="Create a key")
    async def create_key(
        self, tenant: TenantRef, data: JSONBody[NewKey], tenants: Store
    ) -> KeyWithSecret:
        return _issued(await tenants.create_key(tenant, **asdict(data), actor=ADMIN))

    @get("/{tenant:str}/keys", opt={"area": "keys"}, summary="List a tenant's keys")
    async def list_keys(
        self, tenant: TenantRef, tenants: Store, after: After = None, limit: Limit = 20
    ) -> KeyList:
        page = await tenants.keys(tenant, after=after, limit=limit)
        return KeyList(
            data=page.items,
            has_more=page.has_more,
            last_id=_last_id(page),
        )


class KeyController(Controller):
    """One key."""

    path = "/keys"
    tags = ("keys",)
    opt = {"area": "keys"}  # noqa: RUF012  # the framework's form

    @get("/{key:str}", summary="Show a key")
    async def show(self, key: KeyRef, tenants: Store) -> Key:
        return await tenants.key(key)

    @post("/{key:str}/rotate", summary="Replace a key by a new one")
    async def rotate(self, key: KeyRef, data: JSONBody[Rotation], tenants: Store) -> KeyWithSecret:
        return _issued(await tenants.rotate_key(key, _seconds(data.grace_s), actor=ADMIN))

    @patch("/{key:str}", summary="Change what a key may do, its name or its expiry")
    async def change(self, key: KeyRef, data: JSONBody[KeyPatch], tenants: Store) -> Key:
        return await tenants.change_key(key, KeyChange(**asdict(data)), actor=ADMIN)

    @delete("/{key:str}", status_code=200, summary="Revoke a key at once")
    async def revoke(self, key: KeyRef, tenants: Store) -> Key:
        return await tenants.revoke_key(key, actor=ADMIN)


class NewAdmin(Struct, kw_only=True, forbid_unknown_fields=True):
    """An administrator's key to create."""

    name: Annotated[str, Meta(description="Who has it; the audit log says `admin:NAME`.")]
    role: Role
    tenant: Annotated[
        str | None, Meta(description="Only for this tenant and what is below it. null: all.")
    ] = None
    expires_at: ExpiresAt = None


class AdminKeyWithSecret(AdminKey, frozen=True, kw_only=True):
    """A new administrator's key with its secret, shown this once."""

    key: Annotated[str, Meta(description="The whole key. It cannot be shown again.")]

    @override
    def __repr__(self) -> str:
        return f"AdminKeyWithSecret(id={self.id!r}, …)"

    @override
    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.id)]


class AdminKeyList(Struct, kw_only=True):
    """All of them, by age."""

    data: list[AdminKey]
    object: Literal["list"] = "list"


class AuditList(Struct, kw_only=True):
    """Some acts, the newest first."""

    data: list[AuditLine]
    has_more: Annotated[bool, Meta(description="Older ones follow `last_id`.")]
    last_id: Annotated[int | None, Meta(description="Pass it as `before` to continue.")]
    object: Literal["list"] = "list"


class AdminController(Controller):
    """Administrators' keys."""

    path = "/admins"
    tags = ("admins",)
    opt = {"area": "admins"}  # noqa: RUF012  # the framework's form

    @post("/", summary="Create an administrator's key")
    async def create_admin(
        self, data: JSONBody[NewAdmin], admins: Administrators
    ) -> AdminKeyWithSecret:
        made = await admins.create(
            data.name, data.role, tenant=data.tenant, expires_at=data.expires_at, actor=ADMIN
        )
        return AdminKeyWithSecret(**asdict(made.key), key=made.secret.reveal())

    @get("/", summary="List administrators' keys")
    async def list_admins(self, admins: Administrators) -> AdminKeyList:
        return AdminKeyList(data=await admins.keys())

    @delete("/{admin_id:str}", status_code=200, summary="Revoke an administrator's key at once")
    async def revoke_admin(
        self,
        admin_id: Annotated[str, PathParameter(description="The key's id, or its public id.")],
        admins: Administrators,
    ) -> AdminKey:
        return await admins.revoke(admin_id, actor=ADMIN)


@get("/audit", tags=["audit"], opt={"area": "audit"}, summary="What administrators did")
async def audit(
    request: Request[Any, Any, Any],
    admins: Administrators,
    before: Annotated[int | None, QueryParameter(description="Older than this id.")] = None,
    limit: Annotated[int, QueryParameter(description="Lines, 1 to 1000.")] = 100,
    actor: Annotated[str | None, QueryParameter(description="Who; `admin:*` is a start.")] = None,
    action: Annotated[str | None, QueryParameter(description="Such as `key.*`.")] = None,
    of: Annotated[str | None, QueryParameter(name="object", description="`key/ID`.")] = None,
    since: Annotated[
        datetime | None, QueryParameter(name="from", description="Not before this time.")
    ] = None,
    until: Annotated[
        datetime | None, QueryParameter(name="to", description="Before this time.")
    ] = None,
) -> AuditList:
    """The newest first, each with what was there before and after. For who sees all tenants."""
    principal_of(request).require_all()
    page = await admins.audit(
        before=before, limit=limit, actor=actor, action=action, of=of, since=since, until=until
    )
    return AuditList(
        data=page.items,
        has_more=page.has_more,
        last_id=page.items[-1].id if page.items else None,
    )


def create_admin_router(tenants: Tenants, admin: Admin, ring: KeyRing) -> Router:
    """The routes under `/admin/v1`, guarded. Errors are GatewayErrors, for the app to render."""

    def seen(request: Request[Any, Any, Any]) -> Tenants:
        return tenants.seen_by(principal_of(request), request_id_of(request))

    def allowances(request: Request[Any, Any, Any]) -> Allowances:
        return Allowances(seen(request))

    def admins(request: Request[Any, Any, Any]) -> Admins:
        return Admins(seen(request), ring)

    return Router(
        path="/admin/v1",
        route_handlers=[
            TenantController,
            KeyController,
            LimitController,
            BudgetController,
            AdminController,
            audit,
        ],
        guards=[guard(admin)],
        opt={"caller": ADMIN},
        dependencies={
            "tenants": Provide(seen, sync_to_thread=False),
            "allowances": Provide(allowances, sync_to_thread=False),
            "admins": Provide(admins, sync_to_thread=False),
        },
        response_headers=[ResponseHeader(name="cache-control", value="private, no-store")],
    )


Shown = TypeVar("Shown", Tenant, Key)


def _last_id(page: Page[Shown]) -> str | None:
    return page.items[-1].id if page.items else None


def _seconds(value: float) -> timedelta:
    """As a timedelta; what is too much for one is simply too much for the store to accept."""
    return timedelta(seconds=min(max(value, -1.0), 1e12))


def _issued(issued: IssuedKey) -> KeyWithSecret:
    return KeyWithSecret(**asdict(issued.key), key=issued.secret.reveal())
