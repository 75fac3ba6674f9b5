"""Administrators: their keys, and the audit log of all that was done.

Knows SQL through `Tenants`. Must not know HTTP. Invariants: an administrator's key is stored as its
HMAC only; nobody grants more than they have themselves; an audit line, once written, stays.
"""

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from sqlalchemy import select

from gateway.errors import BadRequest, Forbidden, NotFound, Unauthenticated
from gateway.keys import ADMIN_KEY, ADMIN_PREFIX, KeyRing
from gateway.roles import ROLES, Principal, Role
from gateway.tenant_tables import MAX_KEY_NAME_CHARS, AdminKeyRow, AuditRow
from gateway.tenants import Page, Tenants, find_tenant, is_within
from telemetry.ids import TenantId, new_key_id
from telemetry.redaction import Secret

MAX_AUDIT_PAGE: Final = 1000
WRONG: Final = "Incorrect admin key given. Tenant keys do not open the admin API."


class AdminKey(Struct, frozen=True, kw_only=True):
    """An administrator's key as it may be shown."""

    id: str
    public_id: Annotated[str, Meta(description="The readable part: `sk-ml-admin-PUBLICID-…`.")]
    name: str
    role: Role
    tenant_id: Annotated[
        TenantId | None, Meta(description="For this tenant and what is below it. null: all.")
    ]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class IssuedAdminKey(Struct, frozen=True, kw_only=True):
    """A new key and, this once, its secret."""

    key: AdminKey
    secret: Secret


class AuditLine(Struct, frozen=True, kw_only=True):
    """One administrative act."""

    id: int
    at: datetime
    actor: Annotated[str, Meta(description="Who did it: admin, admin:NAME, token:…, cli:USER.")]
    action: Annotated[str, Meta(description="tenant.create, key.revoke, budget.set, …")]
    object: Annotated[str, Meta(description="What it was done to, such as `key/ID`.")]
    before: Annotated[Any, Meta(description="As it was; null: it was not there.")]
    after: Annotated[Any, Meta(description="As it is since; null: it is gone.")]
    request_id: Annotated[str | None, Meta(description="The `x-request-id` of the API's answer.")]


