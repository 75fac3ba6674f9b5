"""Who computes what in the next step. Pure bookkeeping: no torch, no clock, no thread.

Rules, in this order:
1. Running sequences that decode get their one token first: a long prompt never stops them.
2. Running prompts go on in chunks, within what is left of the token budget.
3. Newcomers join, by (priority, arrival), if their whole remaining text plus headroom fits in
   free blocks: a half-admitted sequence would hold blocks and wait for others that do the same.
When a decode needs a block and none is free, the sequence that comes last by (priority, arrival)
gives its blocks back and computes its text again later. The first one is never a victim and a
sequence larger than the pool is never accepted, so somebody always advances.
"""

from bisect import insort

from msgspec import Struct

from backends.engine.kv import BlockPool, blocks_for
from backends.engine.types import Row, Sequence


class Plan(Struct, frozen=True):
    rows: list[Row]
    admitted: list[Sequence]
    preempted: list[Sequence]


class Scheduler:
    """Owns the queue and the blocks of every sequence in it."""

    def __init__(self, pool: BlockPool, *, max_batch_size: int, max_batch_tokens: int) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []  # sorted by _rank
        self.running: list[Sequence] = []  # sorted by _rank
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.n_pending for sequence in self.waiting)

    def add(self, sequence: Sequence) -> None:
        if blocks_for(sequence.n_prompt + sequence.max_tokens) > self.pool.total:
            raise ValueError("this sequence can never fit: refuse it before it gets here")
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Finished, failed or cancelled: its blocks are free at once. Idempotent."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self.pool.release(sequence.blocks)

    def plan(self) -> Plan:
        """The next step. No rows: there is nothing to do."""
        preempted: list[Sequence] = []
        rows = self._decodes(preempted)
        budget = self._max_batch_tokens - len(rows)
        # While others decode, a prompt takes a quarter of the budget per step, so that the time
        # between their tokens stays near what it was.
        chunk = max(64, self._max_batch_tokens // 4) if rows else self._max_batch_tokens
        budget = min(budget, chunk)
        for sequence in self.running:
            if budget > 0 and not sequence.is_decoding:
                rows.append(_chunk(sequence, budget))
                budget -= rows[-1].count
        admitted = [] if preempted else self._admissions(budget)
        for sequence in admitted:
            rows.append(_chunk(sequence, budget))
            budget -= rows[-1].count
        return Plan(rows, admitted, preempted)

    def _decodes(self, preempted: list[Sequence]) -> list[Row]:
        rows = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.is_decoding:
                continue  # preempted for one before it, or still at its prompt
            if self._grow(sequence, preempted):
                rows.append(Row(sequence, sequence.n_computed, 1))
        return rows

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for one more token; False if it was itself the one to give way."""
        if blocks_for(sequence.n_computed + 1) <= len(sequence.blocks):
            return True
        while (more := self.pool.allocate(1, after=sequence.blocks[-1])) is None:
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += more
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        victim.n_computed = 0
        victim.job.preemptions += 1
        insort(self.waiting, victim, key=_rank)

    def _admissions(self, budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            needed = blocks_for(len(sequence.tokens) + 1)
            # One block for each that runs, so that nobody is thrown out at the next boundary.
            if needed + len(self.running) > self.pool.free:
                break  # strictly in order: a smaller one behind it would starve it
            blocks = self.pool.allocate(needed)
            assert blocks is not None, "free blocks were counted a line ago"
            sequence.blocks = blocks
            del self.waiting[0]
            insort(self.running, sequence, key=_rank)
            admitted.append(sequence)
            budget -= min(budget, sequence.n_pending)
        return admitted


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.job.request.priority, sequence.arrival


def _chunk(sequence: Sequence, budget: int) -> Row:
    return Row(sequence, sequence.n_computed, min(budget, sequence.n_pending))
