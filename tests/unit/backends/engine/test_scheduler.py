"""Who computes what: joining, leaving, room, order and progress. No torch."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.kv import BlockPool, blocks_for
from backends.engine.scheduler import AGE_STEPS, STAY_STEPS, Plan, Scheduler
from backends.engine.swap import Place, Saved
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Row, Sequence
from tests.fakes.engine import sequence


def compute(scheduler: Scheduler, plan: Plan) -> None:
    """Play the engine: every row is computed, whoever is due gets a token or ends."""
    for row in plan.rows:
        chosen = row.sequence
        scheduler.computed(chosen, row.context)
        if row.needs_token:
            chosen.append(5)
            if chosen.n_output == chosen.max_tokens:
                scheduler.remove(chosen)


def writes(plan: Plan) -> list[tuple[Sequence, int]]:
    """Positions that the plan's rows write."""
    return [(row.sequence, at) for row in plan.rows for at in range(row.start, row.context)]


def run_alone(scheduler: Scheduler, chosen: Sequence) -> list[tuple[int, int, int]]:
    """To its end; the first step's rows."""
    scheduler.add(chosen)
    plan = first = scheduler.plan()
    while plan.rows:
        compute(scheduler, plan)
        plan = scheduler.plan()
    return shape(first.rows)


def test_a_known_beginning_is_not_computed_again(words: Tokenizer) -> None:
    """The second request with the same 200 tokens begins after its three full blocks; another
    tenant's begins at 0; one whose whole prompt is known still computes its last token."""
    scheduler = Scheduler(BlockPool(16), max_batch_size=4, max_batch_tokens=512)
    prompt = list(range(5, 205))
    assert run_alone(scheduler, sequence(words, prompt, number=1, root=b"ada")) == [(1, 0, 200)]
    again = sequence(words, prompt, number=2, root=b"ada")
    assert run_alone(scheduler, again) == [(2, 192, 8)]
    assert again.cached_tokens == 192
    assert run_alone(scheduler, sequence(words, prompt, number=3, root=b"bob")) == [(3, 0, 200)]
    whole = sequence(words, prompt[:192], number=4, root=b"ada")
    assert run_alone(scheduler, whole) == [(4, 128, 64)]
    assert scheduler.pool.used == 0


def test_a_block_is_found_only_after_its_step(words: Tokenizer) -> None:
    """Two equal prompts that join in one step are both computed: neither is written yet."""
    scheduler = Scheduler(BlockPool(16), max_batch_size=4, max_batch_tokens=512)
    for number in (1, 2):
        scheduler.add(sequence(words, [5] * 130, number=number, root=b"ada"))
    assert shape(scheduler.plan().rows) == [(1, 0, 130), (2, 0, 130)]


def test_a_cancelled_prompt_leaves_its_blocks(words: Tokenizer) -> None:
    """What was computed before a cancel is found by the next request; what went wrong is not."""
    scheduler = Scheduler(BlockPool(16), max_batch_size=4, max_batch_tokens=128)
    for number, start in [(1, 0), (2, 128)]:
        chosen = sequence(words, [5] * 300, number=number, root=b"ada")
        scheduler.add(chosen)
        plan = scheduler.plan()
        assert shape(plan.rows) == [(number, start, 128)]
        compute(scheduler, plan)
        if number == 2:
            scheduler.distrust(chosen)
        scheduler.remove(chosen)
    assert run_alone(scheduler, sequence(words, [5] * 300, number=3, root=b"ada")) == [(3, 0, 128)]


def test_choices_of_a_prompt_fork_it(words: Tokenizer) -> None:
    """The second choice waits for the prompt, shares its full block, copies the partial one and
    computes one token; both write into blocks of their own."""
    scheduler = Scheduler(BlockPool(16), max_batch_size=4, max_batch_tokens=512)
    first = sequence(words, [5] * 100, number=1, max_tokens=90)
    second = sequence(words, [5] * 100, number=2, max_tokens=90)
    second.leader = first
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 0, 100)]
    compute(scheduler, plan)
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 100, 1), (2, 99, 1)]
    assert plan.copies == [(first.blocks[1], second.blocks[1])]
    assert first.blocks[0] == second.blocks[0]
    assert scheduler.pool.references(first.blocks[0]) == 2
    while plan.rows:
        compute(scheduler, plan)
        plan = scheduler.plan()
    assert (first.n_output, second.n_output, scheduler.pool.used) == (90, 90, 0)


