"""The gateway's error tree. Leaves are events, and carry all that the edge needs to render them.

GatewayError
├─ Unauthenticated      401  no key, or not a valid one
├─ Forbidden            403  a valid key that may not do this
├─ BadRequest           400  the body; `param` is the path of the field
├─ ContextTooLong       400
├─ ModelUnknown         404
├─ NotFound             404  anything else that is not there
├─ MethodNotAllowed     405
├─ RequestTimeout       408  the client was too slow in sending its request
├─ Conflict             409
├─ BodyTooLarge         413
├─ IdempotencyMismatch  422  the key was used with another body (409 would be retried)
├─ UnsupportedMedia     415
├─ HeadersTooLarge      431
├─ Draining             503  shutting down
├─ LedgerUnavailable    503  the write-ahead log cannot take an intent: nothing is admitted
├─ StoreUnavailable     503  the database cannot be reached (admin writes, unknown keys)
├─ RateLimited          429  a limit on requests or tokens; says which, and when it frees
├─ ConcurrencyFull      429  too many requests at the same time
├─ BudgetSpent          429  a budget; not to be retried
├─ LimitsUnavailable    503  the store of the counters is away, and a limit is strict
├─ UpstreamError        502  every attempt failed; the cause decides code and retry hints
├─ UpstreamTimeout      504
├─ UpstreamRateLimited  429
├─ Internal             500
└─ ClientGone           499  only in logs and the ledger: there is no one left to answer

Rendering is in `api/problems.py`, the meaning of each code in docs/reference/errors.md.
"""

from collections.abc import Sequence
from typing import ClassVar

from telemetry.record import Outcome


class GatewayError(Exception):
    """Never raised itself. The message tells the caller what to do next, and holds no secret."""

    status: ClassVar[int] = 500
    type: str = "server_error"
    code: str = "internal_error"
    outcome: ClassVar[Outcome] = Outcome.INTERNAL_ERROR
    retryable: ClassVar[bool] = False  # becomes x-should-retry

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        type: str | None = None,
        code: str | None = None,
    ) -> None:
        """`type` and `code` replace the class's own only where an upstream's are passed on."""
        super().__init__(message)
        if type is not None:
            self.type = type
        if code is not None:
            self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class Unauthenticated(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    outcome = Outcome.CLIENT_ERROR


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"
    code = "forbidden"
    outcome = Outcome.CLIENT_ERROR


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"
    outcome = Outcome.CLIENT_ERROR


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class ModelUnknown(GatewayError):
    """Also raised for a model that this key may not see: existence is not disclosed."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    outcome = Outcome.CLIENT_ERROR


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"
    outcome = Outcome.CLIENT_ERROR


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    outcome = Outcome.CLIENT_ERROR

    def __init__(self, message: str, *, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    outcome = Outcome.CLIENT_ERROR
    retryable = True


class Conflict(GatewayError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"
    outcome = Outcome.CLIENT_ERROR


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    outcome = Outcome.CLIENT_ERROR


class IdempotencyMismatch(GatewayError):
    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"
    outcome = Outcome.CLIENT_ERROR


class UnsupportedMedia(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"
    outcome = Outcome.CLIENT_ERROR


class HeadersTooLarge(GatewayError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"
    outcome = Outcome.CLIENT_ERROR


class Draining(GatewayError):
    status = 503
    type = "server_error"
    code = "shutting_down"
    outcome = Outcome.SHED
    retryable = True


class LedgerUnavailable(GatewayError):
    status = 503
    type = "server_error"
    code = "ledger_unavailable"
    retryable = True


class StoreUnavailable(GatewayError):
    status = 503
    type = "server_error"
    code = "store_unavailable"
    retryable = True


class RateLimited(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = Outcome.RATE_LIMITED
    retryable = True


class TooLargeForLimit(RateLimited):
    """This request alone is more than the limit: waiting does not help."""

    retryable = False


class ConcurrencyFull(RateLimited):
    pass


class BudgetSpent(GatewayError):
    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    outcome = Outcome.BUDGET_REFUSED


class LimitsUnavailable(GatewayError):
    status = 503
    code = "limits_unavailable"
    outcome = Outcome.SHED
    retryable = True


class UpstreamError(GatewayError):
    """`code` is the backend error's (upstream_unavailable, upstream_auth, …)."""

    status = 502
    type = "upstream_error"
    code = "upstream_error"
    outcome = Outcome.UPSTREAM_ERROR
    retryable = True


class CircuitOpen(UpstreamError):
    """Every backend of the route is left alone for now; `retry_after_s` says how long."""

    status = 503
    code = "upstream_circuit_open"


class UpstreamTimeout(UpstreamError):
    status = 504
    type = "timeout"
    code = "upstream_timeout"
    outcome = Outcome.TIMEOUT


class UpstreamRateLimited(UpstreamError):
    status = 429
    type = "rate_limit_error"
    code = "upstream_rate_limited"


class Internal(GatewayError):
    retryable = True


class ClientGone(GatewayError):
    status = 499
    code = "client_disconnect"
    outcome = Outcome.CLIENT_DISCONNECT
