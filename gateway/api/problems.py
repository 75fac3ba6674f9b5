"""GatewayError → the OpenAI error body and its headers. The only place that renders an error."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Send

from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    GatewayError,
    Internal,
    MethodNotAllowed,
    NotFound,
    Unauthenticated,
    UnsupportedMedia,
)
from gateway.wire import ErrorBody, Problem
from telemetry.ids import minted_ms, new_request_id

log = logging.getLogger(__name__)

OUR_SIDE = "An error on our side. Retry, and quote the x-request-id if it stays."

# On every answer, errors and streams too (WIRE.md 2).
COMMON_HEADERS = (
    (b"cache-control", b"private, no-store"),
    (b"vary", b"Authorization"),
    (b"x-content-type-options", b"nosniff"),
    (b"openai-version", b"2020-10-01"),
)


def body(error: GatewayError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        ErrorBody(
            Problem(message=error.message, type=error.type, param=error.param, code=error.code)
        )
    )


def headers(error: GatewayError, request_id: str) -> list[tuple[bytes, bytes]]:
    """Retry hints as the SDKs read them: `x-should-retry` overrides their own judgement."""
    result = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id.encode()),
        (b"openai-processing-ms", str(_age_ms(request_id)).encode()),
        (b"x-should-retry", b"true" if error.retryable else b"false"),
        *COMMON_HEADERS,
    ]
    if error.retry_after_s is not None:
        result.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        result.append((b"retry-after-ms", str(math.ceil(error.retry_after_s * 1000)).encode()))
    if isinstance(error, Unauthenticated):
        result.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        result.append((b"allow", ", ".join(error.allowed).encode()))
    return result


def _age_ms(request_id: str) -> int:
    """How long the request has been with us: its id was made when it began."""
    return max(0, time.time_ns() // 1_000_000 - minted_ms(request_id))


async def send_problem(
    send: Send,
    error: GatewayError,
    request_id: str,
    *,
    close: bool,
    more: Mapping[str, str] | None = None,
    content: bytes | None = None,
) -> None:
    """Answer with the error. `close`: the request's body was not read to its end. `content`: its
    body, where that is not OpenAI's."""
    content = content or body(error)
    head = [*headers(error, request_id), (b"content-length", str(len(content)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    if close:
        head.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": head})
    await send({"type": "http.response.body", "body": content, "more_body": False})


_BY_STATUS: dict[int, type[GatewayError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    413: BodyTooLarge,
    415: UnsupportedMedia,
}


def stamp(response: Response[Any]) -> Response[Any]:
    """The headers of every answer, on those that the framework makes."""
    for name, value in COMMON_HEADERS:
        response.headers.setdefault(name.decode(), value.decode())
    response.headers.setdefault("x-request-id", new_request_id())
    return response


def from_framework(error: HTTPException, path: str) -> GatewayError:
    """What the framework raised, as one of ours."""
    match error.status_code:
        case 404:
            return NotFound(f"Unknown request URL: {path[:200]}. See /schema for what exists.")
        case 405:
            allowed = (error.headers or {}).get("allow", "")
            return MethodNotAllowed(
                f"This method is not allowed for {path[:200]}.",
                allowed=[method for method in allowed.replace(" ", "").split(",") if method],
            )
    param, detail = None, error.detail
    extra = error.extra
    if isinstance(extra, list) and extra and isinstance(extra[0], dict):
        key = extra[0].get("key")
        param = None if key == "data" else key  # the framework's name for the body as a whole
        detail = str(extra[0].get("message", detail))
    return _BY_STATUS.get(error.status_code, Internal)(detail or "The request failed.", param=param)


def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The exception handler of every route that litestar runs."""
    request_id = new_request_id()
    if isinstance(error, GatewayError):
        problem = error
    elif isinstance(error, HTTPException) and error.status_code < 500:
        problem = from_framework(error, request.url.path)
    else:
        log.error(
            "request_failed",
            exc_info=error,
            extra={"path": request.url.path, "request_id": request_id},
        )
        problem = Internal(OUR_SIDE)
    return Response(
        body(problem),
        status_code=problem.status,
        media_type="application/json",
        headers={
            name.decode(): value.decode()
            for name, value in headers(problem, request_id)
            if name != b"content-type"
        },
    )
