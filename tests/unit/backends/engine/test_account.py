"""Time adds up exactly, and the split of a step is in the core of the cost game."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from backends.engine.account import (
    CostModel,
    StepClock,
    WallPhase,
    Work,
    calibrate,
    charge,
    shares,
    stand_alone_s,
)
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Row
from tests.fakes.clock import FakeClock
from tests.fakes.engine import facts, sequence

seconds = st.floats(1e-9, 1.0)
cost_models = st.builds(
    CostModel, body_stream_s=seconds, head_stream_s=seconds, body_token_s=seconds,
    head_row_s=seconds, kv_token_s=seconds, attended_pair_s=seconds, sample_row_s=seconds,
    step_s=seconds,
)  # fmt: skip
works = st.builds(
    lambda tokens, before, rows: Work(tokens, before + tokens, rows),
    st.integers(1, 500), st.integers(0, 4000), st.integers(0, 6),
)  # fmt: skip
phases = st.sampled_from(list[WallPhase](["load", "warmup", "prefill", "decode", "mixed", "idle"]))


@given(marks=st.lists(st.tuples(phases, st.integers(0, 10**7)), max_size=30))
def test_the_phases_sum_to_the_wall_exactly(marks: list[tuple[WallPhase, int]]) -> None:
    """Whatever fractions of a microsecond pass between marks, none is lost or counted twice."""
    clock = FakeClock()
    step_clock = StepClock(clock)
    begin = clock.monotonic_ns()
    total = 0
    for phase, elapsed_ns in marks:
        clock.advance(elapsed_ns / 1e9)
        total += step_clock.mark(phase)
    assert total == sum(step_clock.by_phase_us.values()) == step_clock.wall_us
    if marks:
        assert total == (clock.monotonic_ns() - begin) // 1_000


@given(
    step_us=st.integers(0, 10**8),
    model=cost_models,
    rows=st.lists(
        st.tuples(st.integers(1, 90), st.integers(0, 90), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
)
def test_the_parts_of_a_step_sum_to_it(
    words: Tokenizer, step_us: int, model: CostModel, rows: list[tuple[int, int, int]]
) -> None:
    """Over all sequences and phases the charges are the step's microseconds, to the last one; only
    drafts that did not come true cost something under their own name."""
    made, rejected = [], []
    for number, (count, start, drafts) in enumerate(rows):
        choice = sequence(words, [5] * 100, number=number)
        choice.high_water = number * 20
        if drafts:
            made.append(Row(choice, 99, 1 + drafts, (7,) * drafts))
        else:
            made.append(Row(choice, start, min(count, 100 - start)))
        rejected.append(count % (drafts + 1))
    charges = charge(step_us, made, model, rejected)
    assert sum(part for parts in charges for part in parts.values()) == step_us
    assert all(part >= 0 for parts in charges for part in parts.values())
    for parts, wrong in zip(charges, rejected, strict=True):
        assert wrong or "spec_rejected" not in parts


@given(model=cost_models, work=st.lists(works, min_size=1, max_size=6))
def test_no_group_pays_more_than_alone(model: CostModel, work: list[Work]) -> None:
    """The core: shares sum to the cost of the step, and every coalition's shares are at most what
    the step would cost with that coalition alone."""
    paid = [share.model_s + share.sampling_s for share in shares(work, model)]
    whole = stand_alone_s(work, model)
    assert abs(sum(paid) - whole) <= 1e-9 * whole
    for size in range(1, len(work)):
        for group in combinations(range(len(work)), size):
            alone = stand_alone_s([work[i] for i in group], model)
            assert sum(paid[i] for i in group) <= alone * (1 + 1e-9)


def test_a_decode_pays_little_beside_a_long_prompt() -> None:
    """One token beside a prompt of 500 pays its own work and no share of the prompt's."""
    model = calibrate(facts(8), one_token_s=0.05, many_tokens_s=0.2, many=64, sampling_s=0.0001)
    decode, prompt = shares([Work(1, 200, 1), Work(500, 500, 1)], model)
    alone = stand_alone_s([Work(1, 200, 1)], model)
    assert decode.model_s + decode.sampling_s <= alone
    assert prompt.model_s > 20 * decode.model_s
