"""Whose step is next, where several models share the same cores. No torch.

One step at a time: two at once would each wait at the other's barriers. The turn goes to whoever
has computed least, so that a model with long steps gets no more of the machine than one with short
ones; who was idle begins level with the others and saves up nothing.
"""

import threading
import time
from collections.abc import Callable, Sequence

from backends.engine.types import Drafter, ModelFacts, Row, Runner, StepResult


class Turns:
    """Safe for any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._waiting: list[str] = []
        self._used_ns: dict[str, int] = {}
        self._floor_ns = 0

    def take(self, who: str) -> bool:
        """Wait for the turn; whether there was anybody to wait for."""
        with self._changed:
            self._used_ns[who] = max(self._used_ns.get(who, 0), self._floor_ns)
            self._waiting.append(who)
            is_contended = not self._is_next(who)
            self._changed.wait_for(lambda: self._is_next(who))
            self._waiting.remove(who)
            self._holder = who
            return is_contended

    def give(self, who: str, took_ns: int) -> None:
        with self._changed:
            self._used_ns[who] += took_ns
            self._holder = None
            # Who gives the turn back is here still: it may want the next one at once.
            least = min(self._used_ns[name] for name in (who, *self._waiting))
            self._floor_ns = max(self._floor_ns, least)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    @property
    def is_free(self) -> bool:
        with self._changed:
            return self._holder is None

    def _is_next(self, who: str) -> bool:
        least = min(self._waiting, key=lambda name: self._used_ns[name])
        return self._holder is None and self._used_ns[who] == self._used_ns[least]


class SharedRunner:
    """A runner that computes in its turn. `waited` is called when it had to wait for others, so
    that their time is not taken for its own."""

    def __init__(
        self, runner: Runner, turns: Turns, who: str, *, waited: Callable[[], object]
    ) -> None:
        self._runner = runner
        self._turns = turns
        self._who = who
        self._waited = waited
        self.facts: ModelFacts = runner.facts
        self.drafter: Drafter | None = runner.drafter

    def close(self) -> None:
        self._runner.close()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)

    def read_block(self, block: int) -> memoryview:
        return self._runner.read_block(block)

    def write_block(self, block: int, data: memoryview) -> None:
        self._runner.write_block(block, data)

    def run(self, rows: Sequence[Row]) -> StepResult:
        if self._turns.take(self._who):
            self._waited()
        started_ns = time.perf_counter_ns()
        try:
            return self._runner.run(rows)
        finally:
            self._turns.give(self._who, time.perf_counter_ns() - started_ns)
