"""Who computes what in the next step. Pure bookkeeping: no torch, no clock, no thread.

Rules, in this order:
1. Running sequences that decode get their one token first: a long prompt never stops them.
2. Running prompts go on in chunks, within what is left of the token budget.
   While others decode, that budget is what keeps the step near its target time.
3. Newcomers join, by (priority, arrival), if their whole remaining text plus headroom fits in
   free blocks: a half-admitted sequence would hold blocks and wait for others that do the same.
   They begin after what the pool still knows of their text, and always compute one token at
   least, because the next one is sampled from it. Further choices of a prompt wait until the
   first has computed it, share its full blocks and copy the last, partial one.
When a decode needs a block and none is free, the sequence that comes last by (priority, arrival)
gives its blocks back and computes its text again later. The first one is never a victim and a
sequence larger than the pool is never accepted, so somebody always advances. A waiting sequence
gains one priority level for every `AGE_STEPS` steps, so that nobody waits for ever.
"""

from bisect import insort
from collections.abc import Callable

from msgspec import Struct

from backends.engine.kv import BLOCK_TOKENS, BlockPool, blocks_for, extend_chain
from backends.engine.spec import Pace
from backends.engine.types import Drafter, Guesses, Row, Sequence

AGE_STEPS = 512
SCORED_TOKENS = 64  # of a prompt that is scored, in one step


class Plan(Struct, frozen=True):
    rows: list[Row]
    admitted: list[Sequence]
    preempted: list[Sequence]
    copies: list[tuple[int, int]]  # blocks to copy before the rows are computed: (from, to)


