"""Which limits apply to a request, as demands on the store. Pure.

Must not know stores or prices. A caller's limits are compiled once, and for each request only what
depends on it (user, route, models, amounts) is filled in. A limit on one subject goes before the
one on each of its kind, and that before the config's default.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache

from msgspec import Struct

from gateway.allowances import (
    Budget,
    BudgetSettings,
    Limit,
    LimitDefaults,
    LimitSettings,
    Window,
    window_of,
)
from gateway.auth import Caller
from gateway.limits.arithmetic import MOST, Demand, Kind

_KINDS = {
    "requests": Kind.WINDOW,
    "input_tokens": Kind.BUCKET,
    "output_tokens": Kind.BUCKET,
    "tokens": Kind.BUCKET,
    "spend": Kind.BUCKET,
    "concurrency": Kind.CONCURRENCY,
}
SUBJECTS = 1_000  # remembered per caller
MEMORY = 10_000  # callers and users remembered


class Wanted(Struct, frozen=True, kw_only=True):
    """What a request may take at most, of each thing that is counted."""

    user: str | None
    route: str
    models: tuple[str, ...]  # every one that may be asked
    input_tokens: int
    output_tokens: int
    is_bounded: bool  # the client set the output limit; else the reservation may be cut
    spend_nano: int


class Rule(Struct, frozen=True):
    """One limit or budget, ready to be asked for."""

    key: str
    kind: Kind
    counts: str  # of what the amount is; spend for budgets
    limit: int
    period_us: int
    scope: str
    is_strict: bool
    budget: Budget | None = None
    subject: str = ""  # of a budget, as the ledger calls it

    def demand(self, wanted: Wanted, window: Window | None) -> Demand:
        limit = self.limit
        if self.budget is not None and self.budget.mode == "soft":
            limit = MOST
        amount = max(1, _amount(self.counts, wanted))
        if not wanted.is_bounded and self.kind is Kind.BUCKET and amount > limit:
            amount = max(1, limit)  # an estimate, not a promise: it fits the full bucket
        window_us = 0 if window is None else window.start_us
        return Demand(self.key, self.kind, limit, amount, self.period_us, window_us)


def _amount(counts: str, wanted: Wanted) -> int:
    match counts:
        case "input_tokens":
            return wanted.input_tokens
        case "output_tokens":
            return wanted.output_tokens
        case "tokens":
            return wanted.input_tokens + wanted.output_tokens
        case "spend":
            return wanted.spend_nano
        case _:
            return 1


class Used(Struct, frozen=True, kw_only=True):
    """What one or more attempts really took."""

    input_tokens: int = 0
    output_tokens: int = 0
    spend_nano: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            spend_nano=self.spend_nano + other.spend_nano,
        )


class Taken(Struct, frozen=True, kw_only=True):
    """What a request really took, in all and of each model that it asked."""

    total: Used
    models: dict[str, Used]


def actual(rule: Rule, taken: Taken) -> int:
    """The amount that settles a rule's demand. A model that was not asked took nothing."""
    used = taken.models.get(rule.subject, Used()) if rule.scope == "model" else taken.total
    match rule.counts:
        case "input_tokens":
            return used.input_tokens
        case "output_tokens":
            return used.output_tokens
        case "tokens":
            return used.input_tokens + used.output_tokens
        case "spend":
            return used.spend_nano
        case _:
            return 1


class Rules:
    """Compiled for one tenant and key; `of` picks those of a request."""

    def __init__(self, caller: Caller, limits: LimitSettings, budgets: BudgetSettings) -> None:
        self._limits = caller.limits
        self._budgets = caller.budgets
        self._default_limits = list(_defaults(caller, limits))
        self._default_budgets = list(_default_budgets(caller, budgets))
        self._selected: dict[tuple[str, str], list[Rule]] = {}
        self._fixed = [
            *self._select("tenant", None),
            *self._select("key", caller.key_id),
        ]
        self._scopes = {limit.scope for limit in (*self._limits, *self._default_limits)} | {
            budget.scope for budget in self._budgets
        }

    def of(self, user: str | None, route: str, models: Iterable[str]) -> list[Rule]:
        found = self._fixed
        if self._scopes.isdisjoint(("user", "route", "model")):
            return found
        found = list(found)
        if "user" in self._scopes:  # who names no user is one user, or leaving it out would pay
            found += self._remembered("user", user or "")
        if "route" in self._scopes:
            found += self._remembered("route", route)
        if "model" in self._scopes:
            for model in models:
                found += self._remembered("model", model)
        return found

    def _remembered(self, scope: str, subject: str) -> list[Rule]:
        found = self._selected.get((scope, subject))
        if found is None:
            if len(self._selected) >= SUBJECTS:
                self._selected.clear()
            found = self._selected[scope, subject] = self._select(scope, subject)
        return found

    def _select(self, scope: str, subject: str | None) -> list[Rule]:
        """The first of each kind and period wins: own subject, then each. Where nothing of a kind
        was set, the config's default."""
        chosen: dict[object, Rule] = {}
        for is_own in (True, False):
            for limit in self._limits:
                if limit.scope == scope and _matches(limit.subject, subject, is_own):
                    chosen.setdefault((limit.counts, limit.per_s), _rule(limit, subject))
            for budget in self._budgets:
                if budget.scope == scope and _matches(budget.subject, subject, is_own):
                    chosen.setdefault((budget.window, budget.hours), _budget_rule(budget, subject))
        rules = list(chosen.values())
        counted = {rule.counts for rule in rules if rule.budget is None}
        rules += [
            _rule(limit, subject)
            for limit in self._default_limits
            if limit.scope == scope and limit.counts not in counted
        ]
        if all(rule.budget is None for rule in rules):
            rules += [_budget_rule(b, subject) for b in self._default_budgets if b.scope == scope]
        return rules


