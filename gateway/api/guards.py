"""The guard of the admin API: who asks, by which role, for which part of the tree.

Invariant: fails closed. A route that names no area in its `opt` is refused to everybody.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.auth import Admin, read_credential
from gateway.roles import Principal, act_of
from telemetry.ids import new_request_id

Connection = ASGIConnection[Any, Any, Any, Any]


def guard(admin: Admin) -> Callable[[Connection, BaseRouteHandler], Awaitable[None]]:
    """Reading is GET, everything else is writing."""

    async def may_call(connection: Connection, handler: BaseRouteHandler) -> None:
        credential = read_credential(connection.scope["headers"], connection.scope["client"])
        principal = await admin.identify(credential)
        method = str(connection.scope.get("method", ""))
        principal.require(handler.opt.get("area"), act_of(method))
        connection.state.principal = principal
        connection.state.request_id = new_request_id()

    return may_call


def principal_of(request: Connection) -> Principal:
    """Whom the guard let in."""
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def request_id_of(request: Connection) -> str | None:
    """The id that the answer will carry, if the guard gave one."""
    found = request.state.get("request_id")
    return found if isinstance(found, str) else None
