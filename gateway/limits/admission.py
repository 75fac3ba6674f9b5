"""The admit stage: hold what a request may take at most, or refuse it; settle when it has ended.

`Limits.admit` is the only way to a backend, for every route and every caller. `Limits.settle` is an
observer of settled records, so it is called exactly once for every request, whatever its exit; it
is synchronous, and what the store cannot hear now it hears when it is back. Must not know HTTP or
SQL. Invariants: a refused request holds nothing; no request waits for the store longer than its
budget of time; with the store away nobody spends more than the slice of this replica.
"""

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gateway.allowances import NANO, BudgetSettings, LimitSettings
from gateway.auth import Caller
from gateway.call import Asked, Call
from gateway.errors import (
    BudgetSpent,
    ConcurrencyFull,
    GatewayError,
    LimitsUnavailable,
    RateLimited,
    StoreUnavailable,
    TooLargeForLimit,
)
from gateway.limits.arithmetic import (
    MINUTE_US,
    MOST,
    NEVER,
    ROLLING_SLOTS,
    BudgetState,
    Demand,
    Kind,
    Spent,
    Verdict,
)
from gateway.limits.estimate import Estimator
from gateway.limits.rules import Rule, Rules, Taken, Used, Wanted, Windows, actual
from gateway.limits.slices import Slices
from gateway.limits.store import MemoryStore, Store, StoreGone
from gateway.routing import Target
from telemetry.clock import Clock
from telemetry.pricing import PriceBook
from telemetry.record import RequestRecord

log = logging.getLogger(__name__)

DEGRADED: Final = "x-meterline-limits"
MAX_CALLERS: Final = 50_000
LOG_EVERY_S: Final = 30.0
SHIPPED_S: Final = 3.0  # by then a settlement is in the database, if it can be reached
SCOPES: Final = ("tenant", "key", "user", "route", "model")
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


class SpendSource(Protocol):
    """What the ledger knows of a budget. Raises StoreUnavailable."""

    async def of(
        self,
        filters: dict[str, str],
        *,
        start_us: int,
        cut: int,
        grain_us: int,
        all_slots: bool = False,
    ) -> "LedgerSlots": ...


class LedgerSlots(Protocol):
    @property
    def before(self) -> int: ...

    @property
    def slots(self) -> dict[int, int]: ...


class _Hold(Struct, kw_only=True):
    """An admitted request, until it settles."""

    tenant: str
    rules: Sequence[Rule]
    demands: Sequence[Demand]
    asked: Asked
    in_store: bool  # the shared store may have it
    in_slice: bool = False


class Counts:
    """What metrics read."""

    def __init__(self) -> None:
        self.refused: dict[tuple[str, str], int] = {}  # (scope, counts)
        self.soft_overruns = 0
        self.sliced = 0  # requests admitted by the slice
        self.rebases = 0

    def of(self, scope: str, counted: str) -> int:
        return self.refused.get((scope, counted), 0)


