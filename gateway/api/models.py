"""`GET /v1/models`: what the caller's key may ask for."""

from typing import Annotated, Any

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import PathParameter, SkipValidation

from gateway.auth import Caller, read_credential
from gateway.errors import ModelUnknown
from gateway.pipeline import Gateway
from gateway.wire import Model, ModelList

Running = NamedDependency[SkipValidation[Gateway]]
ModelName = Annotated[str, PathParameter(description="As in the list. May hold slashes.")]


async def _caller(request: Request[Any, Any, Any], gateway: Gateway) -> Caller:
    credential = read_credential(request.scope["headers"], request.scope["client"])
    caller = await gateway.auth.identify(credential)
    caller.require("models")
    return caller


@get("/v1/models", opt={"caller": "tenant"}, tags=["models"], summary="List models")
async def list_models(request: Request[Any, Any, Any], gateway: Running) -> ModelList:
    """The models that this key can use. Caller: a tenant's key."""
    caller = await _caller(request, gateway)
    runtime = gateway.runtimes.current
    return ModelList(
        data=[Model(id=name, created=runtime.created) for name in runtime.models(caller)]
    )


@get("/v1/models/{model:path}", opt={"caller": "tenant"}, tags=["models"], summary="One model")
async def one_model(request: Request[Any, Any, Any], gateway: Running, model: ModelName) -> Model:
    """One model; names may hold slashes, encoded or not. Caller: a tenant's key."""
    caller = await _caller(request, gateway)
    runtime = gateway.runtimes.current
    name = model.lstrip("/")
    if name not in runtime.models(caller):
        raise ModelUnknown(
            f"The model '{name[:100]}' does not exist or you do not have access to it.",
            param="model",
        )
    return Model(id=name, created=runtime.created)
