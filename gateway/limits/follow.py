"""Budgets follow the ledger: a counter that is new begins with what the ledger knows was spent, and
every one in use is corrected by it now and then, so that no drift stays.

Must not know requests, prices or SQL (`SpendSource` does). Invariants: one question at a time for
each budget, however many requests wait for it, and few at a time in all, so that a store that was
emptied is no herd on the database.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from gateway.allowances import BudgetSettings
from gateway.limits.arithmetic import MINUTE_US, ROLLING_SLOTS, Spent
from gateway.limits.rules import Rule, Windows
from gateway.limits.store import Store
from telemetry.clock import Clock

AT_ONCE: Final = 8  # questions to the ledger
COLUMNS: Final = {"key": "key_id", "route": "asked_model"}  # of the ledger, by a budget's scope


class SpendSource(Protocol):
    """What the ledger knows of a budget. Raises StoreUnavailable."""

    async def of(
        self,
        owner: str,
        filters: Mapping[str, str],
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
    def slots(self) -> Mapping[int, int]: ...


class Follower:
    """`rebases` counts corrections."""

    def __init__(
        self,
        store: Store,
        spend: SpendSource,
        windows: Windows,
        *,
        settings: Callable[[], BudgetSettings],
        clock: Clock,
        patience_s: float,
    ) -> None:
        """`patience_s`: how long requests wait for the ledger, from when the question was put."""
        self.rebases = 0
        self._store = store
        self._spend = spend
        self._windows = windows
        self._settings = settings
        self._clock = clock
        self._patience_s = patience_s
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._used: OrderedDict[tuple[str, str], Rule] = OrderedDict()  # since last corrected
        self._reading: dict[tuple[str, str], tuple[float, asyncio.Task[None]]] = {}

    def uses(self, root: str, rule: Rule) -> None:
        self._used[root, rule.key] = rule

    async def read(self, root: str, rules: Iterable[Rule]) -> None:
        """Begin the counters of these budgets. Shared by all requests that wait for one, and not
        given up when one of them is. Raises StoreGone, StoreUnavailable, TimeoutError."""
        loop = asyncio.get_running_loop()
        for rule in rules:
            about = (root, rule.key)
            found = self._reading.get(about)
            if found is None:
                task = asyncio.ensure_future(self._correct(root, rule))
                found = self._reading[about] = (loop.time(), task)
                task.add_done_callback(functools.partial(self._was_read, about))
            began, task = found
            async with asyncio.timeout_at(began + self._patience_s):
                await asyncio.shield(task)

    def _was_read(self, about: tuple[str, str], task: "asyncio.Task[None]") -> None:
        self._reading.pop(about, None)
        if not task.cancelled():
            task.exception()  # told to whoever waited; nobody may

    async def _correct(self, root: str, rule: Rule) -> None:
        assert rule.budget is not None
        async with self._asking:
            settled_after_us = self._settings().settled_after_s * 1_000_000
            now_us = self._clock.now_ns() // 1000
            window = self._windows.now(rule.budget, now_us)
            grain_us = rule.period_us // ROLLING_SLOTS if rule.period_us else MINUTE_US
            cut = (now_us - settled_after_us) // grain_us
            start_us = now_us - rule.period_us - grain_us if rule.period_us else window.start_us
            found = await self._spend.of(
                rule.owner,
                {COLUMNS[rule.scope]: rule.subject} if rule.scope in COLUMNS else {},
                start_us=start_us,
                cut=cut,
                grain_us=grain_us,
                all_slots=bool(rule.period_us),
            )
            await self._store.rebase(
                root,
                Spent(
                    key=rule.key,
                    period_us=rule.period_us,
                    window_us=window.start_us,
                    before=found.before,
                    cut=cut,
                    slots=found.slots,
                ),
            )
            self.rebases += 1

    async def correct_all(self, busy: frozenset[str]) -> None:
        """Correct every budget that was used since the last time, or whose tenant is `busy`. Raises
        StoreGone, StoreUnavailable; then all of them are corrected next time."""
        for (root, key), rule in list(self._used.items()):
            await self._correct(root, rule)
            if self._used.get((root, key)) is rule and root not in busy:
                del self._used[root, key]