class Scheduler:
    """Owns the queue and the blocks of every sequence in it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        draft_price: Callable[[int], float] = lambda decodes: 1.0,
        drafter: Drafter | None = None,
        prompt_room: Callable[[int], int] | None = None,
    ) -> None:
        """`prompt_room(decodes)`: prompt tokens that may join a step of so many decodes."""
        self._prompt_room = prompt_room or (lambda decodes: max_batch_tokens // 4)
        self._step = 0
        self._draft_price = draft_price
        self._drafter = drafter
        self.pool = pool
        self.waiting: list[Sequence] = []  # sorted by _rank
        self.running: list[Sequence] = []  # sorted by _rank
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._copies: list[tuple[int, int]] = []

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
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def computed(self, sequence: Sequence, n_computed: int) -> None:
        """A step is over: `tokens[:n_computed]` are in its blocks. Those that are full can be
        found from now on."""
        sequence.n_computed = n_computed
        sequence.high_water = max(sequence.high_water, n_computed)
        full = n_computed // BLOCK_TOKENS
        if sequence.root is None or full <= sequence.n_published:
            return
        extend_chain(sequence.keys, sequence.root, sequence.tokens, full)
        for number in range(sequence.n_published, full):
            begin = number * BLOCK_TOKENS
            text = sequence.tokens[begin : begin + BLOCK_TOKENS]
            self.pool.publish(sequence.blocks[number], sequence.keys[number], text)
        sequence.n_published = full

    def distrust(self, sequence: Sequence) -> None:
        """Its numbers went wrong: nobody else may build on them."""
        self.pool.distrust(sequence.blocks)

    def plan(self) -> Plan:
        """The next step. No rows: there is nothing to do."""
        preempted: list[Sequence] = []
        self._copies = []
        self._step += 1
        self._age()
        rows = self._decodes(preempted)
        budget = self._max_batch_tokens - sum(row.count for row in rows)
        if rows:
            budget = min(budget, max(BLOCK_TOKENS, self._prompt_room(len(rows))))
        for sequence in self.running:
            if budget > 0 and not sequence.is_decoding:
                rows.append(_chunk(sequence, budget))
                budget -= rows[-1].count
        admitted = [] if preempted else self._admissions(budget)
        for sequence in admitted:
            rows.append(_chunk(sequence, budget))
            budget -= rows[-1].count
        return Plan(rows, admitted, preempted, self._copies)

    def _decodes(self, preempted: list[Sequence]) -> list[Row]:
        decoding: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.is_decoding:
                continue  # preempted for one before it, or still at its prompt
            if self._grow(sequence, preempted):
                decoding.append(sequence)
        rows: list[Row] = []
        for sequence, guesses in zip(decoding, self._guesses(decoding), strict=True):
            drafts = self._with_blocks(sequence, guesses.tokens)
            count = 1 + len(drafts)
            rows.append(Row(sequence, sequence.n_computed, count, drafts, guesses.drafting_s))
        return rows

    def _guesses(self, decoding: list[Sequence]) -> list[Guesses]:
        """What to check beside their next tokens; a second model is asked once for all."""
        if not decoding:
            return []
        price = self._draft_price(len(decoding))
        room = self._max_batch_tokens - len(decoding)
        found: dict[int, Guesses] = {}
        asked: list[tuple[Sequence, int]] = []
        for sequence in decoding:
            limit = min(room, sequence.max_tokens - sequence.n_output - 1)
            proposer = sequence.proposer
            if proposer is None or limit < 1:
                continue
            if isinstance(proposer, Pace):
                count = proposer.wanted(limit, price)
                if count:
                    asked.append((sequence, count))
            else:
                found[id(sequence)] = Guesses(proposer.propose(sequence.tokens, limit, price))
                count = len(found[id(sequence)].tokens)
            room -= count
        if asked and self._drafter is not None:
            for (sequence, _), guesses in zip(asked, self._drafter.draft(asked), strict=True):
                found[id(sequence)] = guesses
        return [found.get(id(sequence), Guesses()) for sequence in decoding]

    def _with_blocks(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Those that blocks are free for."""
        if not drafts:
            return ()
        missing = blocks_for(sequence.n_computed + 1 + len(drafts)) - len(sequence.blocks)
        if missing > 0:
            spare = self.pool.free - len(self.running)
            more = None
            if spare >= missing:
                more = self.pool.allocate(missing, after=sequence.blocks[-1])
            sequence.blocks += more or []
        held = len(sequence.blocks) * BLOCK_TOKENS - sequence.n_computed - 1
        return drafts[: max(0, held)]

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for one more token; False if it was itself the one to give way."""
        if blocks_for(sequence.n_computed + 1) <= len(sequence.blocks):
            return True
        while (more := self.pool.allocate(1, after=sequence.blocks[-1])) is None:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += more
        return True

    def preempt(self, victim: Sequence) -> None:
        """It gives its blocks back, waits, and computes again what nobody keeps."""
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        victim.n_computed = victim.n_published = 0
        victim.job.preemptions += 1
        insort(self.waiting, victim, key=_rank)

    def _admissions(self, budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_batch_size:
                break
            leader = sequence.leader
            if leader is not None and leader.blocks and leader.n_computed < leader.n_prompt:
                continue  # soon it can be forked
            if not self._place(sequence):
                break  # strictly in order: a smaller one behind it would starve it
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_rank)
            sequence.waited_since = None
            admitted.append(sequence)
            budget -= min(budget, sequence.n_pending)
        return admitted

    def _age(self) -> None:
        is_changed = False
        for sequence in self.waiting:
            if sequence.waited_since is None:
                sequence.waited_since = self._step
            elif self._step - sequence.waited_since >= AGE_STEPS:
                sequence.waited_since = self._step
                sequence.priority -= 1
                is_changed = True
        if is_changed:
            self.waiting.sort(key=_rank)

    def _place(self, sequence: Sequence) -> bool:
        """Give it blocks for its whole text and one token more, or none."""
        known, partial = self._known(sequence)
        more = blocks_for(len(sequence.tokens) + 1) - len(known)
        # One block for each that runs, so that nobody is thrown out at the next boundary.
        if more + len(self.running) > self.pool.free:
            self.pool.release(known)
            return False
        is_new = sequence.high_water == 0
        sequence.n_computed = len(known) * BLOCK_TOKENS
        sequence.n_published = len(known) if sequence.root is not None else 0
        blocks = self.pool.allocate(more, after=known[-1] if known else None)
        assert blocks is not None, "free blocks were counted a line ago"
        if partial is not None:
            self._copies.append((partial, blocks[0]))
            sequence.n_computed = sequence.n_prompt - 1
        elif is_new:
            sequence.cached_tokens = sequence.n_computed
        sequence.blocks = known + blocks
        return True

    def _known(self, sequence: Sequence) -> tuple[list[int], int | None]:
        """Blocks that it can take over, now shared with it, and a block whose first tokens are
        its own too. One token at least is left to compute."""
        leader = sequence.leader
        last = sequence.n_prompt - 1
        if leader is not None and leader.blocks and sequence.high_water == 0:
            full = last // BLOCK_TOKENS
            shared = leader.blocks[:full]
            self.pool.share(shared)
            if sequence.root is not None:
                extend_chain(sequence.keys, sequence.root, sequence.tokens, full)
            return shared, leader.blocks[full] if last % BLOCK_TOKENS else None
        if sequence.root is None:
            return [], None
        full = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        extend_chain(sequence.keys, sequence.root, sequence.tokens, full)
        return self.pool.match(sequence.keys[:full], sequence.tokens), None


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _chunk(sequence: Sequence, budget: int) -> Row:
    """What is computed again and what is new are never in one row: they are charged apart."""
    count = min(budget, sequence.n_pending)
    if sequence.scores is not None:  # a row of logits for each token
        count = min(count, SCORED_TOKENS)
    if sequence.n_computed < sequence.high_water:
        count = min(count, sequence.high_water - sequence.n_computed)
    return Row(sequence, sequence.n_computed, count)