def shape(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [(row.sequence.job.job_id, row.start, row.count) for row in rows]


def test_a_newcomer_joins_between_steps_and_a_finished_one_leaves(words: Tokenizer) -> None:
    """The second request's prompt runs beside the first one's decode; the first leaves at once."""
    scheduler = Scheduler(BlockPool(8), max_batch_size=4, max_batch_tokens=512)
    scheduler.add(sequence(words, [5] * 10, number=1, max_tokens=2))
    compute(scheduler, scheduler.plan())
    scheduler.add(sequence(words, [5] * 20, number=2, max_tokens=3))
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 10, 1), (2, 0, 20)]
    compute(scheduler, plan)
    assert [s.job.job_id for s in scheduler.running] == [2]
    assert scheduler.pool.used == 1


def test_long_prompts_are_chunked_behind_decodes(words: Tokenizer) -> None:
    """Alone a prompt takes the whole budget; beside a decode a quarter, and the decode is first."""
    scheduler = Scheduler(BlockPool(64), max_batch_size=4, max_batch_tokens=512)
    scheduler.add(sequence(words, [5] * 700, number=1, max_tokens=9))
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 0, 512)]
    compute(scheduler, plan)
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 512, 188)]
    compute(scheduler, plan)
    scheduler.add(sequence(words, [5] * 300, number=2, max_tokens=9))
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 700, 1), (2, 0, 128)]


def test_only_what_fits_whole_is_admitted(words: Tokenizer) -> None:
    """A prompt that does not fit whole takes no block and waits, and nobody overtakes it."""
    scheduler = Scheduler(BlockPool(4), max_batch_size=4, max_batch_tokens=512)
    scheduler.add(sequence(words, [5] * 100, number=1, max_tokens=50))
    compute(scheduler, scheduler.plan())
    scheduler.add(sequence(words, [5] * 150, number=2, max_tokens=50))
    scheduler.add(sequence(words, [5] * 10, number=3, max_tokens=5))
    assert shape(scheduler.plan().rows) == [(1, 100, 1)]
    assert [s.job.job_id for s in scheduler.waiting] == [2, 3]
    assert scheduler.pool.used == 2


def test_lower_priority_numbers_go_first(words: Tokenizer) -> None:
    """Waiting sequences are admitted by priority, then by arrival."""
    scheduler = Scheduler(BlockPool(8), max_batch_size=1, max_batch_tokens=512)
    for number, priority in [(1, 5), (2, 0), (3, 0)]:
        scheduler.add(sequence(words, [5], number=number, priority=priority, max_tokens=1))
    order = []
    for _ in range(3):
        plan = scheduler.plan()
        order += [row.sequence.job.job_id for row in plan.rows]
        compute(scheduler, plan)
    assert order == [2, 3, 1]


def test_who_waits_long_rises(words: Tokenizer) -> None:
    """One of a low priority is overtaken by later ones of a high priority, but not for ever."""
    scheduler = Scheduler(BlockPool(8), max_batch_size=1, max_batch_tokens=512)
    low = sequence(words, [5], number=0, priority=2, max_tokens=1)
    scheduler.add(low)
    number = 0
    while low.n_output == 0:
        number += 1
        assert number < 4 * AGE_STEPS
        scheduler.add(sequence(words, [5], number=number, priority=0, max_tokens=1))
        compute(scheduler, scheduler.plan())
    assert number > 2 * AGE_STEPS


