"""What a client is told about its limits: refusals that name the limit that binds and when it
frees, and the `x-ratelimit-*` headers. Pure.

Invariant: a message is about the caller's own limits only, and a refusal that waiting cannot cure
says what can.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

from gateway.allowances import NANO
from gateway.errors import (
    BudgetSpent,
    ConcurrencyFull,
    Downgrades,
    GatewayError,
    LimitsUnavailable,
    RateLimited,
    TooLargeForLimit,
)
from gateway.limits.arithmetic import NEVER, Demand, Room, Verdict
from gateway.limits.rules import Applied, Rule

OF: Final = {
    "tenant": "your account",
    "key": "this API key",
    "user": "this end user",
    "route": "this model",
    "model": "a model behind this route",
}
WHAT: Final = {
    "requests": "requests",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "tokens": "tokens",
    "spend": "spend",
    "concurrency": "concurrent requests",
}
PERIODS: Final = {60_000_000: "minute", 3_600_000_000: "hour", 86_400_000_000: "day"}
WINDOWS: Final = {
    "hour": "hourly",
    "day": "daily",
    "week": "weekly",
    "month": "monthly",
    "lifetime": "lifetime",
}


def strict_refusal() -> LimitsUnavailable:
    """A strict limit, and nobody to ask."""
    return LimitsUnavailable(
        "A limit of this request cannot be checked right now. Retry shortly.", retry_after_s=1.0
    )


def refusal(
    rule: Rule, demand: Demand, verdict: Verdict, *, by_slice: bool, ends_in_us: int | None
) -> GatewayError:
    """`by_slice`: this replica's share of the limit refused, while the shared counters are away.
    `ends_in_us`: when the budget's window ends."""
    allowed = _allowed(rule)
    if rule.limit and demand.amount > rule.limit:
        return _too_large(rule, demand, allowed)
    if by_slice and rule.limit and (rule.budget is not None or verdict.wait_us == NEVER):
        return LimitsUnavailable(
            f"{allowed}; the shared counters are away and this replica's share does not hold this "
            "request. Retry shortly.",
            retry_after_s=1.0,
        )
    if rule.budget is not None:
        if rule.is_above:
            return BudgetSpent(
                f"The {_budget(rule)} does not hold this request any more.{_when(ends_in_us)}",
                retry_after_s=None if ends_in_us is None else ends_in_us / 1e6,
            )
        left = dollars(verdict.rooms[verdict.binding].remaining)
        return BudgetSpent(
            f"The {_budget(rule)} has {left} left, and this request could cost up to "
            f"{dollars(demand.amount)}.{_when(ends_in_us)}",
            retry_after_s=None if ends_in_us is None else ends_in_us / 1e6,
        )
    if rule.limit == 0:
        return TooLargeForLimit(f"{allowed}: none. Ask your administrator.")
    if rule.counts == "concurrency":
        return ConcurrencyFull(
            f"{allowed}, and as many are running. Retry when one has ended.", retry_after_s=1.0
        )
    return RateLimited(
        f"{allowed}, and they are used up. Retry in {duration(verdict.wait_us)}.",
        retry_after_s=verdict.wait_us / 1e6,
    )


def downgrades(refused: GatewayError, to: str | None) -> GatewayError:
    """The same refusal, of a budget that lets a cheaper model answer."""
    if not isinstance(refused, BudgetSpent):
        return refused
    found = Downgrades(refused.message, retry_after_s=refused.retry_after_s)
    found.to = to
    return found


def _too_large(rule: Rule, demand: Demand, allowed: str) -> GatewayError:
    if rule.budget is not None:
        return BudgetSpent(
            f"This request could cost up to {dollars(demand.amount)}, more than the whole "
            f"{_budget(rule)}. Shorten it, lower max_tokens, or ask your administrator for a "
            "larger budget."
        )
    asked = _amount(rule, demand.amount)
    return TooLargeForLimit(
        f"{allowed}, and this request alone could take {asked}. Shorten it or lower max_tokens."
    )


def _allowed(rule: Rule) -> str:
    if rule.budget is not None:
        return f"There is a {_budget(rule)}"
    what = f"{_amount(rule, rule.limit)} {WHAT[rule.counts]}"
    if rule.counts != "concurrency":
        what += f" per {PERIODS.get(rule.period_us, f'{rule.period_us // 1_000_000} seconds')}"
    return f"{what} are allowed for {_whose(rule)}"


def _budget(rule: Rule) -> str:
    assert rule.budget is not None
    window = WINDOWS.get(rule.budget.window, f"{rule.budget.hours}-hour")
    if rule.is_above:  # how much money others have is not for those below to know
        return f"{window} budget of {_whose(rule)}"
    return f"{window} budget of {dollars(rule.limit)} of {_whose(rule)}"


def _whose(rule: Rule) -> str:
    if rule.is_above and rule.scope == "tenant":
        return "an account above yours"
    return OF[rule.scope]


def _when(ends_in_us: int | None) -> str:
    return "" if ends_in_us is None else f" It begins anew in {duration(ends_in_us)}."


def _amount(rule: Rule, amount: int) -> str:
    return dollars(amount) if rule.counts == "spend" else str(amount)


def headers(found: Applied, rooms: Sequence[Room]) -> Mapping[str, str]:
    """`x-ratelimit-*` of the most binding limit on requests and on tokens."""
    written: dict[str, str] = {}
    for name, indexes in (("requests", found.requests), ("tokens", found.tokens)):
        nearest, least = -1, 2.0
        for index in indexes:
            if index < len(rooms):
                limit = found.rules[index].limit
                share = rooms[index].remaining / limit if limit else 0.0
                if share < least:
                    nearest, least = index, share
        if nearest >= 0:
            written[f"x-ratelimit-limit-{name}"] = str(found.rules[nearest].limit)
            written[f"x-ratelimit-remaining-{name}"] = str(rooms[nearest].remaining)
            written[f"x-ratelimit-reset-{name}"] = duration(rooms[nearest].reset_us)
    return written


def duration(us: int) -> str:
    """As Go writes durations: `12ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    ms = max(0, -(-us // 1000))
    if ms < 1000:
        return f"{ms}ms"
    seconds, rest = divmod(ms, 1000)
    part = f".{rest:03d}".rstrip("0") if rest else ""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}{part}s"
    return f"{minutes}m{seconds}{part}s" if minutes else f"{seconds}{part}s"


def dollars(nano: int) -> str:
    text = f"{Decimal(nano) / NANO:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"${text}"
