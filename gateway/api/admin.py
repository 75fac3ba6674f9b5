"""`/admin/v1`: tenants and their keys, for whoever holds the admin key.

Parses, asks `Tenants`, renders. Must not know SQL or how keys are stored. Invariants: every route
is behind the admin guard and says so in `opt["caller"]`; a secret is in the answer to the request
that made it and nowhere else.
"""

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

from litestar import Controller, Router, delete, get, patch, post
from litestar.connection import ASGIConnection
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody, PathParameter, QueryParameter, SkipValidation
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import asdict
from typing_extensions import override

from gateway.api.limits import BudgetController, LimitController
from gateway.auth import Admin, read_credential
from gateway.budgets import Allowances
from gateway.tenants import (
    MAX_PAGE,
    IssuedKey,
    Key,
    KeyChange,
    Page,
    Tenant,
    Tenants,
)

ADMIN = "admin"  # the actor in the audit log, and who may call

Store = NamedDependency[SkipValidation[Tenants]]
TenantRef = Annotated[str, PathParameter(description="The tenant's id, or its name.")]
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
ExpiresAt = Annotated[
    datetime | None,
    Meta(description="When the key stops working, with time zone. null: never."),
]


class NewTenant(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Annotated[str, Meta(description="Unique among tenants that are not deleted.")]
    labels: Annotated[dict[str, str], Meta(description="Free facts, such as a cost centre.")] = (
        field(default_factory=dict)
    )


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
    expires_at: ExpiresAt = None


class KeyPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is absent stays."""

    name: Annotated[str, Meta(description="What it is for.")] | UnsetType = UNSET
    model_allow: ModelAllow | UnsetType = UNSET
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

    @post("/", summary="Create a tenant")
    async def create(self, data: JSONBody[NewTenant], tenants: Store) -> Tenant:
        return await tenants.create_tenant(data.name, data.labels, actor=ADMIN)

    @get("/", summary="List tenants")
    async def list_tenants(
        self, tenants: Store, after: After = None, limit: Limit = 20
    ) -> TenantList:
        page = await tenants.tenants(after=after, limit=limit)
        return TenantList(
            data=page.items,
            has_more=page.has_more,
            last_id=_last_id(page),
        )

    @get("/{tenant:str}", summary="Show a tenant")
    async def show(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.tenant(tenant)

    @post("/{tenant:str}/suspend", status_code=200, summary="Refuse all keys of a tenant")
    async def suspend(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.suspend_tenant(tenant, actor=ADMIN)

    @post("/{tenant:str}/resume", status_code=200, summary="Accept a tenant's keys again")
    async def resume(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.resume_tenant(tenant, actor=ADMIN)

    @delete("/{tenant:str}", status_code=200, summary="Delete a tenant and revoke its keys")
    async def delete(self, tenant: TenantRef, tenants: Store) -> Tenant:
        return await tenants.delete_tenant(tenant, actor=ADMIN)

    @post("/{tenant:str}/keys", summary="Create a key")
    async def create_key(
        self, tenant: TenantRef, data: JSONBody[NewKey], tenants: Store
    ) -> KeyWithSecret:
        issued = await tenants.create_key(
            tenant,
            name=data.name,
            model_allow=data.model_allow,
            expires_at=data.expires_at,
            actor=ADMIN,
        )
        return _issued(issued)

    @get("/{tenant:str}/keys", summary="List a tenant's keys")
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

    @get("/{key:str}", summary="Show a key")
    async def show(self, key: KeyRef, tenants: Store) -> Key:
        return await tenants.key(key)

    @post("/{key:str}/rotate", summary="Replace a key by a new one")
    async def rotate(self, key: KeyRef, data: JSONBody[Rotation], tenants: Store) -> KeyWithSecret:
        return _issued(await tenants.rotate_key(key, _seconds(data.grace_s), actor=ADMIN))

    @patch("/{key:str}", summary="Change name, models or expiry of a key")
    async def change(self, key: KeyRef, data: JSONBody[KeyPatch], tenants: Store) -> Key:
        change = KeyChange(name=data.name, model_allow=data.model_allow, expires_at=data.expires_at)
        return await tenants.change_key(key, change, actor=ADMIN)

    @delete("/{key:str}", status_code=200, summary="Revoke a key at once")
    async def revoke(self, key: KeyRef, tenants: Store) -> Key:
        return await tenants.revoke_key(key, actor=ADMIN)


def create_admin_router(tenants: Tenants, admin: Admin) -> Router:
    """The routes under `/admin/v1`, guarded. Errors are GatewayErrors, for the app to render."""

    def admins_only(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        admin.check(read_credential(connection.scope["headers"]))

    allowances = Allowances(tenants)
    return Router(
        path="/admin/v1",
        route_handlers=[TenantController, KeyController, LimitController, BudgetController],
        guards=[admins_only],
        opt={"caller": ADMIN},
        dependencies={
            "tenants": Provide(lambda: tenants, sync_to_thread=False),
            "allowances": Provide(lambda: allowances, sync_to_thread=False),
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
