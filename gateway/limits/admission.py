"""The admit stage: hold what a request may take at most, or refuse it; settle when it has ended.

`Limits.admit` is the only way to a backend, for every route and every caller. `Limits.settle` is an
observer of settled records, so it is called exactly once for every request, whatever its exit; it
is synchronous, and what the store cannot hear now it hears when it is back. Must not know HTTP or
SQL. Invariants: a refused request holds nothing; no request waits for the store longer than its
budget of time; with the store away nobody spends more than the slice of this replica.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from backends.tokens import TokenCounter
from gateway.allowances import BudgetSettings, LimitSettings
from gateway.auth import Caller
from gateway.call import Asked, Call
from gateway.errors import GatewayError, StoreUnavailable
from gateway.limits import words
from gateway.limits.arithmetic import MINUTE_US, MOST, BudgetState, Demand, Kind, Verdict
from gateway.limits.estimate import Estimator
from gateway.limits.follow import Follower, SpendSource
from gateway.limits.growth import Growth
from gateway.limits.prompt import prompt_of
from gateway.limits.rules import Applied, Rule, Rules, Wanted, Windows, applied
from gateway.limits.slices import Slices
from gateway.limits.store import MemoryStore, Store, StoreGone
from gateway.limits.taken import taken_by
from gateway.routing import Target
from telemetry.clock import Clock
from telemetry.pricing import PriceBook
from telemetry.record import Attempt, Outcome, RequestRecord

log = logging.getLogger(__name__)

DEGRADED: Final = "x-meterline-limits"
MAX_CALLERS: Final = 50_000
LOG_EVERY_S: Final = 30.0
SHIPPED_S: Final = 3.0  # by then a settlement is in the database, if it can be reached


class _Hold(Struct, kw_only=True):
    """An admitted request, until it settles."""

    root: str  # whose hash slot its counters are in
    found: Applied
    demands: Sequence[Demand]
    asked: Asked
    in_store: bool  # the shared store may have it
    by_slice: bool = False  # who decided
    waited_s: float = 0.0  # for the store
    output_tokens: int = 0  # held, of a request that may grow
    grown: Sequence[
        tuple[str, Sequence[int]]
    ] = ()  # in the slice: what it grew by during an outage


class Counts:
    """What metrics read."""

    def __init__(self) -> None:
        self.refused: dict[tuple[str, str], int] = {}  # (scope, counts)
        self.soft_overruns = 0
        self.streams_ended = 0  # before their end, since no budget held more of them
        self.downgraded = 0  # requests that a cheaper model was to answer
        self.sliced = 0  # requests admitted by the slice

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
        """`patience_s`: how long requests wait for the ledger when a budget's counter is new. How
        long they wait for the store is `limits.store_budget_ms`, all questions together."""
        self.counts = Counts()
        self.counters: dict[str, TokenCounter] = {}  # of engines, by the backend's name
        self.on_wait: Callable[[float], None] = _unheard  # seconds that a request waited
        limits, _ = settings()
        self.estimator = Estimator(limits.output_tokens)
        self.store = store
        self._slices = slices
        self._replicas = replicas
        self._is_up = is_up
        self._prices = prices
        self._provider_of = provider_of
        self._settings = settings
        self._clock = clock
        self._recovered = asyncio.Event()
        self._quiet_until = 0.0
        self._windows = Windows()
        self._follower = Follower(
            store,
            spend,
            self._windows,
            settings=lambda: settings()[1],
            clock=clock,
            patience_s=patience_s,
        )
        self._rules: OrderedDict[str, tuple[Caller, object, Rules]] = OrderedDict()
        self._holds: dict[str, _Hold] = {}
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

    async def admit(
        self,
        call: Call,
        caller: Caller,
        asked: Asked,
        plan: Sequence[Target],
        *,
        is_downgraded: bool = False,
    ) -> None:
        """Hold the worst case of this request on every limit, or raise what refuses it; that is
        `Downgrades` if it may be asked again with a cheaper plan, and `is_downgraded`."""
        models = tuple(dict.fromkeys(target.model for target in plan))
        compiled = self._rules_of(caller)
        found = compiled.of(asked.user, asked.model, models)
        if is_downgraded:
            found = applied(_without_bite(found.rules, "downgrade"))
            self.counts.downgraded += 1
        hold = _Hold(root=compiled.root, found=found, demands=(), asked=asked, in_store=False)
        self._holds[call.request_id] = hold  # first: whatever happens now is settled
        if not found.rules:
            return
        wanted = self._wanted(call, asked, plan, models)
        hold.output_tokens = wanted.output_tokens
        verdict = await self._decide(call, hold, wanted)
        if not verdict.admitted:
            rule = found.rules[verdict.binding]
            if rule.budget is not None and rule.budget.mode == "throttle":
                self._throttle(hold, rule)
                verdict = await self._decide(call, hold, wanted)
        call.answer_headers.update(words.headers(hold.found, verdict.rooms))
        if hold.by_slice:
            call.answer_headers[DEGRADED] = "degraded"
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

    def _wanted(
        self, call: Call, asked: Asked, plan: Sequence[Target], models: tuple[str, ...]
    ) -> Wanted:
        tokens_in = self.estimator.input_tokens(
            asked.model, asked.text_bytes, asked.images, self._counted(call, plan)
        )
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

    def _counted(self, call: Call, plan: Sequence[Target]) -> int | None:
        """The prompt's tokens, if all who may be asked are engines whose tokenizer we have."""
        counters = self.counters
        if not counters or any(target.backend not in counters for target in plan):
            return None
        prompt = prompt_of(call.surface, call.body)
        if prompt is None:
            return None
        of_each = {id(counters[t.backend]): counters[t.backend] for t in plan}.values()
        return prompt.extra + max(counter.count(prompt.texts) for counter in of_each)

    async def _decide(self, call: Call, hold: _Hold, wanted: Wanted) -> Verdict:
        """By the store, else by the slice."""
        rules, budgets = hold.found.rules, hold.found.budgets
        demands = [rule.demand(wanted) for rule in rules]
        if budgets:
            now_us = self._clock.now_ns() // 1000
            for index in budgets:
                rule = rules[index]
                assert rule.budget is not None
                window = self._windows.now(rule.budget, now_us)
                demands[index] = replace(demands[index], window_us=window.start_us)
                self._follower.uses(hold.root, rule)
        hold.demands = demands
        try:
            verdict = await self._ask(call, hold)
            if verdict.cold:
                hold.in_store = False  # it may not have been held: nobody knows what is spent
                await self._follower.read(hold.root, [rules[i] for i in verdict.cold])
                # What settled in the last moments may not have been shipped yet: look again soon.
                asyncio.get_running_loop().call_later(SHIPPED_S, self._recovered.set)
                verdict = await self._ask(call, hold)
                if verdict.cold:
                    raise StoreGone("emptied again")
        except (StoreGone, StoreUnavailable, TimeoutError) as error:
            self._say_why(error)
            hold.in_store = isinstance(error, StoreGone) and error.was_sent
            return self._by_slice(call, hold)
        hold.in_store = verdict.admitted
        for index in budgets:
            self._slices.saw(hold.root, demands[index], verdict.rooms[index].remaining)
        return verdict

    def _say_why(self, error: Exception) -> None:
        """Once in a while: an outage must not fill the log."""
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + LOG_EVERY_S
            log.warning("limits_by_slice", extra={"reason": type(error).__name__})

    async def _ask(self, call: Call, hold: _Hold) -> Verdict:
        """Bounded by the store itself, which knows when it was this process that was slow: a timer
        of ours would give up on an answer that is there to be read, and leave the hold behind."""
        limits = self._settings()[0]
        left_s = limits.store_budget_ms / 1000 - hold.waited_s
        clock = asyncio.get_running_loop().time
        began = clock()
        hold.in_store = True
        try:
            return await self.store.admit(
                hold.root, call.request_id, _lease_us(limits), hold.demands, within_s=left_s
            )
        finally:
            waited_s = clock() - began
            hold.waited_s += waited_s
            self.on_wait(waited_s)

    def _by_slice(self, call: Call, hold: _Hold) -> Verdict:
        hold.by_slice = True
        if hold.found.is_strict:
            call.answer_headers[DEGRADED] = "degraded"
            hold.by_slice = False
            raise words.strict_refusal()
        verdict = self._slices.admit(
            hold.root,
            call.request_id,
            _lease_us(self._settings()[0]),
            hold.demands,
            self._replicas(),
        )
        self.counts.sliced += verdict.admitted
        return verdict

    def _throttle(self, hold: _Hold, spent: Rule) -> None:
        """A spent budget of mode throttle lets some through, each minute."""
        assert spent.budget is not None
        pace = replace(
            spent,
            key=f"t:{spent.key}",
            kind=Kind.WINDOW,
            counts="requests",
            limit=self._settings()[0].throttled_per_minute,
            period_us=MINUTE_US,
            budget=None,
        )
        hold.found = applied([*_without_bite(hold.found.rules, "throttle"), pace])

    def _refusal(self, hold: _Hold, verdict: Verdict) -> GatewayError:
        """Names the limit that binds and when it frees."""
        rule, demand = hold.found.rules[verdict.binding], hold.demands[verdict.binding]
        refused = self.counts.refused
        about = (rule.scope, "budget" if rule.budget is not None else rule.counts)
        refused[about] = refused.get(about, 0) + 1
        ends_in_us = None
        if rule.budget is not None:
            now_us = self._clock.now_ns() // 1000
            end_us = self._windows.now(rule.budget, now_us).end_us
            ends_in_us = None if end_us is None else end_us - now_us
        found = words.refusal(rule, demand, verdict, by_slice=hold.by_slice, ends_in_us=ends_in_us)
        if rule.budget is not None and rule.budget.mode == "downgrade":
            return words.downgrades(found, rule.budget.downgrade_to)
        return found

    def _alert(self, hold: _Hold, verdict: Verdict) -> None:
        """Once per window for each soft budget that is overrun."""
        for index in hold.found.budgets:
            rule, demand = hold.found.rules[index], hold.demands[index]
            if rule.budget is None or rule.budget.mode != "soft":
                continue
            used = MOST - verdict.rooms[index].remaining
            alert = (hold.root, rule.key, demand.window_us)
            if used > rule.limit and alert not in self._alerted:
                if len(self._alerted) > MAX_CALLERS:
                    self._alerted.clear()
                self._alerted.add(alert)
                self.counts.soft_overruns += 1
                log.warning(
                    "budget_overrun",
                    extra={"tenant": rule.owner, "budget": rule.budget.id, "scope": rule.scope},
                )

    # -- grow

    def growth(self, request_id: str) -> Growth | None:
        """For a request that did not say how long its answer may get, and has a budget that can
        refuse."""
        hold = self._holds.get(request_id)
        if hold is None or hold.asked.output_limit is not None:
            return None
        if not any(_may_refuse(rule) for rule in hold.found.rules):
            return None

        async def ask(attempt: Attempt, tokens: int) -> bool:
            return await self._extend(request_id, hold, attempt, tokens)

        return Growth(hold.output_tokens, ask)

    async def _extend(self, request_id: str, hold: _Hold, attempt: Attempt, tokens: int) -> bool:
        """Hold that many output tokens more on every budget that can refuse."""
        if self._holds.get(request_id) is not hold:
            return True  # it has been settled meanwhile
        nano = self.estimator.money_nano(
            self._prices(),
            backend=attempt.backend,
            provider=attempt.provider,
            model=attempt.model,
            input_tokens=0,
            output_tokens=tokens,
            now_ns=self._clock.now_ns(),
        )
        if not nano:
            return True
        more = [nano if _may_refuse(rule) else 0 for rule in hold.found.rules]
        if hold.in_store:
            try:
                answer = await self.store.extend(hold.root, request_id, more)
            except StoreGone as error:
                self._say_why(error)
                answer = None
            if answer is not None:
                return answer
        return self._extend_by_slice(request_id, hold, more)

    def _extend_by_slice(self, request_id: str, hold: _Hold, more: Sequence[int]) -> bool:
        if any(
            rule.is_strict for rule, amount in zip(hold.found.rules, more, strict=True) if amount
        ):
            return False
        parts = [
            replace(demand, amount=amount)
            for demand, amount in zip(hold.demands, more, strict=True)
            if amount
        ]
        hold_id = f"{request_id}+{len(hold.grown)}"
        lease_us = _lease_us(self._settings()[0])
        verdict = self._slices.admit(hold.root, hold_id, lease_us, parts, self._replicas())
        if verdict.admitted:
            hold.grown = [*hold.grown, (hold_id, [part.amount for part in parts])]
        return verdict.admitted

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
        was_ended = record.outcome is Outcome.BUDGET_REFUSED and record.attempts
        self.counts.streams_ended += bool(was_ended)
        taken = taken_by(record)
        amounts = [rule.actual(taken) for rule in hold.found.rules]
        ended_us = (record.ended_ns or 0) // 1000
        if hold.by_slice:
            self._slices.settle(hold.root, record.request_id, amounts, ended_us)
        for hold_id, grown in hold.grown:
            self._slices.settle(hold.root, hold_id, grown, ended_us)
        if hold.in_store:
            self.store.settle(hold.root, record.request_id, amounts, ended_us)

    # -- upkeep

    async def budget(self, root: str, key: str) -> BudgetState | None:
        """A budget's counter. Raises StoreGone."""
        return await self.store.budget(root, key)

    async def rebase(self) -> None:
        """Correct every budget that is used, by the ledger. Raises StoreGone, StoreUnavailable."""
        busy = frozenset(hold.root for hold in self._holds.values())
        await self._follower.correct_all(busy)

    def recovered(self) -> None:
        """The store is back, perhaps without its memory: correct all budgets soon."""
        self._recovered.set()

    async def renew(self) -> None:
        """Keep the holds of running requests. Raises StoreGone."""
        by_root: dict[str, list[str]] = {}
        lease_us = _lease_us(self._settings()[0])
        for request_id, hold in self._holds.items():
            if hold.in_store:
                by_root.setdefault(hold.root, []).append(request_id)
            if hold.by_slice:
                self._slices.renew(hold.root, request_id, lease_us)
            for hold_id, _ in hold.grown:
                self._slices.renew(hold.root, hold_id, lease_us)
        for root, hold_ids in by_root.items():
            await self.store.renew(root, hold_ids, lease_us)

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


def _without_bite(rules: Sequence[Rule], mode: str) -> list[Rule]:
    """Budgets of a mode count, and no longer refuse."""
    return [
        replace(rule, budget=replace(rule.budget, mode="soft"))
        if rule.budget is not None and rule.budget.mode == mode
        else rule
        for rule in rules
    ]


def _may_refuse(rule: Rule) -> bool:
    return rule.budget is not None and rule.budget.mode == "hard"


def _unheard(_: float) -> None:
    pass


def _lease_us(settings: LimitSettings) -> int:
    return round(settings.lease_s * 1e6)