def _matches(of: str | None, subject: str | None, is_own: bool) -> bool:
    return of == subject if is_own and of is not None else of is None and not is_own


def _rule(limit: Limit, subject: str | None) -> Rule:
    period_us = (limit.per_s or 0) * 1_000_000
    return Rule(
        f"l:{limit.scope}:{_name(subject)}:{limit.counts}:{limit.per_s or 0}",
        _KINDS[limit.counts],
        limit.counts,
        limit.units,
        period_us,
        limit.scope,
        limit.strict,
        None,
        subject or "",
    )


def _budget_rule(budget: Budget, subject: str | None) -> Rule:
    """The key holds what makes the sum: who, and which windows in which zone."""
    period_us = (budget.hours or 0) * 3_600_000_000
    zone = "" if budget.window in ("rolling", "lifetime") else budget.zone
    return Rule(
        f"b:{budget.scope}:{_name(subject)}:{budget.window}{budget.hours or ''}:{zone}",
        Kind.BUDGET,
        "spend",
        budget.units,
        period_us,
        budget.scope,
        budget.strict,
        budget,
        subject or "",
    )


@lru_cache(maxsize=MEMORY)
def _name(subject: str | None) -> str:
    """A subject as part of a key: bounded, and without what a client may have put in it."""
    if subject is None:
        return ""
    return hashlib.sha256(subject.encode()).hexdigest()[:24]


def _defaults(caller: Caller, settings: LimitSettings) -> Iterator[Limit]:
    for scope, defaults in (
        ("tenant", settings.tenant),
        ("key", settings.key),
        ("user", settings.user),
    ):
        for counts, amount, per_s in _of_defaults(defaults):
            if amount is not None:
                yield Limit(
                    id="config",
                    tenant_id=caller.tenant_id,
                    scope=scope,  # type: ignore[arg-type]  # one of the three above
                    subject=None,
                    counts=counts,  # type: ignore[arg-type]  # from the list below
                    amount=Decimal(amount),
                    per_s=per_s,
                    strict=False,
                )


def _of_defaults(d: LimitDefaults) -> list[tuple[str, int | Decimal | None, int | None]]:
    return [
        ("requests", d.requests_per_minute, 60),
        ("input_tokens", d.input_tokens_per_minute, 60),
        ("output_tokens", d.output_tokens_per_minute, 60),
        ("tokens", d.tokens_per_minute, 60),
        ("concurrency", d.concurrency, None),
        ("spend", d.dollars_per_hour, 3600),
    ]


def _default_budgets(caller: Caller, settings: BudgetSettings) -> Iterator[Budget]:
    for scope, amount in (("tenant", settings.tenant_usd), ("key", settings.key_usd)):
        if amount is not None:
            yield Budget(
                id="config",
                tenant_id=caller.tenant_id,
                scope=scope,  # type: ignore[arg-type]  # one of the two above
                subject=None,
                amount_usd=amount,
                window="month",
                hours=None,
                zone=settings.zone,
                mode="hard",
                strict=False,
            )


class Windows:
    """The present window of each budget, worked out once per window."""

    def __init__(self, of: Callable[[Budget, int], Window] = window_of) -> None:
        self._of = of
        self._known: dict[tuple[str, int | None, str], Window] = {}

    def now(self, budget: Budget, now_us: int) -> Window:
        key = (budget.window, budget.hours, budget.zone)
        window = self._known.get(key)
        if window is None or not window.start_us <= now_us < (window.end_us or MOST):
            if len(self._known) >= MEMORY:
                self._known.clear()
            window = self._known[key] = self._of(budget, now_us)
        return window


__all__ = ["Rule", "Rules", "Taken", "Wanted", "Windows", "actual"]