def test_a_prompt_takes_what_the_step_target_leaves(words: Tokenizer) -> None:
    """Beside decodes a prompt's chunk is what the cost model allows, and one block at least."""
    for room, count in [(200, 200), (3, 64)]:
        scheduler = Scheduler(
            BlockPool(64), max_batch_size=4, max_batch_tokens=512,
            prompt_room=lambda decodes, room=room: room,
        )  # fmt: skip
        scheduler.add(sequence(words, [5] * 10, number=1, max_tokens=9))
        compute(scheduler, scheduler.plan())
        scheduler.add(sequence(words, [5] * 400, number=2, max_tokens=9))
        assert shape(scheduler.plan().rows) == [(1, 10, 1), (2, 0, count)]


def test_the_last_one_gives_way_when_blocks_run_out(words: Tokenizer) -> None:
    """A full pool takes the later sequence's blocks; it computes its text again and both end."""
    scheduler = Scheduler(BlockPool(4), max_batch_size=4, max_batch_tokens=512)
    first = sequence(words, [5] * 60, number=1, max_tokens=120)
    second = sequence(words, [5] * 60, number=2, max_tokens=120)
    scheduler.add(first)
    scheduler.add(second)
    preempted = 0
    for _ in range(500):
        plan = scheduler.plan()
        if not plan.rows:
            break
        preempted += len(plan.preempted)
        assert first not in plan.preempted
        compute(scheduler, plan)
    assert preempted >= 1
    assert second.job.preemptions == preempted
    assert (first.n_output, second.n_output) == (120, 120)
    assert scheduler.pool.used == 0


def test_a_sequence_larger_than_the_pool_is_refused(words: Tokenizer) -> None:
    """It could never end, so it never starts."""
    scheduler = Scheduler(BlockPool(2), max_batch_size=4, max_batch_tokens=512)
    with pytest.raises(ValueError, match="never fit"):
        scheduler.add(sequence(words, [5] * 100, max_tokens=29))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), total=st.integers(3, 12), batch=st.integers(1, 5))
def test_everybody_ends_whatever_happens(
    words: Tokenizer, seed: int, total: int, batch: int
) -> None:
    """Random arrivals, sizes, priorities and cancels in a small pool: each step advances somebody,
    stays within its budget, no block leaks, and all that were not cancelled end."""
    rng = random.Random(seed)
    pool = BlockPool(total)
    scheduler = Scheduler(pool, max_batch_size=batch, max_batch_tokens=64)
    alive = []
    for number in range(12):
        room = min(total * 64, 400)
        prompt = rng.randrange(1, room - 1)
        choice = sequence(
            words, [5] * prompt, number=number, priority=rng.randrange(3),
            root=rng.choice([None, b"ada", b"bob"]),
            max_tokens=rng.randrange(1, min(room - prompt, 120) + 1),
        )  # fmt: skip
        alive.append(choice)
    pending = list(alive)
    for _ in range(20_000):
        while pending and rng.random() < 0.3:
            scheduler.add(pending.pop())
        if rng.random() < 0.02:
            pool.check()
            victim = rng.choice(alive)
            if victim not in pending:
                scheduler.remove(victim)
                scheduler.remove(victim)
                alive.remove(victim)
                if not alive:
                    break
        plan = scheduler.plan()
        if not plan.rows and not pending:
            break
        assert plan.rows or not (scheduler.running or scheduler.waiting)
        assert sum(row.count for row in plan.rows) <= 64
        assert len(scheduler.running) <= batch
        assert all(len(r.sequence.blocks) >= blocks_for(r.context) for r in plan.rows)
        held = [block for s in scheduler.running for block in s.blocks]
        assert len(set(held)) == pool.used
        written = [s.blocks[i // 64] for s, i in writes(plan)]
        assert all(pool.references(block) == 1 for block in written)
        compute(scheduler, plan)
    pool.check()
    assert pool.used == 0
    assert all(choice.n_output == choice.max_tokens for choice in alive)


class Away:
    """Swap space that never fails, or loses all; `price_s` for a block, there and back."""

    def __init__(self, price_s: float | None, *, loses: bool = False) -> None:
        self.held: list[Saved] = []
        self.moved: list[list[int]] = []  # in
        self._price_s = price_s
        self._loses = loses

    def price_s(self, count: int) -> float | None:
        return None if self._price_s is None else count * self._price_s

    def save(self, blocks: list[int]) -> Saved | None:
        self.held.append(Saved([Place(memoryview(b"")) for _ in blocks]))
        return self.held[-1]

    def load(self, saved: Saved, blocks: list[int], *, skip: int = 0) -> bool:
        assert len(saved.places) == skip + len(blocks)
        self.moved.append(list(blocks))
        self.drop(saved)
        return not self._loses

    def drop(self, saved: Saved) -> None:
        self.held.remove(saved)


def test_the_better_priority_takes_the_place(words: Tokenizer) -> None:
    """With one slot a strictly better one runs at once; the worse one comes back after it and is
    not computed again where its blocks were swapped. An equal one waits."""
    away = Away(0.0)
    scheduler = Scheduler(BlockPool(8), max_batch_size=1, max_batch_tokens=512, swap=away)
    low = sequence(words, [5] * 100, number=1, priority=3, max_tokens=40)
    scheduler.add(low)
    compute(scheduler, scheduler.plan())
    scheduler.add(sequence(words, [5] * 20, number=2, priority=3, max_tokens=2))
    assert shape(scheduler.plan().rows) == [(1, 100, 1)]
    scheduler.add(sequence(words, [5] * 20, number=3, priority=0, max_tokens=1))
    plan = scheduler.plan()
    assert (shape(plan.rows), plan.preempted) == ([(3, 0, 20)], [low])
    assert low.saved is not None
    compute(scheduler, plan)
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 100, 1)]
    assert (plan.admitted, away.moved, away.held) == ([low], [low.blocks[:2]], [])


