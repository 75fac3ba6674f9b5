"""Roles of administrators: who may do what, in one table. Pure.

Must not know how a principal proved who it is. Invariant: what is not granted here is refused; a
principal with a tenant sees and changes that tenant and what is below it, and nothing else.
"""

from typing import Final, Literal, get_args

from msgspec import Struct

from gateway.errors import Forbidden
from telemetry.ids import TenantId

Role = Literal["owner", "admin", "billing", "member", "viewer"]
Area = Literal["tenants", "keys", "limits", "budgets", "reports", "audit", "admins"]
Act = Literal["read", "write"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
AREAS: Final[tuple[Area, ...]] = get_args(Area)

_ALL: Final = frozenset(AREAS)
_COMMON: Final = _ALL - {"audit", "admins"}
READ: Final[dict[Role, frozenset[Area]]] = {
    "owner": _ALL,
    "admin": _ALL,
    "billing": _COMMON | {"audit"},
    "member": _COMMON,
    "viewer": _COMMON,
}
WRITE: Final[dict[Role, frozenset[Area]]] = {
    "owner": _ALL,
    "admin": _ALL - {"admins"},
    "billing": frozenset({"budgets"}),
    "member": frozenset({"keys"}),
    "viewer": frozenset(),
}


class Principal(Struct, frozen=True, kw_only=True):
    """Who administers. `name` is what the audit log calls it."""

    name: str
    role: Role
    tenant_id: TenantId | None = None  # its part of the tree; None: all of it

    def require(self, area: str | None, act: Act) -> None:
        """Raises Forbidden. An area that nobody named is nobody's."""
        granted = READ if act == "read" else WRITE
        if area in granted[self.role]:
            return
        allowed = roles_for(area, act)
        what = "cannot be called" if not allowed else f"is for {', '.join(allowed)}"
        raise Forbidden(f"Your role is {self.role}, and this {what}.", code="insufficient_role")

    def require_all(self) -> None:
        """Raises Forbidden for who has a part of the tree only."""
        if self.tenant_id is not None:
            raise Forbidden(
                "This is about all tenants, and your role is for one and what is below it.",
                code="insufficient_role",
            )


def roles_for(area: str | None, act: Act) -> list[Role]:
    """Who may do this, most powerful first."""
    granted = READ if act == "read" else WRITE
    return [role for role in ROLES if area in granted[role]]


def act_of(method: str) -> Act:
    return "read" if method in ("GET", "HEAD") else "write"


__all__ = ["AREAS", "ROLES", "Act", "Area", "Principal", "Role", "act_of", "roles_for"]
