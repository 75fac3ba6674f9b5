"""Which limits apply to a request, as demands on the store. Pure.

Must not know stores or prices. A caller's limits are compiled once, and for each request only what
depends on it (user, route, models, amounts) is filled in. A limit on one subject goes before the
one on each of its kind, and that before the config's default.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence, Set
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
from gateway.limits.taken import Taken

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


TOKENS = frozenset({"tokens", "input_tokens", "output_tokens"})


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
    subject: str = ""  # as the ledger calls it
    owner: str = ""  # the tenant whose limit it is
    is_above: bool = False  # a tenant above the caller's own

    def demand(self, wanted: Wanted) -> Demand:
        """The window of a budget is for whoever knows the time to fill in."""
        limit = self.limit
        if self.budget is not None and self.budget.mode == "soft":
            limit = MOST
        amount = max(1, _amount(self.counts, wanted))
        if not wanted.is_bounded and self.kind is Kind.BUCKET and amount > limit:
            amount = max(1, limit)  # an estimate, not a promise: it fits the full bucket
        return Demand(self.key, self.kind, limit, amount, self.period_us)

    def actual(self, taken: Taken) -> int:
        """The amount that settles the demand."""
        return taken.of(self.counts, model=self.subject if self.scope == "model" else None)


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


class Applied(Struct, frozen=True):
    """The rules of a request, and which of them (by index) are of interest to whom."""

    rules: Sequence[Rule]
    budgets: Sequence[int]
    requests: Sequence[int]
    tokens: Sequence[int]

    @property
    def is_strict(self) -> bool:
        return any(rule.is_strict for rule in self.rules)


def applied(rules: Sequence[Rule]) -> Applied:
    def of(kinds: Set[str]) -> Sequence[int]:
        return tuple(i for i, r in enumerate(rules) if r.budget is None and r.counts in kinds)

    budgets = tuple(i for i, rule in enumerate(rules) if rule.budget is not None)
    return Applied(tuple(rules), budgets, of({"requests"}), of(TOKENS))


class Level(Struct, frozen=True):
    """One tenant of the caller's tree, and what it and all below it may use."""

    tenant_id: str
    limits: Sequence[Limit]
    budgets: Sequence[Budget]


def levels_of(caller: Caller) -> tuple[Level, ...]:
    """The caller's own tenant first, then those above it, the top last."""
    own = Level(caller.tenant_id, caller.limits, caller.budgets)
    above = [Level(one.tenant_id, one.limits, one.budgets) for one in caller.ancestors]
    return (own, *above)