def test_a_better_priority_gets_blocks_but_never_in_vain(words: Tokenizer) -> None:
    """As many worse ones go as it takes, the cheapest first; none, if all of it would not do."""
    scheduler = Scheduler(BlockPool(8), max_batch_size=4, max_batch_tokens=512)
    for number, prompt in [(1, 120), (2, 60), (3, 60)]:
        kind = 0 if number == 1 else 5
        scheduler.add(sequence(words, [5] * prompt, number=number, priority=kind, max_tokens=200))
    compute(scheduler, scheduler.plan())
    scheduler.add(sequence(words, [5] * 500, number=4, priority=1, max_tokens=5))
    assert scheduler.plan().preempted == []
    scheduler.remove(scheduler.waiting[0])
    scheduler.add(sequence(words, [5] * 180, number=5, priority=1, max_tokens=5))
    plan = scheduler.plan()
    assert [s.job.job_id for s in plan.preempted] == [3]
    assert [s.job.job_id for s in scheduler.running] == [1, 5, 2]


@pytest.mark.parametrize(("price_s", "is_swapped"), [(None, False), (0.5, False), (0.0001, True)])
def test_the_cheaper_way_back_is_taken(
    words: Tokenizer, price_s: float | None, is_swapped: bool
) -> None:
    """Swapping is for blocks that take longer to compute than to move, where there is room."""
    away = Away(price_s)
    scheduler = Scheduler(
        BlockPool(8), max_batch_size=1, max_batch_tokens=512, swap=away,
        compute_s=lambda tokens: tokens * 1e-3,
    )  # fmt: skip
    low = sequence(words, [5] * 100, number=1, max_tokens=40)
    scheduler.add(low)
    compute(scheduler, scheduler.plan())
    scheduler.preempt(low)
    assert (low.saved is not None) == is_swapped == bool(away.held)
    assert low.n_computed == (100 if is_swapped else 0)
    plan = scheduler.plan()
    assert shape(plan.rows) == ([(1, 100, 1)] if is_swapped else [(1, 0, 100)])
    scheduler.preempt(low)
    scheduler.remove(low)
    assert (away.held, scheduler.pool.used) == ([], 0)


def test_what_is_lost_in_swap_is_computed_again(words: Tokenizer) -> None:
    """Its tokens are known, so nothing but time is lost."""
    scheduler = Scheduler(
        BlockPool(8), max_batch_size=1, max_batch_tokens=512, swap=Away(0.0, loses=True)
    )
    low = sequence(words, [5] * 100, number=1, max_tokens=40)
    scheduler.add(low)
    compute(scheduler, scheduler.plan())
    scheduler.preempt(low)
    plan = scheduler.plan()
    assert shape(plan.rows) == [(1, 0, 100)]
    assert plan.rows[0].phase == "recompute"


