"""A second model's guesses speed a text up and never change it."""

import copy
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs
from typing_extensions import override

from backends.engine.draft import DraftModel
from backends.engine.gguf import GgufFile
from backends.engine.guided import Constraint, Guides
from backends.engine.native.library import Toolchain, Unavailable, load
from backends.engine.runner import CpuRunner
from backends.engine.serve import cache_folder
from backends.engine.spec import Pace
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Delta, Done, JobRequest, Sampling
from telemetry.clock import SystemClock
from tests.fakes.gguf import tiny_llama
from tests.unit.backends.engine.test_engine import outputs, running, text_of

TOOLS = Toolchain.of_this_machine(cache_folder(os.environ))
try:
    load(TOOLS)
except Unavailable as error:
    pytest.skip(f"guessing needs the compiled step: {error}", allow_module_level=True)


def runner_of(
    file: GgufFile, words: Tokenizer, *, draft: GgufFile | None = None, draft_blocks: int = 16
) -> CpuRunner:
    def opened(weights: GgufFile, blocks: int) -> CpuRunner:
        return CpuRunner(
            weights, kv_blocks=blocks, threads=1, dtype="float32", kernels="native", tools=TOOLS
        )

    runner = opened(file, 16)
    if draft is not None:
        second = opened(draft, draft_blocks)
        runner.drafter = DraftModel(second.decoder, second.facts, words)
        free = dict.fromkeys(runner.drafter.costs.__struct_fields__, 1e-15)
        runner.drafter.costs = structs.replace(runner.drafter.costs, **free)
    return runner


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """Heads of 32, which the compiled step asks for."""
    return GgufFile(tiny_llama(tmp_path_factory.mktemp("wide") / "wide.gguf", head_dim=32))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """A draft model that is mostly wrong."""
    return GgufFile(tiny_llama(tmp_path_factory.mktemp("o") / "o.gguf", head_dim=32, seed=9))


class WideSteps(SystemClock):
    """Every measurement takes as long: one token costs as much as many, so guesses are cheap."""

    def __init__(self) -> None:
        self._calls = itertools.count()

    @override
    def monotonic_ns(self) -> int:
        return next(self._calls) * 10**9


REQUESTS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.7, top_p=0.95),
    "penalised": Sampling(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
    "greedy-penalised": Sampling(temperature=0.0, presence_penalty=0.5),
    "logprobs": Sampling(temperature=0.5, logprobs=2),
}


async def told(
    words: Tokenizer, runner: CpuRunner, *, max_drafts: int
) -> tuple[list[tuple[str, list[tuple[int, float | None]]]], int, int]:
    """Text and logprobs of all requests asked at once; guesses made and come true."""
    texts = []
    drafted = accepted = 0
    async with running(words, runner, max_drafts=max_drafts, clock=WideSteps()) as engine:
        streams = [
            engine.submit(
                JobRequest(
                    prompts=(tuple(words.encode("the a thing of the sea ")),), max_tokens=(40,),
                    sampling=sampling, seed=5, ignore_eos=True,
                )
            )
            for sampling in REQUESTS.values()
        ]  # fmt: skip
        for stream in streams:
            news = await outputs(stream)
            assert isinstance(news[-1], Done), news[-1]
            usage = news[-1].usage
            drafted, accepted = drafted + usage.drafted, accepted + usage.accepted
            tokens = [(c.token, c.logprob) for n in news if isinstance(n, Delta) for c in n.choices]
            texts.append((text_of(news), tokens))
        charged = engine.stats.charged_us
        assert sum(charged.values()) > 0
        if runner.drafter is not None:
            assert isinstance(runner.drafter, DraftModel)
            assert runner.drafter.used_blocks == 0
    return texts, drafted, accepted


@pytest.mark.parametrize("quality", ["itself", "other", "cramped"])
async def test_a_second_model_changes_no_text(
    words: Tokenizer, wide: GgufFile, other: GgufFile, quality: str
) -> None:
    """Greedy, sampled, with penalties and log-probabilities, several at once: the same tokens and
    the same numbers with guesses as without, whether the draft model is right, wrong or short of
    blocks; and where it is the model itself, nearly all of its guesses come true."""
    plain, drafted, _ = await told(words, runner_of(wide, words), max_drafts=0)
    assert drafted == 0
    draft = other if quality == "other" else wide
    runner = runner_of(wide, words, draft=draft, draft_blocks=2 if quality == "cramped" else 16)
    guessed, drafted, accepted = await told(words, runner, max_drafts=4)
    assert guessed == plain
    assert drafted > 0
    if quality == "itself":
        assert accepted > 0.95 * drafted


async def test_a_guide_binds_guesses_too(words: Tokenizer, wide: GgufFile) -> None:
    """A guided answer with guesses equals the one without, by lookup and by a second model."""
    guides = Guides(words)
    guide = await guides.guide(Constraint("regex", "(ab|cd)(ab|cd)(ab|cd)(ab|cd)x", "guided_regex"))
    guides.close()
    texts = []
    for draft, drafts in ((None, 0), (None, 4), (wide, 4)):
        runner = runner_of(wide, words, draft=draft)
        async with running(words, runner, max_drafts=drafts, clock=WideSteps()) as engine:
            news = await outputs(
                engine.submit(
                    JobRequest(
                        prompts=(tuple(words.encode("abcdabcdabcd")),), max_tokens=(40,), seed=3,
                        sampling=Sampling(temperature=1.0, is_guided=True), guide=guide,
                    )
                )
            )  # fmt: skip
            texts.append(text_of(news))
            if draft is not None:
                assert engine.stats.accepted > 0
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].endswith("x")


def test_the_pace_follows_what_pays() -> None:
    """Right guesses go as far as allowed, wrong ones rest, dear ones never start."""
    pace = Pace(8)
    for _ in range(20):
        count = pace.wanted(8, 0.1)
        pace.learn(count, count)
    assert pace.wanted(8, 0.1) == 8
    assert pace.wanted(3, 0.1) == 3
    tried = 0
    for _ in range(300):
        count = pace.wanted(8, 0.3)
        tried += count
        if count:
            pace.learn(count, 0)
    assert 0 < tried < 60
    assert Counter(Pace(8).wanted(8, 1.0) for _ in range(10)) == {0: 10}


def test_tokens_can_be_taken_back(words: Tokenizer) -> None:
    """A sequence after saying and unsaying is the one before: text, counts and what was seen."""
    from tests.fakes.engine import sequence

    mine = sequence(words, [5, 6])
    mine.append(7)
    before = (list(mine.tokens), dict(mine.counts), copy.copy(mine.seen))
    for token in (7, 5, 8):
        mine.append(token)
    mine.unsay(3)
    assert (mine.tokens, mine.counts, mine.seen) == before


def test_another_vocabulary_is_refused_at_start(tmp_path: Path) -> None:
    """A draft model that speaks of other tokens, or none at all, is one clear line."""
    from backends.engine.errors import StartFailed
    from backends.engine.serve import build
    from backends.settings import EngineSettings, Speculative

    target = tiny_llama(tmp_path / "a.gguf")
    draft = tiny_llama(tmp_path / "b.gguf", extra_tokens=("zz",))
    for speculative, problem in (
        (Speculative(method="draft_model", draft_model=str(draft)), "another vocabulary"),
        (Speculative(method="draft_model"), "needs speculative.draft_model"),
    ):
        with pytest.raises(StartFailed, match=problem):
            build(EngineSettings(name="e", model=str(target), speculative=speculative))
