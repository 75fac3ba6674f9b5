"""What a tenant may use: limits and budgets as values, checked, and the windows of budgets.

Pure. Must not know databases, callers or how anything is counted. Amounts are exact: whole numbers,
or dollars with up to nine decimals, which are counted in whole nano-dollars.
Zero means none allowed; a limit that does not exist means no limit.
"""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Meta, Struct

from gateway.errors import BadRequest

Scope = Literal["tenant", "key", "user", "route", "model"]
BudgetScope = Literal["tenant", "key", "route"]
Counts = Literal["requests", "input_tokens", "output_tokens", "tokens", "concurrency", "spend"]
WindowKind = Literal["hour", "day", "week", "month", "lifetime", "rolling"]
Mode = Literal["hard", "soft", "throttle", "downgrade"]

NANO: Final = 1_000_000_000  # nano-dollars in a dollar
MOST: Final = 9_000_000_000_000_000  # counted exactly everywhere; as money, nine million dollars
LEAST_BUDGET: Final = Decimal("0.000001")  # no request costs less
MAX_PERIOD_S: Final = 31 * 86_400
MAX_HOURS: Final = 24 * 366
MAX_SUBJECT_CHARS: Final = 256
SMALLEST_DIGIT: Final = 9  # of an amount: a nano-dollar
ZONE: Final = re.compile(r"[A-Za-z0-9_+/-]{1,64}")


class Limit(Struct, frozen=True, kw_only=True):
    """So much of something per period, for one subject or for each of its kind."""

    id: str
    tenant_id: str
    scope: Annotated[Scope, Meta(description="Whose use is counted, within the tenant.")]
    subject: Annotated[
        str | None,
        Meta(description="The key's id, the user, the route or the model; null: each of them."),
    ]
    counts: Counts
    amount: Annotated[Decimal, Meta(description="0: none allowed. Of spend: US dollars.")]
    per_s: Annotated[int | None, Meta(description="The period; null for concurrency.")]
    strict: Annotated[
        bool,
        Meta(description="With the store away: refuse (true), or go on within a slice (false)."),
    ]

    @property
    def units(self) -> int:
        return units(self.amount, money=self.counts == "spend")


class Budget(Struct, frozen=True, kw_only=True):
    """So much money per window."""

    id: str
    tenant_id: str
    scope: Annotated[BudgetScope, Meta(description="Whose spend is counted, within the tenant.")]
    subject: Annotated[
        str | None, Meta(description="The key's id or the route; null: each of them.")
    ]
    amount_usd: Annotated[Decimal, Meta(description="US dollars. 0: none allowed.")]
    window: WindowKind
    hours: Annotated[int | None, Meta(description="Length of a rolling window.")]
    zone: Annotated[str, Meta(description="IANA time zone in which calendar windows begin.")]
    mode: Annotated[
        Mode,
        Meta(
            description="When spent. hard: refuse; soft: alert; throttle: go on slowly; downgrade: "
            "go on with a cheaper model."
        ),
    ]
    strict: Annotated[
        bool,
        Meta(description="With the store away: refuse (true), or go on within a slice (false)."),
    ]
    downgrade_to: Annotated[
        str | None,
        Meta(description="Of mode downgrade: the route that is cheaper; null: the route's own."),
    ] = None

    @property
    def units(self) -> int:
        return units(self.amount_usd, money=True)


def units(amount: Decimal, *, money: bool) -> int:
    """As it is counted: nano-dollars, or the number itself."""
    return int(amount * NANO) if money else int(amount)


def check_limit(
    scope: str, subject: str | None, counts: Counts, amount: Decimal, per_s: int | None
) -> None:
    """Raises BadRequest with the field's path and what to do."""
    _check_subject(scope, subject)
    _check_amount(amount, "amount", money=counts == "spend")
    if counts == "concurrency":
        if per_s is not None:
            raise BadRequest("Concurrency has no period: leave per_s out.", param="per_s")
    elif per_s is None:
        raise BadRequest("Say per how many seconds, such as 60.", param="per_s")
    elif not 1 <= per_s <= MAX_PERIOD_S:
        raise BadRequest(
            f"A period is 1 to {MAX_PERIOD_S} seconds; use a budget for more.", param="per_s"
        )


def check_budget(
    scope: str,
    subject: str | None,
    amount_usd: Decimal,
    window: WindowKind,
    hours: int | None,
    zone: str,
    mode: Mode = "hard",
    downgrade_to: str | None = None,
) -> None:
    """Raises BadRequest with the field's path and what to do."""
    _check_subject(scope, subject)
    _check_downgrade(scope, subject, mode, downgrade_to)
    _check_amount(amount_usd, "amount_usd", money=True)
    if 0 < amount_usd < LEAST_BUDGET:
        raise BadRequest(
            f"A budget below ${LEAST_BUDGET} is smaller than one request; write 0 to allow none.",
            param="amount_usd",
        )
    if window == "rolling":
        if hours is None or not 1 <= hours <= MAX_HOURS:
            raise BadRequest(f"A rolling window is 1 to {MAX_HOURS} hours long.", param="hours")
    elif hours is not None:
        raise BadRequest("Only a rolling window has hours.", param="hours")
    try:
        if not ZONE.fullmatch(zone):
            raise ZoneInfoNotFoundError(zone)
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadRequest(
            "No such time zone; write an IANA name, such as Europe/Berlin or UTC.", param="zone"
        ) from None