class Limits:
    """One per process. `provider_of` names a backend's provider, for its list prices."""

    def __init__(
        self,
        store: Store,
        *,
        slices: Slices,
        replicas: Callable[[], int | None],
        is_up: Callable[[], bool],
        spend: SpendSource,
        prices: Callable[[], PriceBook],
        provider_of: Callable[[str], str],
        settings: Callable[[], tuple[LimitSettings, BudgetSettings]],
        clock: Clock,
        patience_s: float,
    ) -> None:
        """`patience_s`: how long a request may wait for the store and, when a budget's counter is
        new, for the ledger, in all."""
        self.counts = Counts()
        limits, _ = settings()
        self.estimator = Estimator(limits.output_tokens)
        self.store = store
        self._slices = slices
        self._replicas = replicas
        self._is_up = is_up
        self._spend = spend
        self._prices = prices
        self._provider_of = provider_of
        self._settings = settings
        self._clock = clock
        self._patience_s = patience_s
        self._recovered = asyncio.Event()
        self._quiet_until = 0.0
        self._windows = Windows()
        self._rules: OrderedDict[str, tuple[Caller, object, Rules]] = OrderedDict()
        self._holds: dict[str, _Hold] = {}
        self._budgets: OrderedDict[tuple[str, str], Rule] = OrderedDict()  # that were asked for
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._alerted: set[tuple[str, str, int]] = set()

    @property
    def open_holds(self) -> int:
        return len(self._holds)

    @property
    def is_shared(self) -> bool:
        """Other replicas count on the same counters."""
        return not isinstance(self.store, MemoryStore)

    @property
    def mode(self) -> str:
        """For /readyz: "ok", or that the replica spends its slice."""
        return "ok" if self._is_up() else "degraded: each replica spends its slice"

    # -- admit

    async def admit(self, call: Call, caller: Caller, asked: Asked, plan: Sequence[Target]) -> None:
        """Hold the worst case of this request on every limit, or raise what refuses it."""
        models = tuple(dict.fromkeys(target.model for target in plan))
        rules = self._rules_of(caller).of(asked.user, asked.model, models)
        wanted = self._wanted(asked, plan, models)
        hold = _Hold(tenant=caller.tenant_id, rules=rules, demands=(), asked=asked, in_store=False)
        self._holds[call.request_id] = hold  # first: whatever happens now is settled
        if not rules:
            return
        until = asyncio.get_running_loop().time() + self._patience_s
        verdict = await self._decide(call, hold, wanted, until)
        if not verdict.admitted:
            verdict = await self._throttled(call, hold, wanted, verdict, until)
        call.answer_headers.update(_headers(hold, verdict))
        if not verdict.admitted:
            raise self._refusal(hold, verdict)
        self._alert(hold, verdict)

    def _rules_of(self, caller: Caller) -> Rules:
        settings = self._settings()
        known = self._rules.get(caller.key_id)
        if known is not None and known[0] is caller and known[1] is settings[0]:
            return known[2]
        rules = Rules(caller, *settings)
        self._rules[caller.key_id] = (caller, settings[0], rules)
        if len(self._rules) > MAX_CALLERS:
            self._rules.popitem(last=False)
        return rules

    def _wanted(self, asked: Asked, plan: Sequence[Target], models: tuple[str, ...]) -> Wanted:
        tokens_in = self.estimator.input_tokens(asked.model, asked.text_bytes, asked.images)
        tokens_out = asked.output_limit
        if tokens_out is None:
            tokens_out = self.estimator.output_tokens(asked.model, asked.choices)
        costs = [
            self.estimator.money_nano(
                self._prices(),
                backend=target.backend,
                provider=self._provider_of(target.backend),
                model=target.model,
                input_tokens=tokens_in,
                output_tokens=tokens_out,
                now_ns=self._clock.now_ns(),
            )
            for target in plan
        ]
        return Wanted(
            user=asked.user,
            route=asked.model,
            models=models,
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            is_bounded=asked.output_limit is not None,
            spend_nano=min(MOST, max((cost for cost in costs if cost is not None), default=0)),
        )

    async def _decide(self, call: Call, hold: _Hold, wanted: Wanted, until: float) -> Verdict:
        """By the store, else by the slice."""
        now_us = self._clock.now_ns() // 1000
        hold.demands = tuple(
            [
                rule.demand(
                    wanted,
                    None if rule.budget is None else self._windows.now(rule.budget, now_us),
                )
                for rule in hold.rules
            ]
        )
        for rule in hold.rules:
            if rule.budget is not None:
                self._budgets[hold.tenant, rule.key] = rule
        hold.in_store = True
        try:
            verdict = await self._ask(call, hold)  # bounded by the store itself
            if verdict.cold:
                async with asyncio.timeout_at(until):
                    await self._read_spend(hold, verdict.cold)
                    verdict = await self._ask(call, hold)
            if verdict.cold:
                raise StoreGone
        except (StoreGone, StoreUnavailable, TimeoutError) as error:
            self._say_why(error)
            hold.in_store = not isinstance(error, StoreGone) or error.was_sent
            return self._by_slice(call, hold)
        if not verdict.admitted:
            hold.in_store = False
        for rule, demand, room in zip(hold.rules, hold.demands, verdict.rooms, strict=False):
            if rule.budget is not None:
                self._slices.saw(hold.tenant, demand, room.remaining)
        return verdict

    def _say_why(self, error: Exception) -> None:
        """Once in a while: an outage must not fill the log."""
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + LOG_EVERY_S
            log.warning("limits_by_slice", extra={"reason": type(error).__name__})

    async def _ask(self, call: Call, hold: _Hold) -> Verdict:
        lease_us = round(self._settings()[0].lease_s * 1e6)
        return await self.store.admit(hold.tenant, call.request_id, lease_us, hold.demands)

    def _by_slice(self, call: Call, hold: _Hold) -> Verdict:
        call.answer_headers[DEGRADED] = "degraded"
        if any(rule.is_strict for rule in hold.rules):
            raise LimitsUnavailable(
                "A limit of this request cannot be checked right now. Retry shortly.",
                retry_after_s=1.0,
            )
        lease_us = round(self._settings()[0].lease_s * 1e6)
        verdict = self._slices.admit(
            hold.tenant, call.request_id, lease_us, hold.demands, self._replicas()
        )
        hold.in_slice = verdict.admitted
        self.counts.sliced += verdict.admitted
        return verdict

    async def _throttled(
        self, call: Call, hold: _Hold, wanted: Wanted, refused: Verdict, until: float
    ) -> Verdict:
        """A spent budget of mode throttle lets some through, each minute."""
        budget = hold.rules[refused.binding].budget
        if budget is None or budget.mode != "throttle":
            return refused
        rate = self._settings()[0].throttled_per_minute
        slow = [
            replace(rule, budget=replace(rule.budget, mode="soft"))
            if rule.budget is not None and rule.budget.mode == "throttle"
            else rule
            for rule in hold.rules
        ]
        key = f"t:{hold.rules[refused.binding].key}"
        pace = Rule(key, Kind.WINDOW, "requests", rate, MINUTE_US, budget.scope, budget.strict)
        hold.rules = [*slow, pace]
        return await self._decide(call, hold, wanted, until)

    def _refusal(self, hold: _Hold, verdict: Verdict) -> GatewayError:
        """Names the limit that binds and when it frees."""
        rule, demand = hold.rules[verdict.binding], hold.demands[verdict.binding]
        kind = "budget" if rule.budget is not None else rule.counts
        refused = self.counts.refused
        refused[rule.scope, kind] = refused.get((rule.scope, kind), 0) + 1
        whose, what = OF[rule.scope], WHAT[rule.counts]
        if rule.budget is not None:
            return self._spent(rule, demand, verdict)
        if rule.counts == "concurrency":
            return ConcurrencyFull(
                f"{rule.limit} {what} are allowed for {whose}, and as many are running. "
                "Retry when one has ended.",
                retry_after_s=1.0,
            )
        per = f"{rule.limit}" if rule.counts != "spend" else _dollars(rule.limit)
        allowed = f"{per} {what} per {_period(rule.period_us)} are allowed for {whose}"
        if rule.limit == 0:
            return TooLargeForLimit(f"{allowed}: none. Ask your administrator.")
        if verdict.wait_us == NEVER:
            if not self._is_up():
                return LimitsUnavailable(
                    f"{allowed}; the shared counters are away and this replica's share does not "
                    "hold this request. Retry shortly.",
                    retry_after_s=1.0,
                )
            asked = f"{demand.amount}" if rule.counts != "spend" else _dollars(demand.amount)
            return TooLargeForLimit(
                f"{allowed}, and this request alone could take {asked}. "
                "Shorten it or lower max_tokens."
            )
        wait_s = verdict.wait_us / 1e6
        return RateLimited(
            f"{allowed}, and they are used up. Retry in {duration(verdict.wait_us)}.",
            retry_after_s=wait_s,
        )

    def _spent(self, rule: Rule, demand: Demand, verdict: Verdict) -> GatewayError:
        assert rule.budget is not None
        budget, whose = rule.budget, OF[rule.scope]
        now_us = self._clock.now_ns() // 1000
        end_us = self._windows.now(budget, now_us).end_us
        amount = _dollars(rule.limit)
        if verdict.wait_us == NEVER and rule.limit and self._is_up():
            return BudgetSpent(
                f"This request could cost up to {_dollars(demand.amount)}, more than the whole "
                f"budget of {amount} of {whose}. Shorten it, lower max_tokens, or ask your "
                "administrator for a larger budget."
            )
        when = "" if end_us is None else f" It begins anew in {duration(end_us - now_us)}."
        left = _dollars(verdict.rooms[verdict.binding].remaining)
        return BudgetSpent(
            f"The {_window(budget.window, budget.hours)} budget of {amount} of {whose} has {left} "
            f"left, and this request could cost up to {_dollars(demand.amount)}.{when}",
            retry_after_s=None if end_us is None else (end_us - now_us) / 1e6,
        )

    def _alert(self, hold: _Hold, verdict: Verdict) -> None:
        """Once per window for each soft budget that is overrun."""
        for rule, demand, room in zip(hold.rules, hold.demands, verdict.rooms, strict=False):
            if rule.budget is None or rule.budget.mode != "soft":
                continue
            used = MOST - room.remaining
            alert = (hold.tenant, rule.key, demand.window_us)
            if used > rule.limit and alert not in self._alerted:
                if len(self._alerted) > MAX_CALLERS:
                    self._alerted.clear()
                self._alerted.add(alert)
                self.counts.soft_overruns += 1
                log.warning(
                    "budget_overrun",
                    extra={"tenant": hold.tenant, "budget": rule.budget.id, "scope": rule.scope},
                )

    # -- settle

    def settle(self, record: RequestRecord) -> None:
        """An observer of the ledger: give back what was held and take what was used."""
        hold = self._holds.pop(record.request_id, None)
        if hold is None:
            return
        asked = hold.asked
        self.estimator.learn(record, asked.text_bytes, asked.images, asked.choices)
        if not hold.demands:
            return
        taken = taken_by(record)
        amounts = [actual(rule, taken) for rule in hold.rules]
        ended_us = (record.ended_ns or 0) // 1000
        if hold.in_slice:
            self._slices.settle(hold.tenant, record.request_id, amounts, ended_us)
        if hold.in_store:
            self.store.settle(hold.tenant, record.request_id, amounts, ended_us)

    # -- the ledger's word

    async def _read_spend(self, hold: _Hold, cold: Sequence[int]) -> None:
        """Read what was spent of budgets that the store does not know. Shared by all requests that
        wait for it, and not given up when one of them is."""
        for index in cold:
            about = (hold.tenant, hold.rules[index].key)
            task = self._reading.get(about)
            if task is None:
                task = asyncio.ensure_future(self._rebase_one(*about, hold.rules[index]))
                self._reading[about] = task
                task.add_done_callback(functools.partial(self._was_read, about))
            await asyncio.shield(task)
        # What settled in the last moments may not have been shipped yet: look again soon.
        asyncio.get_running_loop().call_later(SHIPPED_S, self._recovered.set)

    def _was_read(self, about: tuple[str, str], task: "asyncio.Task[None]") -> None:
        self._reading.pop(about, None)
        if not task.cancelled():
            task.exception()  # told to whoever waited; nobody may

    async def _rebase_one(self, tenant: str, key: str, rule: Rule) -> None:
        assert rule.budget is not None
        settings = self._settings()[1]
        now_us = self._clock.now_ns() // 1000
        window = self._windows.now(rule.budget, now_us)
        grain_us = rule.period_us // ROLLING_SLOTS if rule.period_us else MINUTE_US
        cut = (now_us - settings.settled_after_s * 1_000_000) // grain_us
        start_us = now_us - rule.period_us - grain_us if rule.period_us else window.start_us
        found = await self._spend.of(
            ledger_filters(tenant, rule),
            start_us=start_us,
            cut=cut,
            grain_us=grain_us,
            all_slots=bool(rule.period_us),
        )
        await self.store.rebase(
            tenant,
            Spent(
                key=key,
                period_us=rule.period_us,
                window_us=window.start_us,
                before=found.before,
                cut=cut,
                slots=found.slots,
            ),
        )
        self.counts.rebases += 1

    async def budget(self, tenant: str, key: str) -> BudgetState | None:
        """A budget's counter. Raises StoreGone."""
        return await self.store.budget(tenant, key)

    async def rebase(self) -> None:
        """Correct every budget that was asked for since the last time. Raises StoreGone,
        StoreUnavailable; then all of them are corrected next time."""
        for about, rule in list(self._budgets.items()):
            await self._rebase_one(*about, rule)
            if self._budgets.get(about) is rule and not self._has_holds(about[0]):
                del self._budgets[about]

    def _has_holds(self, tenant: str) -> bool:
        return any(hold.tenant == tenant for hold in self._holds.values())

    def recovered(self) -> None:
        """The store is back, perhaps without its memory: correct all budgets soon."""
        self._recovered.set()

    async def renew(self) -> None:
        """Keep the holds of running requests. Raises StoreGone."""
        by_tenant: dict[str, list[str]] = {}
        lease_us = round(self._settings()[0].lease_s * 1e6)
        for request_id, hold in self._holds.items():
            if hold.in_store:
                by_tenant.setdefault(hold.tenant, []).append(request_id)
            if hold.in_slice:
                self._slices.renew(hold.tenant, request_id, lease_us)
        for tenant, hold_ids in by_tenant.items():
            await self.store.renew(tenant, hold_ids, lease_us)

    async def run(self) -> None:
        """Renew and rebase until cancelled."""
        limits, budgets = self._settings()
        renew_s, rebase_s = limits.lease_s / 3, budgets.rebase_s
        renewed = rebased = asyncio.get_running_loop().time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(renew_s, rebase_s) / 2):
                    await self._recovered.wait()
            now = asyncio.get_running_loop().time()
            try:
                if now - renewed >= renew_s:
                    renewed = now
                    await self.renew()
                if now - rebased >= rebase_s or self._recovered.is_set():
                    rebased = now
                    self._recovered.clear()
                    await self.rebase()
            except (StoreGone, StoreUnavailable):
                continue  # said elsewhere; holds have two more renewals before they end
            except Exception:  # a background loop: logged, and it goes on
                log.exception("limits: upkeep failed")


