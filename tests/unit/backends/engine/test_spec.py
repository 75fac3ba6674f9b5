"""Guesses come from the text itself, and stop while they fail. No torch."""

from backends.engine.spec import Proposer
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Done, Row, Runner, StepResult, TokenChoice
from tests.fakes.engine import FakeRunner
from tests.unit.backends.engine.test_engine import outputs, request, running, text_of


def test_what_followed_before_is_guessed() -> None:
    """The continuation of the last earlier occurrence of the last tokens, up to the limit."""
    text = [1, 2, 3, 4, 5, 6, 9, 9, 2, 3]
    assert Proposer(6).propose(text, 3, 0.1) == (4, 5, 6)
    assert Proposer(6).propose(text, 2, 0.1) == (4, 5)
    assert Proposer(6).propose([1, 2, 3, 4], 6, 0.1) == ()


def test_guesses_grow_while_they_come_true_and_rest_while_they_fail() -> None:
    """Full success doubles the length; failures cost fewer and fewer steps a proposal."""
    text = [1, 2, 3] * 20
    lucky = Proposer(8)
    for _ in range(3):
        guess = lucky.propose(text, 8, 0.3)
        lucky.learn(len(guess), len(guess))
    assert len(lucky.propose(text, 8, 0.3)) == 8
    unlucky = Proposer(8)
    tried = 0
    for _ in range(400):
        guess = unlucky.propose(text, 8, 0.3)
        if guess:
            tried += len(guess)
            unlucky.learn(len(guess), 0)
    assert 0 < tried < 40


class SpecRunner(FakeRunner):
    """Says the same text over and over, and checks drafts as the sampler does."""

    def __init__(self, cycle: list[int]) -> None:
        super().__init__(lambda row: TokenChoice(cycle[row.sequence.n_output % len(cycle)]))
        self._cycle = cycle
        self.facts = type(self.facts)(
            **{name: getattr(self.facts, name) for name in self.facts.__struct_fields__}
            | {"is_strict": True}
        )

    def run(self, rows: list[Row]) -> StepResult:  # type: ignore[override]  # the engine's lists
        result = super().run(rows)
        for i, row in enumerate(rows):
            if row.drafts:
                told: list[TokenChoice] = []
                for j, draft in enumerate((*row.drafts, None)):
                    at = (row.sequence.n_output + j) % len(self._cycle)
                    told.append(TokenChoice(self._cycle[at]))
                    if told[-1].token != draft:
                        break
                result.choices[i] = tuple(told)
        return result


async def test_guessing_changes_steps_and_nothing_else(words: Tokenizer) -> None:
    """With guesses the same text comes in far fewer steps, its stop string cuts it at the same
    place, and all time of all steps is still charged."""
    cycle = words.encode("one two three ")
    texts, steps = [], []
    for max_drafts in (0, 6):
        runner: Runner = SpecRunner(cycle)
        async with running(words, runner, max_drafts=max_drafts) as engine:
            before = len(runner.steps)  # type: ignore[attr-defined]  # of the fake
            long = await outputs(engine.submit(request(words, max_tokens=(60,))))
            cut = await outputs(
                engine.submit(request(words, max_tokens=(60,), stop=("three one",)))
            )
            steps.append(len(runner.steps) - before)  # type: ignore[attr-defined]  # of the fake
            texts.append((text_of(long), text_of(cut)))
            usages = [news[-1].usage for news in (long, cut) if isinstance(news[-1], Done)]
            assert usages[0].completion_tokens == 60
            assert sum(sum(u.device_us.values()) for u in usages) == sum(
                engine.stats.charged_us.values()
            )
            assert engine.stats.accepted == sum(usage.accepted for usage in usages)
            assert engine.pool is not None
            assert engine.pool.used == 0
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] * 0.6
