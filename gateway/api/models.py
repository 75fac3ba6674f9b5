"""`GET /v1/models`: what the caller's key may ask for."""

from datetime import UTC, datetime
from typing import Annotated, Any

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import PathParameter, SkipValidation

from gateway.auth import Caller, read_credential
from gateway.errors import ModelUnknown
from gateway.pipeline import Gateway
from gateway.wire import AnthropicModel, AnthropicModelList, Model, ModelList

Running = NamedDependency[SkipValidation[Gateway]]
ModelName = Annotated[str, PathParameter(description="As in the list. May hold slashes.")]


async def _caller(request: Request[Any, Any, Any], gateway: Gateway) -> Caller:
    return await gateway.auth.identify(read_credential(request.scope["headers"]))


@get("/v1/models", opt={"caller": "tenant"}, tags=["models"], summary="List models")
async def list_models(
    request: Request[Any, Any, Any], gateway: Running
) -> ModelList | AnthropicModelList:
    """The models that this key can use; in Anthropic's form for its clients. Caller: a tenant's
    key."""
    caller = await _caller(request, gateway)
    runtime = gateway.runtimes.current
    if "anthropic-version" in request.headers:
        names = runtime.models(caller)
        return AnthropicModelList(
            data=[_anthropic(name, runtime.created) for name in names],
            first_id=names[0] if names else None,
            last_id=names[-1] if names else None,
        )
    return ModelList(
        data=[Model(id=name, created=runtime.created) for name in runtime.models(caller)]
    )


@get("/v1/models/{model:path}", opt={"caller": "tenant"}, tags=["models"], summary="One model")
async def one_model(
    request: Request[Any, Any, Any], gateway: Running, model: ModelName
) -> Model | AnthropicModel:
    """One model; names may hold slashes, encoded or not. Caller: a tenant's key."""
    caller = await _caller(request, gateway)
    runtime = gateway.runtimes.current
    name = model.lstrip("/")
    if name not in runtime.models(caller):
        raise ModelUnknown(
            f"The model '{name[:100]}' does not exist or you do not have access to it.",
            param="model",
        )
    if "anthropic-version" in request.headers:
        return _anthropic(name, runtime.created)
    return Model(id=name, created=runtime.created)


def _anthropic(name: str, created: int) -> AnthropicModel:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=name, display_name=name, created_at=at)