def ledger_filters(tenant: str, rule: Rule) -> dict[str, str]:
    """The columns of the ledger that make a budget's sum."""
    filters = {"tenant_id": tenant}
    column = {"key": "key_id", "route": "asked_model"}.get(rule.scope)
    if column is not None:
        filters[column] = rule.subject
    return filters


def taken_by(record: RequestRecord) -> Taken:
    """All attempts together: what failed halfway was used too."""
    total = Used()
    models: dict[str, Used] = {}
    for attempt in record.attempts:
        cost = sum(
            (c.amount for c in attempt.charges if c.amount is not None and c.currency == "USD"),
            Decimal(0),
        )
        usage = attempt.usage
        used = Used(
            input_tokens=0 if usage is None else usage.input_tokens,
            output_tokens=0 if usage is None else usage.output_tokens,
            spend_nano=int((cost * NANO).to_integral_value(ROUND_CEILING)),
        )
        total += used
        models[attempt.model] = models.get(attempt.model, Used()) + used
    return Taken(total=total, models=models)


def _headers(hold: _Hold, verdict: Verdict) -> Mapping[str, str]:
    """`x-ratelimit-*` of the most binding limit on requests and on tokens (WIRE.md 2)."""
    headers: dict[str, str] = {}
    for name, kinds in (
        ("requests", ("requests",)),
        ("tokens", ("tokens", "input_tokens", "output_tokens")),
    ):
        best: tuple[float, Rule, int, int] | None = None
        for rule, room in zip(hold.rules, verdict.rooms, strict=False):
            if rule.counts in kinds:
                share = room.remaining / rule.limit if rule.limit else 0.0
                if best is None or share < best[0]:
                    best = (share, rule, room.remaining, room.reset_us)
        if best is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(best[1].limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(best[2])
            headers[f"x-ratelimit-reset-{name}"] = duration(best[3])
    return headers


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


def _dollars(nano: int) -> str:
    text = f"{Decimal(nano) / NANO:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"${text}"


def _period(us: int) -> str:
    return {60_000_000: "minute", 3_600_000_000: "hour", 86_400_000_000: "day"}.get(
        us, f"{us // 1_000_000} seconds"
    )


def _window(kind: str, hours: int | None) -> str:
    return {
        "hour": "hourly",
        "day": "daily",
        "week": "weekly",
        "month": "monthly",
        "lifetime": "lifetime",
    }.get(kind, f"{hours}-hour")