def _check_subject(scope: str, subject: str | None) -> None:
    if scope == "tenant":
        if subject is not None:
            raise BadRequest("The tenant is the subject itself: leave it out.", param="subject")
    elif subject is not None and (
        not 0 < len(subject) <= MAX_SUBJECT_CHARS or not subject.isprintable()
    ):
        raise BadRequest(
            f"A subject is 1 to {MAX_SUBJECT_CHARS} printable characters; leave it out for each.",
            param="subject",
        )


def _check_downgrade(scope: str, subject: str | None, mode: Mode, to: str | None) -> None:
    if to is None:
        return
    if mode != "downgrade":
        raise BadRequest(
            f"Mode {mode} stays with the model: leave it out, or set mode downgrade.",
            param="downgrade_to",
        )
    if not 0 < len(to) <= MAX_SUBJECT_CHARS or not to.isprintable():
        raise BadRequest("Write the model of a route that is cheaper.", param="downgrade_to")
    if scope == "route" and to == subject:
        raise BadRequest(
            "This budget is of that route itself: name another, cheaper one.", param="downgrade_to"
        )


def _check_amount(amount: Decimal, field: str, *, money: bool) -> None:
    if not amount.is_finite() or amount < 0:
        raise BadRequest("It cannot be negative; 0 allows none.", param=field)
    if amount > (MOST // NANO if money else MOST):  # first: the product of a huge one overflows
        most = f"${MOST // NANO}" if money else str(MOST)
        raise BadRequest(f"At most {most}; leave the limit out to allow all.", param=field)
    scaled = amount * NANO if money else amount
    if amount.adjusted() < -SMALLEST_DIGIT or scaled != scaled.to_integral_value():
        what = "at most nine decimals" if money else "a whole number"
        raise BadRequest(f"Write {what}.", param=field)


class Window(Struct, frozen=True):
    """Microseconds since the Unix epoch; `end_us` None: it never ends by the calendar."""

    start_us: int
    end_us: int | None


def window_of(budget: Budget, now_us: int) -> Window:
    """The budget's window at a time. Calendar windows begin in the budget's own zone, so a day has
    23, 24 or 25 hours."""
    if budget.window in ("lifetime", "rolling"):
        return Window(0, None)
    now = datetime.fromtimestamp(now_us // 1_000_000, UTC)
    zone = ZoneInfo(budget.zone)
    local = now.astimezone(zone)
    if budget.window == "hour":  # by elapsed time, so that a repeated hour is two windows
        start = now - timedelta(minutes=local.minute, seconds=local.second)
        return Window(_us(start), _us(start + timedelta(hours=1)))
    midnight = datetime(local.year, local.month, local.day)  # noqa: DTZ001  # zone added below
    if budget.window == "day":
        first, last = midnight, midnight + timedelta(days=1)
    elif budget.window == "week":
        first = midnight - timedelta(days=local.weekday())
        last = first + timedelta(days=7)
    else:
        first = midnight.replace(day=1)
        last = (first + timedelta(days=32)).replace(day=1)
    return Window(_us(first.replace(tzinfo=zone)), _us(last.replace(tzinfo=zone)))


def _us(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000


Whole = Annotated[int, Meta(ge=0, le=MOST)]


class LimitDefaults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of whoever has no limit of that kind of their own. Absent: no limit. 0: none."""

    requests_per_minute: Annotated[Whole | None, Meta(description="Requests per minute.")] = None
    input_tokens_per_minute: Annotated[Whole | None, Meta(description="Tokens read.")] = None
    output_tokens_per_minute: Annotated[Whole | None, Meta(description="Tokens written.")] = None
    tokens_per_minute: Annotated[Whole | None, Meta(description="Tokens read and written.")] = None
    concurrency: Annotated[Whole | None, Meta(description="Requests at the same time.")] = None
    dollars_per_hour: Annotated[Decimal | None, Meta(description="Spend, US dollars.")] = None


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How limits are kept, and the limits of whoever has none of their own."""

    tenant: Annotated[LimitDefaults, Meta(description="For each tenant.")] = LimitDefaults()
    key: Annotated[LimitDefaults, Meta(description="For each key.")] = LimitDefaults()
    user: Annotated[LimitDefaults, Meta(description="For each end user of a tenant.")] = (
        LimitDefaults()
    )
    output_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Output tokens reserved for a request without max_tokens, until 20 "
            "answers of its route were seen; then their 95th percentile.",
        ),
    ] = 1024
    offline_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of each limit that all replicas together may still spend while "
            "Redis is away; each spends its even part.",
        ),
    ] = 0.5
    store_budget_ms: Annotated[
        int, Meta(ge=1, le=1000, description="Milliseconds a request waits for Redis, in all.")
    ] = 50
    lease_s: Annotated[
        float,
        Meta(ge=1, description="Seconds after which the holds of a lost replica are ended."),
    ] = 60.0
    throttled_per_minute: Annotated[
        int, Meta(ge=0, description="Requests per minute on a spent budget of mode throttle.")
    ] = 6


class BudgetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Monthly budgets of whoever has none of their own, and how counters follow the ledger."""

    tenant_usd: Annotated[Decimal | None, Meta(description="Per tenant and month.")] = None
    key_usd: Annotated[Decimal | None, Meta(description="Per key and month.")] = None
    zone: Annotated[str, Meta(description="IANA time zone in which these months begin.")] = "UTC"
    rebase_s: Annotated[
        float, Meta(gt=0, description="Seconds between two corrections by the ledger.")
    ] = 30.0
    settled_after_s: Annotated[
        int,
        Meta(
            ge=60,
            description="Age in seconds from which on the ledger alone decides; until then "
            "whichever saw more, the ledger or the counter.",
        ),
    ] = 600
