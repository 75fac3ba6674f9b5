"""Who computes what in the next step. Pure bookkeeping: no torch, no clock, no thread.

Rules, in this order:
1. A waiting sequence of a strictly better priority takes slot and blocks of worse ones, if what
   they give is enough for it. One a step; who came back from a preemption stays for a while.
2. Running sequences that decode get their one token: a long prompt never stops them.
3. Running prompts go on in chunks, within what is left of the token budget.
   While others decode, that budget is what keeps the step near its target time.
4. Newcomers join if their whole remaining text plus headroom fits in free blocks: a half-admitted
   sequence would hold blocks and wait for others that do the same. They begin after what the pool
   still knows of their text, and always compute one token at least, because the next one is
   sampled from it. Further choices of a prompt wait until the first has computed it, share its
   full blocks and copy the last, partial one.

Who is next: the best priority class; in it first who was preempted, then the tenant that was
served least (`shares`), then who came first. A class gains one level for every `AGE_STEPS` steps
in which none of it was admitted, so that nobody waits for ever.

When a decode needs a block and none is free, a sequence of the worst class behind it gives its
blocks: the one that is cheapest to have back, per block. Its blocks are swapped out where that is
cheaper than computing them again, as measured; else it computes again. The first one in rank is
never such a victim and a sequence larger than the pool is never accepted, so somebody always
advances.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from backends.engine.kv import BLOCK_TOKENS, BlockPool, blocks_for, extend_chain
from backends.engine.shares import Shares
from backends.engine.spec import Pace
from backends.engine.swap import Saved
from backends.engine.types import Drafter, Guesses, Row, Sequence

AGE_STEPS = 512
SCORED_TOKENS = 64  # of a prompt that is scored, in one step
FARTHEST = 8  # levels between two classes count as no more than that
STAY_STEPS = 16  # in which who came back from a preemption is not preempted again for a better one


class Swap(Protocol):
    """Where blocks can wait. See `backends.engine.swap`."""

    def price_s(self, count: int) -> float | None: ...

    def save(self, blocks: list[int]) -> Saved | None: ...

    def load(self, saved: Saved, blocks: list[int], *, skip: int = 0) -> bool: ...

    def drop(self, saved: Saved) -> None: ...


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
        compute_s: Callable[[int], float] = lambda tokens: tokens * 1e-3,
        swap: Swap | None = None,
    ) -> None:
        """`prompt_room(decodes)`: prompt tokens that may join a step of so many decodes.
        `compute_s(tokens)`: what computing so many prompt tokens takes, as measured lately."""
        self._prompt_room = prompt_room or (lambda decodes: max_batch_tokens // 4)
        self._step = 0
        self._draft_price = draft_price
        self._compute_s = compute_s
        self._swap = swap
        self._drafter = drafter
        self.pool = pool
        self.shares = Shares()
        self.waiting: list[Sequence] = []  # sorted by _rank
        self.running: list[Sequence] = []  # sorted by _rank
        self._since: dict[int, int] = {}  # class -> the step since when none of it was admitted
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._copies: list[tuple[int, int]] = []

    @property
    def max_batch_size(self) -> int:
        return self._max_batch_size

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.n_pending for sequence in list(self.waiting))

    def add(self, sequence: Sequence) -> None:
        if blocks_for(sequence.n_prompt + sequence.max_tokens) > self.pool.total:
            raise ValueError("this sequence can never fit: refuse it before it gets here")
        self.shares.enter(sequence)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finished, failed or cancelled: its blocks are free at once. Idempotent."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                self.shares.leave(sequence)
        self.pool.release(sequence.blocks)
        self._forget_saved(sequence)
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
        first = self._make_way(preempted)
        has_made_way = len(preempted)
        rows = self._decodes(preempted)
        budget = self._max_batch_tokens - sum(row.count for row in rows)
        if rows:
            budget = min(budget, max(BLOCK_TOKENS, self._prompt_room(len(rows))))
        for sequence in self.running:
            if budget > 0 and not sequence.is_decoding:
                rows.append(_chunk(sequence, budget))
                budget -= rows[-1].count
        is_full = len(preempted) > has_made_way
        admitted = [] if is_full else self._admissions(budget, preempted if first else [])
        for sequence in admitted:
            rows.append(_chunk(sequence, budget))
            budget -= rows[-1].count
        return Plan(rows, first + admitted, preempted, self._copies)

    def _make_way(self, preempted: list[Sequence]) -> list[Sequence]:
        """Preempt for the next one, if worse ones run and give it what it lacks; it has joined."""
        if not self.waiting or not self.running:
            return []
        if self.running[-1].priority <= self.waiting[0].priority:
            return []
        candidate = self._next(())
        if candidate is None:
            return []
        # The right to preempt is what was asked for, never what waiting made of it.
        asked = candidate.job.request.priority
        worse = [s for s in self.running if s.priority > asked and self._may_go(s)]
        lacking = self._shortage(candidate)
        has_slot = len(self.running) < self._max_batch_size
        if not worse or (has_slot and lacking <= 0):
            return []
        victims: list[Sequence] = []
        worse.sort(key=lambda s: (-s.priority, self._cost(s), -s.arrival))
        for victim in worse:
            if victims and lacking <= 0:
                break
            victims.append(victim)
            lacking -= self._gives(victim) + 1  # and what was kept free for its growth
        if lacking > 0:
            return []  # it would still not fit, and they would have gone for nothing
        for victim in victims:
            self.preempt(victim)
            preempted.append(victim)
        if not self._place(candidate):
            return []
        self._join(candidate)
        return [candidate]

    def _may_go(self, sequence: Sequence) -> bool:
        has_come_back = sequence.preemptions > 0 and self._step - sequence.joined < STAY_STEPS
        return not has_come_back

    def _gives(self, sequence: Sequence) -> int:
        """Blocks that are free once it has gone: those that it shares are not."""
        return sum(self.pool.references(block) == 1 for block in sequence.blocks)

    def _cost(self, sequence: Sequence) -> float:
        """Seconds to have it back, for each block that it gives."""
        back_s = self._compute_s(sequence.n_computed)
        if self._swap is not None:
            price_s = self._swap.price_s(blocks_for(sequence.n_computed))
            back_s = back_s if price_s is None else min(back_s, price_s)
        return back_s / max(1, self._gives(sequence))

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
            victim = self._victim(sequence)
            self.preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += more
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who gives way for this one to grow: one of the worst class, from itself on in rank. Who
        joined in this step has no blocks to speak of, and nobody behind it is in the plan yet."""
        behind = self.running[self.running.index(sequence) + 1 :]
        behind = [s for s in behind if s.joined < self._step]
        worst = [s for s in behind if s.priority == behind[-1].priority]
        settled = [s for s in worst if self._may_go(s)] or worst
        return min(settled, key=lambda s: (self._cost(s), -s.arrival), default=sequence)

    def preempt(self, victim: Sequence) -> None:
        """It gives its blocks and waits. They are saved if having them back is cheaper than
        computing again what nobody keeps."""
        self.running.remove(victim)
        count = blocks_for(victim.n_computed)
        if self._swap is not None and count:
            price_s = self._swap.price_s(count)
            if price_s is not None and price_s < self._compute_s(victim.n_computed):
                victim.saved = self._swap.save(victim.blocks[:count])
        self.pool.release(victim.blocks)
        if victim.saved is None:
            victim.n_computed = 0
        victim.n_published = 0
        victim.preemptions += 1
        victim.job.preemptions += 1
        self._enqueue(victim)

    def _enqueue(self, sequence: Sequence) -> None:
        at = bisect_left(self.waiting, _rank(sequence), key=_rank)
        neighbours = self.waiting[max(0, at - 1) : at + 1]
        if all(other.priority != sequence.priority for other in neighbours):
            self._since[sequence.priority] = self._step
        self.waiting.insert(at, sequence)

    def _join(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._since[sequence.priority] = self._step
        if self.waiting:  # whom its class has overtaken by waiting, it stays ahead of
            sequence.priority = min(sequence.priority, self.waiting[0].priority)
        insort(self.running, sequence, key=_rank)
        sequence.joined = self._step
        self.shares.admit(sequence, round(self._compute_s(sequence.n_pending) * 1e6))

    def _next(self, skip: list[Sequence] | tuple[()]) -> Sequence | None:
        """Who is to be admitted next, whether it fits or not."""
        best: Sequence | None = None
        best_key: tuple[int, int, int, int, int] | None = None
        for sequence in self.waiting:
            level = min(sequence.priority - self.waiting[0].priority, FARTHEST)
            level -= (self._step - self._since[sequence.priority]) // AGE_STEPS
            is_new = sequence.preemptions == 0
            served = self.shares.served(sequence.tenant) if is_new else 0
            key = (level, sequence.priority, is_new, served, sequence.arrival)
            if best_key is not None and key >= best_key:
                continue
            leader = sequence.leader
            if leader is not None and leader.blocks and leader.n_computed < leader.n_prompt:
                continue  # soon it can be forked
            if sequence not in skip:
                best, best_key = sequence, key
        return best

    def _admissions(self, budget: int, preempted: list[Sequence]) -> list[Sequence]:
        admitted: list[Sequence] = []
        while budget > 0 and len(self.running) < self._max_batch_size:
            sequence = self._next(preempted)
            if sequence is None or not self._place(sequence):
                break  # strictly in order: a smaller one behind it would starve it
            self._join(sequence)
            admitted.append(sequence)
            budget -= min(budget, sequence.n_pending)
        return admitted

    def _shortage(self, sequence: Sequence) -> int:
        """Blocks that it lacks for joining."""
        known, _ = self._known(sequence)
        more = blocks_for(len(sequence.tokens) + 1) - len(known)
        lacking = more + len(self.running) - self.pool.free
        self.pool.release(known)
        return lacking

    def _place(self, sequence: Sequence) -> bool:
        """Give it blocks for its whole text and one token more, or none."""
        known, partial = self._known(sequence)
        more = blocks_for(len(sequence.tokens) + 1) - len(known)
        # One block for each that runs, so that nobody is thrown out at the next boundary.
        if more + len(self.running) > self.pool.free:
            self.pool.release(known)
            return False
        is_new = sequence.high_water == 0
        saved_tokens = 0 if sequence.saved is None else sequence.n_computed
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
        if sequence.saved is not None and self._swap is not None:
            wanted = max(0, blocks_for(saved_tokens) - len(known))
            if saved_tokens <= sequence.n_computed:
                self._forget_saved(sequence)  # all of it is still known
            elif self._swap.load(sequence.saved, blocks[:wanted], skip=len(known)):
                sequence.n_computed = saved_tokens
            sequence.saved = None
        return True

    def _forget_saved(self, sequence: Sequence) -> None:
        if sequence.saved is not None and self._swap is not None:
            self._swap.drop(sequence.saved)
        sequence.saved = None

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