class Rules:
    """Compiled for one tenant and key; `of` picks those of a request.

    `root` is the top of the tenant's tree: all that are below it share one hash slot of the store,
    since a request takes from all levels in one step. Defaults of the config hold for the caller's
    own tenant only: who sets none for a level above means none."""

    def __init__(self, caller: Caller, limits: LimitSettings, budgets: BudgetSettings) -> None:
        self._levels = levels_of(caller)
        self.root = self._levels[-1].tenant_id
        self._default_limits = list(_defaults(caller, limits))
        self._default_budgets = list(_default_budgets(caller, budgets))
        self._known: dict[tuple[str | None, str, tuple[str, ...]], Applied] = {}
        self._scopes = {limit.scope for limit in self._default_limits}
        for level in self._levels:
            self._scopes |= {limit.scope for limit in level.limits}
            self._scopes |= {budget.scope for budget in level.budgets}
        self._fixed = [*self._select("tenant", None), *self._select("key", caller.key_id)]
        self._varies = not self._scopes.isdisjoint(("user", "route", "model"))
        self._always = applied(self._fixed)

    def of(self, user: str | None, route: str, models: tuple[str, ...]) -> Applied:
        if not self._varies:
            return self._always
        about = (user if "user" in self._scopes else None, route, models)
        known = self._known.get(about)
        if known is None:
            if len(self._known) >= SUBJECTS:
                self._known.clear()
            known = self._known[about] = self._of(*about)
        return known

    def _of(self, user: str | None, route: str, models: tuple[str, ...]) -> Applied:
        found = list(self._fixed)
        if "user" in self._scopes:  # who names no user is one user, or leaving it out would pay
            found += self._select("user", user or "")
        if "route" in self._scopes:
            found += self._select("route", route)
        if "model" in self._scopes:
            for model in models:
                found += self._select("model", model)
        return applied(found)

    def _select(self, scope: str, subject: str | None) -> list[Rule]:
        """Of each level. Where nothing of a kind was set on the lowest, the config's default."""
        rules = self._select_of(self._levels[0], scope, subject)
        counted = {rule.counts for rule in rules if rule.budget is None}
        has_budget = any(rule.budget is not None for rule in rules)
        own = self._levels[0].tenant_id
        rules += [
            self._limit(limit, subject, own)
            for limit in self._default_limits
            if limit.scope == scope and limit.counts not in counted
        ]
        if not has_budget:
            rules += [
                self._budget(b, subject, own) for b in self._default_budgets if b.scope == scope
            ]
        for level in self._levels[1:]:
            rules += self._select_of(level, scope, subject)
        return rules

    def _select_of(self, level: Level, scope: str, subject: str | None) -> list[Rule]:
        """The first of each kind and period wins: own subject, then each."""
        chosen: dict[object, Rule] = {}
        for is_own in (True, False):
            for limit in level.limits:
                if limit.scope == scope and _matches(limit.subject, subject, is_own):
                    kind: object = (limit.counts, limit.per_s)
                    chosen.setdefault(kind, self._limit(limit, subject, level.tenant_id))
            for budget in level.budgets:
                if budget.scope == scope and _matches(budget.subject, subject, is_own):
                    kind = (budget.window, budget.hours)
                    chosen.setdefault(kind, self._budget(budget, subject, level.tenant_id))
        return list(chosen.values())

    def _limit(self, limit: Limit, subject: str | None, owner: str) -> Rule:
        return Rule(
            f"l:{self._key(limit.scope, subject, owner)}:{limit.counts}:{limit.per_s or 0}",
            _KINDS[limit.counts],
            limit.counts,
            limit.units,
            (limit.per_s or 0) * 1_000_000,
            limit.scope,
            limit.strict,
            None,
            subject or "",
            owner,
            owner != self._levels[0].tenant_id,
        )

    def _budget(self, budget: Budget, subject: str | None, owner: str) -> Rule:
        """The key holds what makes the sum: who, and which windows in which zone."""
        zone = "" if budget.window in ("rolling", "lifetime") else budget.zone
        window = f"{budget.window}{budget.hours or ''}"
        return Rule(
            f"b:{self._key(budget.scope, subject, owner)}:{window}:{zone}",
            Kind.BUDGET,
            "spend",
            budget.units,
            (budget.hours or 0) * 3_600_000_000,
            budget.scope,
            budget.strict,
            budget,
            subject or "",
            owner,
            owner != self._levels[0].tenant_id,
        )

    def _key(self, scope: str, subject: str | None, owner: str) -> str:
        """Whose, among all that are below one root."""
        return f"{scope}:{'' if owner == self.root else owner + ':'}{_name(subject)}"


def _matches(of: str | None, subject: str | None, is_own: bool) -> bool:
    return of == subject if is_own and of is not None else of is None and not is_own


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
        self._known: dict[tuple[str, str], Window] = {}

    def now(self, budget: Budget, now_us: int) -> Window:
        key = (budget.window, budget.zone)
        window = self._known.get(key)
        if window is None or not window.start_us <= now_us < (window.end_us or MOST):
            if len(self._known) >= MEMORY:
                self._known.clear()
            window = self._known[key] = self._of(budget, now_us)
        return window


__all__ = [
    "Applied",
    "Level",
    "Rule",
    "Rules",
    "Wanted",
    "Windows",
    "applied",
    "levels_of",
]
