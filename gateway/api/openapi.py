"""OpenAPI for the routes below the framework: it cannot see their bodies, so they say them here."""

from typing import Any

import msgspec
from litestar.openapi.spec import (
    OpenAPI,
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    PathItem,
    Reference,
    RequestBody,
    Schema,
)
from typing_extensions import override

from gateway.wire import (
    ChatBody,
    CompletionBody,
    CountBody,
    EmbeddingsBody,
    ErrorBody,
    MessagesBody,
    ResponsesBody,
)

_REFERENCE = "#/components/schemas/"
_ERRORS = {
    "400": "The body: `param` is the path of the field.",
    "401": "No key, or not a valid one.",
    "404": "The model does not exist for this key.",
    "413": "The body is too large.",
    "429": "A backend's rate limit.",
    "502": "No backend could answer.",
    "503": "Shutting down, or the ledger cannot take an intent.",
    "504": "A backend was too slow.",
}


def add_completions(document: OpenAPI) -> None:
    """Add the routes that a model answers to the generated document."""
    bodies: tuple[type, ...] = (
        *(ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody, MessagesBody, CountBody),
        ErrorBody,
    )
    _, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE + "{name}")
    schemas = document.components.schemas
    assert schemas is not None
    for name, schema in components.items():
        schemas[name] = _Raw(schema)
    paths = document.paths
    assert paths is not None
    paths["/v1/chat/completions"] = _path("ChatBody", "Chat completion", "chat")
    paths["/v1/completions"] = _path("CompletionBody", "Text completion", "completions")
    paths["/v1/embeddings"] = _path("EmbeddingsBody", "Embeddings", "embeddings")
    paths["/v1/responses"] = _path("ResponsesBody", "Response", "responses")
    paths["/v1/messages"] = _path("MessagesBody", "Message (Anthropic)", "messages")
    paths["/v1/messages/count_tokens"] = _path("CountBody", "Count tokens", "count_tokens")


class _Raw(Schema):
    """A schema that is already JSON."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__()
        self._data = data

    @override
    def to_schema(self) -> dict[str, Any]:
        return self._data


def _path(body: str, summary: str, tag: str) -> PathItem:
    problem = {"application/json": OpenAPIMediaType(schema=Reference(ref=_REFERENCE + "ErrorBody"))}
    responses: dict[str, OpenAPIResponse | Reference] = {
        "200": OpenAPIResponse(
            description="The answer; with `stream: true`, server-sent events.",
            content={
                "application/json": OpenAPIMediaType(schema=Schema()),
                "text/event-stream": OpenAPIMediaType(schema=Schema()),
            },
        ),
        **{
            status: OpenAPIResponse(description=text, content=problem)
            for status, text in _ERRORS.items()
        },
    }
    return PathItem(
        post=Operation(
            tags=[tag],
            summary=summary,
            description="As the OpenAI API; unknown fields are passed on. Caller: a tenant's key.",
            operation_id=f"{tag}_create",
            request_body=RequestBody(
                required=True,
                content={
                    "application/json": OpenAPIMediaType(schema=Reference(ref=_REFERENCE + body))
                },
            ),
            responses=responses,
        )
    )