class Admins:
    """Administrators' keys and the audit log, on the database of `tenants`, as its view sees it."""

    def __init__(self, tenants: Tenants, ring: KeyRing) -> None:
        self._tenants = tenants
        self._ring = ring

    async def identify(self, text: str, now: datetime) -> Principal:
        """Raises Unauthenticated. Asks the database each time: there is nothing to go stale."""
        match = ADMIN_KEY.fullmatch(text)
        if match is None or not self._ring.made(match[1]):
            raise Unauthenticated(WRONG)
        async with self._tenants.reading() as db:
            row = await db.scalar(select(AdminKeyRow).where(AdminKeyRow.public_id == match[1]))
        if row is None or not self._ring.is_match(text, row.secret_hmac):
            raise Unauthenticated(WRONG)
        if row.revoked_at is not None:
            raise Unauthenticated("This admin key is revoked.")
        if row.expires_at is not None and row.expires_at <= now:
            raise Unauthenticated("This admin key has expired.")
        key = _shown(row)
        return Principal(name=f"admin:{key.name}", role=key.role, tenant_id=key.tenant_id)

    async def create(
        self,
        name: str,
        role: str,
        *,
        tenant: str | None = None,
        expires_at: datetime | None = None,
        actor: str,
    ) -> IssuedAdminKey:
        """`tenant`: id, path or name; None: for all tenants."""
        if not 0 < len(name) <= MAX_KEY_NAME_CHARS or not name.isprintable():
            raise BadRequest(
                f"A name is 1 to {MAX_KEY_NAME_CHARS} printable characters.", param="name"
            )
        if role not in ROLES:
            raise BadRequest(f"A role is one of {', '.join(ROLES)}.", param="role")
        if expires_at is not None and expires_at.tzinfo is None:
            raise BadRequest("The expiry needs a time zone, such as Z.", param="expires_at")
        async with self._tenants.writing(actor) as write:
            if expires_at is not None and expires_at <= write.at:
                raise BadRequest("The expiry must be in the future.", param="expires_at")
            if tenant is None and self._tenants.within is not None:
                raise Forbidden("Name a tenant of your part of the tree.", param="tenant")
            top = None if tenant is None else await find_tenant(write.db, tenant)
            minted = self._ring.mint(ADMIN_PREFIX)
            row = AdminKeyRow(
                id=new_key_id(write.now_ns),
                public_id=minted.public_id,
                name=name,
                role=role,
                tenant_id=None if top is None else top.id,
                secret_hmac=minted.digest,
                created_at=write.at,
                expires_at=expires_at,
            )
            write.db.add(row)
            await write.db.flush()
            write.record("admin.create", f"admin/{row.id}", None, _shown(row))
            return IssuedAdminKey(key=_shown(row), secret=minted.secret)

    async def keys(self) -> list[AdminKey]:
        """All of them, revoked ones too, by age."""
        async with self._tenants.reading() as db:
            rows = (await db.scalars(select(AdminKeyRow).order_by(AdminKeyRow.id))).all()
            return [_shown(row) for row in rows if await _is_seen(db, row)]

    async def revoke(self, ref: str, *, actor: str) -> AdminKey:
        """At once and for good; a second time changes nothing. By id or public id."""
        async with self._tenants.writing(actor) as write:
            row = await write.db.scalar(
                select(AdminKeyRow).where((AdminKeyRow.id == ref) | (AdminKeyRow.public_id == ref))
            )
            if row is None or not await _is_seen(write.db, row):
                raise NotFound("No such admin key.")
            before = _shown(row)
            if row.revoked_at is None:
                row.revoked_at = write.at
                write.record("admin.revoke", f"admin/{row.id}", before, _shown(row))
            return _shown(row)

    async def audit(
        self,
        *,
        before: int | None = None,
        limit: int = 100,
        actor: str | None = None,
        action: str | None = None,
        of: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Page[AuditLine]:
        """The newest first. `action` and `of` may end in `*`: `key.*`, `tenant/*`."""
        if not 1 <= limit <= MAX_AUDIT_PAGE:
            raise BadRequest(f"A page has 1 to {MAX_AUDIT_PAGE} lines.", param="limit")
        for name, at in (("from", since), ("to", until)):
            if at is not None and at.tzinfo is None:
                raise BadRequest("The time needs a time zone, such as Z.", param=name)
        if since is not None and until is not None and since >= until:
            raise BadRequest("This ends before it begins; swap from and to.", param="to")
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(AuditRow.id < before)
        for column, wanted in (
            (AuditRow.actor, actor), (AuditRow.action, action), (AuditRow.object, of),
        ):  # fmt: skip
            if wanted is not None and wanted.endswith("*"):
                query = query.where(column.startswith(wanted[:-1], autoescape=True))
            elif wanted is not None:
                query = query.where(column == wanted)
        if since is not None:
            query = query.where(AuditRow.at >= since)
        if until is not None:
            query = query.where(AuditRow.at < until)
        async with self._tenants.reading() as db:
            rows = (await db.scalars(query)).all()
        lines = [msgspec.convert(row, AuditLine, from_attributes=True) for row in rows[:limit]]
        return Page(lines, len(rows) > limit)


def _shown(row: AdminKeyRow) -> AdminKey:
    return msgspec.convert(row, AdminKey, from_attributes=True)


async def _is_seen(db: Any, row: AdminKeyRow) -> bool:
    """Who has a part of the tree sees the keys for that part, not those for all."""
    if row.tenant_id is None:
        return bool(db.info.get("within") is None)
    return await is_within(db, row.tenant_id)


__all__ = ["AdminKey", "Admins", "AuditLine", "IssuedAdminKey"]
