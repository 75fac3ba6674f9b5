"""`/admin/v1/backends`: each backend's servers as this replica sees them, and what is drained.

Parses, asks, renders, for whoever may see all tenants: backends are everybody's. No URL, address of
a socket or key is in an answer, but for the host and port that name a server."""

from typing import Annotated, Any

from litestar import Controller, Request, Router, get, post
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, PathParameter, SkipValidation
from msgspec import Meta, Struct

from gateway.api.guards import guard, principal_of, request_id_of
from gateway.auth import Admin
from gateway.drains import Drain, Drains
from gateway.errors import NotFound
from gateway.health import State
from gateway.pipeline import Gateway
from gateway.tenants import Tenants

ACTOR = "admin"

Store = NamedDependency[SkipValidation[Drains]]
Running = NamedDependency[SkipValidation[Gateway]]
BackendName = Annotated[str, PathParameter(description="The backend's name in the config.")]
Endpoint = Annotated[str, Meta(description="One of its servers, as listed; absent: all of it.")]


class ServerState(Struct, kw_only=True):
    """One server of a backend."""

    name: Annotated[str, Meta(description='Host and port; "": the only one.')]
    state: Annotated[str, Meta(description="ready, open, half_open, down or drained.")]
    in_flight: Annotated[int, Meta(description="Requests of this replica on it.")]
    running: Annotated[int | None, Meta(description="What it says that it computes.")] = None
    waiting: Annotated[int | None, Meta(description="What it says that waits there.")] = None
    kv_used: Annotated[float | None, Meta(description="Of its KV cache, 0 to 1.")] = None


class BackendState(Struct, kw_only=True):
    """A backend as this replica sees it."""

    name: str
    drained: bool
    servers: list[ServerState]


class BackendList(Struct, kw_only=True):
    """All of them."""

    data: list[BackendState]
    object: str = "list"


class WhichServer(Struct, kw_only=True, forbid_unknown_fields=True):
    """What an act is about."""

    endpoint: Endpoint = ""


class Resumed(Struct, kw_only=True):
    """Whether it had been out of service."""

    resumed: bool


def state_of(gateway: Gateway, name: str) -> BackendState:
    """One backend of the runtime in force."""
    health = gateway.runtimes.health
    members = gateway.runtimes.current.upstreams[name].members
    servers = {member.server.name: member.server for member in members}
    return BackendState(
        name=name,
        drained="drained" in health.held(name),
        servers=[
            ServerState(
                name=server.name,
                state=_word(gateway, name, server.name),
                in_flight=server.in_flight,
                running=server.load.running if server.load else None,
                waiting=server.load.waiting if server.load else None,
                kv_used=server.load.kv_used if server.load else None,
            )
            for server in servers.values()
        ],
    )


def _word(gateway: Gateway, backend: str, server: str) -> str:
    health = gateway.runtimes.health
    held = health.held(backend, server)
    if held:
        return "drained" if "drained" in held else "down"
    state = health.endpoint_state(backend, server)
    return "ready" if state is State.CLOSED else state.name.lower()


class BackendController(Controller):
    """Backends."""

    path = "/"
    tags = ("backends",)

    @get("/", summary="List backends and their servers")
    async def list_backends(self, request: Request[Any, Any, Any], gateway: Running) -> BackendList:
        principal_of(request).require_all()
        names = gateway.runtimes.current.upstreams
        return BackendList(data=[state_of(gateway, name) for name in names])

    @post("/{backend:str}/drain", status_code=200, summary="Take out of service")
    async def drain(
        self, backend: BackendName, data: JSONBody[WhichServer], drains: Store, gateway: Running
    ) -> Drain:
        """Nothing new goes there, within a second on all replicas; what runs there goes on."""
        if backend not in gateway.runtimes.current.upstreams:
            raise NotFound(f"There is no backend named {backend}.", param="backend")
        return await drains.drain(backend, data.endpoint, actor=ACTOR)

    @post("/{backend:str}/resume", status_code=200, summary="Put back into service")
    async def resume(
        self, backend: BackendName, data: JSONBody[WhichServer], drains: Store
    ) -> Resumed:
        return Resumed(resumed=await drains.resume(backend, data.endpoint, actor=ACTOR) is not None)


def create_backends_router(tenants: Tenants, gateway: Gateway, admin: Admin) -> Router:
    """The routes under `/admin/v1/backends`, guarded."""

    def drains(request: Request[Any, Any, Any]) -> Drains:
        principal = principal_of(request)
        principal.require_all()
        return Drains(tenants.seen_by(principal, request_id_of(request)))

    return Router(
        path="/admin/v1/backends",
        route_handlers=[BackendController],
        guards=[guard(admin)],
        opt={"caller": "admin", "area": "backends"},
        dependencies={
            "drains": Provide(drains, sync_to_thread=False),
            "gateway": Provide(lambda: gateway, sync_to_thread=False),
        },
        response_headers=[ResponseHeader(name="cache-control", value="private, no-store")],
    )
