"""Every fact of one request, in one value: the vocabulary of ledger, metrics and spans.

The record is written once, at settlement. Ledger rows, metric observations and spans are all
derived from it and nothing counts on its own, so the three can be reconciled by a test.
All `*_ns` are nanoseconds since the Unix epoch, taken from one monotonic clock per request.
"""

from decimal import Decimal
from enum import StrEnum
from typing import Final, Literal

from msgspec import Struct, field

from telemetry.ids import KeyId, RequestId, TenantId
from telemetry.timings import DeviceTime as DeviceTime
from telemetry.timings import Timings as Timings
from telemetry.usage import Usage, UsageQuality, UsageSource

Surface = Literal["chat", "completions", "embeddings", "responses", "messages", "count_tokens"]
# Where each is asked for, here and, below the version, at a backend.
SURFACE_PATHS: Final[dict[Surface, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
}
AttemptReason = Literal["primary", "retry", "fallback", "hedge"]


class Outcome(StrEnum):
    """How a request or an attempt ended. Also the `outcome` label of the metrics."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # refused: bad key, bad body, unknown model
    RATE_LIMITED = "rate_limited"
    BUDGET_REFUSED = "budget_refused"
    SHED = "shed"
    UPSTREAM_ERROR = "upstream_error"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"  # the stream was cut after content had been sent
    INTERNAL_ERROR = "internal_error"
    CLIENT_DISCONNECT = "client_disconnect"
    ABANDONED = "abandoned"  # nobody settled it (crash): closed by the sweeper, estimated


# What an operator answers for: neither served, nor refused for cause, nor left by the client.
FAILURES = frozenset(
    {
        Outcome.UPSTREAM_ERROR,
        Outcome.TIMEOUT,
        Outcome.TRUNCATED,
        Outcome.INTERNAL_ERROR,
        Outcome.ABANDONED,
    }
)


class Charge(Struct, frozen=True, kw_only=True, gc=False):
    """One priced line: quantity of one meter at one dated price. Exact at scale 15, never rounded.

    `amount` is None when no price is known ("unpriced"): alarmed, and never silently zero.
    """

    meter: str
    quantity: int
    unit: int  # the price is per this many, e.g. 1,000,000 tokens
    unit_price: Decimal | None
    amount: Decimal | None
    currency: str = "USD"
    price_id: str | None = None
    book: str | None = None  # name@version of the published price book


class Stage(Struct, frozen=True, gc=False):
    """One pipeline stage as it happened: the source of its span."""

    name: str  # auth | admit | cache.lookup | route | settle
    start_ns: int
    end_ns: int


class Attempt(Struct, kw_only=True):
    """One try at one backend. A row of the ledger, a CLIENT span, and what was billed for it."""

    attempt_no: int
    reason: AttemptReason
    backend: str  # the name in the config
    provider: str  # openai, anthropic, meterline.engine, … : gen_ai.provider.name
    model: str  # routed_model: what we asked the backend for
    span_id: str
    started_ns: int
    first_token_ns: int | None = None
    ended_ns: int | None = None
    outcome: Outcome | None = None
    http_status: int | None = None
    error_code: str | None = None
    answered_model: str | None = None
    provider_request_id: str | None = None
    service_tier: str | None = None
    finish_reasons: tuple[str, ...] = ()
    usage: Usage | None = None
    usage_source: UsageSource = UsageSource.NONE
    usage_quality: UsageQuality = UsageQuality.EXACT
    timings: Timings | None = None
    charges: tuple[Charge, ...] = ()


class RequestRecord(Struct, kw_only=True):
    """One request from the first byte read to settlement."""

    request_id: RequestId
    node: str  # which gateway process
    surface: Surface
    opened_ns: int
    deadline_ns: int
    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    sampled: bool = True
    tenant_id: TenantId | None = None  # None: refused before anyone was identified
    key_id: KeyId | None = None
    asked_model: str | None = None
    stream: bool = False
    client_request_id: str | None = None
    input_estimate: int = 0  # tokens, before the call
    output_limit: int | None = None  # max_tokens x n, if the client said
    stages: list[Stage] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    chunks: int = 0  # SSE events with content that were handed to the client's socket
    content_bytes: int = 0  # UTF-8 bytes of generated text in them
    ended_ns: int | None = None
    outcome: Outcome | None = None
    status: int | None = None  # HTTP status the client saw
    error_code: str | None = None

    @property
    def served(self) -> Attempt | None:
        """The attempt whose answer the client got (the last one that produced content)."""
        for attempt in reversed(self.attempts):
            if attempt.first_token_ns is not None:
                return attempt
        return None

    @property
    def keeps_trace(self) -> bool:
        """Whether spans are made of this record: its trace is sampled, or it failed on our side
        of the wire, which nobody should have to reproduce to see."""
        return self.sampled or self.outcome in FAILURES

    @property
    def charges(self) -> tuple[Charge, ...]:
        return tuple(charge for attempt in self.attempts for charge in attempt.charges)

    @property
    def cost(self) -> Decimal | None:
        """The sum of all priced lines; None if any line is unpriced."""
        total = Decimal(0)
        for charge in self.charges:
            if charge.amount is None:
                return None
            total += charge.amount
        return total