def test_who_is_swapped_in_shares_what_is_known_by_then(words: Tokenizer) -> None:
    """Its full blocks are still cached: they are taken from there, only the rest is moved."""
    away = Away(0.0)
    scheduler = Scheduler(BlockPool(8), max_batch_size=1, max_batch_tokens=512, swap=away)
    low = sequence(words, list(range(5, 155)), number=1, max_tokens=40, root=b"ada")
    scheduler.add(low)
    compute(scheduler, scheduler.plan())
    before = list(low.blocks)
    scheduler.preempt(low)
    assert shape(scheduler.plan().rows) == [(1, 150, 1)]
    assert low.blocks[:2] == before[:2]
    assert away.moved == [[low.blocks[2]]]


def test_who_came_back_stays_for_a_while(words: Tokenizer) -> None:
    """Better ones in a row do not throw the same one out again and again."""
    scheduler = Scheduler(BlockPool(8), max_batch_size=1, max_batch_tokens=512)
    low = sequence(words, [5] * 10, number=1, priority=3, max_tokens=100)
    scheduler.add(low)
    compute(scheduler, scheduler.plan())
    for number in range(2, 6):
        scheduler.add(sequence(words, [5], number=number, priority=0, max_tokens=1))
        compute(scheduler, scheduler.plan())  # the better one
        compute(scheduler, scheduler.plan())  # back again
        tokens = low.n_output
        scheduler.add(sequence(words, [5], number=10 + number, priority=0, max_tokens=1))
        for _ in range(STAY_STEPS):
            compute(scheduler, scheduler.plan())
        assert low.n_output >= tokens + STAY_STEPS - 2


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_tenants_get_equal_shares(words: Tokenizer, sizes: list[int]) -> None:
    """Each tenant has more to do than there is time for, with requests of its own size: whatever
    the sizes, what each was served differs by no more than about two of the largest requests."""
    scheduler = Scheduler(BlockPool(64), max_batch_size=2, max_batch_tokens=512)
    served = [0] * len(sizes)
    number = 0

    def more(tenant: int, count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            choice = sequence(
                words, [5] * sizes[tenant], number=number, max_tokens=sizes[tenant],
                tenant=f"tenant {tenant}",
            )  # fmt: skip
            scheduler.add(choice)

    for tenant in range(len(sizes)):
        more(tenant, 3 if tenant else 40)
    for _ in range(600):
        plan = scheduler.plan()
        for row in plan.rows:
            tenant = int(row.sequence.tenant.split()[1])
            served[tenant] += row.count
            scheduler.shares.charge(row.sequence, row.count * 1_000)
        before = {s.tenant for s in scheduler.running}
        compute(scheduler, plan)
        for name in before:
            tenant = int(name.split()[1])
            if sum(s.tenant == name for s in scheduler.waiting) < 3:
                more(tenant, 3)
    assert max(served) - min(served) <= 4 * 2 * max(sizes)


def test_time_not_used_is_not_saved_up(words: Tokenizer) -> None:
    """A tenant that comes late takes turns with the one that was there; it does not get all."""
    scheduler = Scheduler(BlockPool(64), max_batch_size=1, max_batch_tokens=512)
    order = []
    for number in range(60):
        scheduler.add(sequence(words, [5] * 10, number=number, max_tokens=1, tenant="early"))
    for number in range(40):
        if number == 20:
            for late in range(100, 110):
                scheduler.add(sequence(words, [5] * 10, number=late, max_tokens=1, tenant="late"))
        plan = scheduler.plan()
        order.append(plan.rows[0].sequence.tenant)
        scheduler.shares.charge(plan.rows[0].sequence, 10_000)
        compute(scheduler, plan)
    assert set(order[:20]) == {"early"}
    assert order[20:].count("late") == 10
    assert order[20:30].count("late") == 5
