"""`/v1/responses/{id}`: what was stored of a tenant's responses, read and deleted."""

from typing import Annotated, Any

from litestar import Request, Response, delete, get
from litestar.di import NamedDependency
from litestar.params import PathParameter, SkipValidation
from msgspec import Struct

from gateway.auth import read_credential
from gateway.pipeline import Gateway
from gateway.responses import ResponseStore

Running = NamedDependency[SkipValidation[Gateway]]
Store = NamedDependency[SkipValidation[ResponseStore]]
ResponseId = Annotated[str, PathParameter(description="As in the answer, `resp_…`.")]


class Deleted(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


@get("/v1/responses/{response_id:str}", opt={"caller": "tenant"}, tags=["responses"])
async def read_response(
    request: Request[Any, Any, Any], gateway: Running, responses: Store, response_id: ResponseId
) -> Response[bytes]:
    """A stored response, as it was answered. Caller: a key of the tenant it was made for."""
    caller = await gateway.auth.identify(read_credential(request.scope["headers"]))
    found = await responses.read(caller.tenant_id, response_id)
    return Response(found, media_type="application/json")


@delete("/v1/responses/{response_id:str}", opt={"caller": "tenant"}, status_code=200)
async def delete_response(
    request: Request[Any, Any, Any], gateway: Running, responses: Store, response_id: ResponseId
) -> Deleted:
    """Forget a stored response. Caller: a key of the tenant it was made for."""
    caller = await gateway.auth.identify(read_credential(request.scope["headers"]))
    await responses.forget(caller.tenant_id, response_id)
    return Deleted(id=response_id)
