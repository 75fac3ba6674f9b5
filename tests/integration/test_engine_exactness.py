"""The compiled step on the bundled weights: the same numbers however they are computed, and as
good as unrounded ones."""

import os
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from backends.engine import tokenizer
from backends.engine.errors import StartFailed
from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS, BlockPool
from backends.engine.native.library import Library, Toolchain, Unavailable, load
from backends.engine.native.model import NativeModel
from backends.engine.scheduler import Scheduler
from backends.engine.serve import cache_folder, default_threads
from backends.engine.spec import Proposer
from backends.engine.stops import StopMatcher
from backends.engine.swap import SwapSpace, file_in
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Job, JobRequest, Row, Sampling, Sequence
from backends.engine.weights import BUNDLED_NAME, open_weights
from telemetry.clock import SystemClock
from tests.fakes.gguf import tiny_llama

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
QUALITY = Path(__file__).parents[1] / "data" / "quality" / "harbour.txt"
KV_BLOCKS = 64
OUTPUT = 6


@pytest.fixture(scope="module")
def library() -> Library:
    return load(Toolchain.of_this_machine(cache_folder(os.environ)))


@pytest.fixture(scope="module")
def weights() -> GgufFile:
    return open_weights(BUNDLED_NAME)


@pytest.fixture(scope="module")
def words(weights: GgufFile) -> Tokenizer:
    return tokenizer.from_gguf(weights)


@pytest.fixture(scope="module")
def model(weights: GgufFile, library: Library) -> Iterator[NativeModel]:
    model = opened(weights, library, "auto")
    yield model
    model.close()


@pytest.fixture(scope="module")
def shaped(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeModel]:
    """Random weights, small: the compiled step wants its sizes in multiples of 32."""
    path = tiny_llama(tmp_path_factory.mktemp("shaped") / "shaped.gguf", context=512, head_dim=32)
    model = NativeModel(
        GgufFile(path), library, kv_blocks=KV_BLOCKS, threads=default_threads(), dtype="float32"
    )
    yield model
    model.close()


def opened(weights: GgufFile, library: Library, dtype: str) -> NativeModel:
    return NativeModel(
        weights, library, kv_blocks=KV_BLOCKS, threads=default_threads(), dtype=dtype,  # type: ignore[arg-type]  # a Literal
    )  # fmt: skip


def choice_of(
    words: Tokenizer, prompt: list[int], number: int, *, root: bytes | None, drafts: bool,
    output: int = OUTPUT,
) -> Sequence:  # fmt: skip
    request = JobRequest(
        prompts=(tuple(prompt),), max_tokens=(output,), sampling=Sampling(temperature=0.0)
    )
    return Sequence(
        Job(number, request, 0), 0, prompt, arrival=number, max_tokens=output, seed=0,
        decoder=words.decoder(), stops=StopMatcher(()), root=root,
        proposer=Proposer(4) if drafts else None,
    )  # fmt: skip


def play(
    model: NativeModel, scheduler: Scheduler, target: Sequence, *, preempt_at: int | None
) -> list[bytes]:
    """All to their ends; the bits of the logits behind each of the target's tokens."""
    seen: list[bytes] = []
    while scheduler.running or scheduler.waiting:
        if preempt_at is not None and target.n_output >= preempt_at and target in scheduler.running:
            scheduler.preempt(target)
            preempt_at = None
        plan = scheduler.plan()
        for source, copy in plan.copies:
            model.copy_block(source, copy)
        logits, best = model.logits(plan.rows)
        at = 0
        for row in plan.rows:
            chosen, mine = row.sequence, range(at, at + row.logits_rows)
            at = mine.stop
            if not mine:
                scheduler.computed(chosen, row.context)
                continue
            chosen.job.drafted += len(row.drafts)
            chosen.job.accepted -= 1
            for number, (i, draft) in enumerate(zip(mine, (*row.drafts, None), strict=True)):
                scheduler.computed(chosen, row.context - len(row.drafts) + number)
                if chosen is target:
                    seen.append(logits[i].tobytes())
                chosen.append(best[i])
                chosen.job.accepted += 1
                if best[i] != draft or chosen.n_output == chosen.max_tokens:
                    break
            if chosen.n_output == chosen.max_tokens:
                scheduler.remove(chosen)
    scheduler.pool.check()
    assert scheduler.pool.used == 0
    return seen


class Hopeful:
    """A proposer that knows the answer: it guesses two tokens right, if it can, and one wrong."""

    def __init__(self, answer: list[int], n_prompt: int) -> None:
        self._answer = answer
        self._n_prompt = n_prompt

    def propose(self, tokens: list[int], limit: int, price: float) -> tuple[int, ...]:
        at = len(tokens) - self._n_prompt
        return (*self._answer[at : at + 2], 7)[:limit]

    def learn(self, guessed: int, came_true: int) -> None:
        pass


class Case(NamedTuple):
    together: int
    chunk: int
    is_hit: bool
    way: str  # how it was preempted, if at all
    guesses: bool


ALL = [
    Case(*values)
    for values in product(
        (1, 8, 16), (64, 256, 512), (False, True), ("never", "swap", "recompute"), (False, True)
    )
]


def held(
    model: NativeModel,
    words: Tokenizer,
    text: list[int],
    cases: Iterable[Case],
    *,
    is_hopeful: bool,
) -> None:
    """Each case gives the bits of the first behind every token, and did what its name says."""
    prompt = text[:210] + text[:70]  # repeats itself, so that guesses are made
    pool = BlockPool(KV_BLOCKS)
    reference: list[bytes] = []
    answer: list[int] = []
    drafted = accepted = 0
    for case in cases:
        block_bytes = model.shape.kv_token_bytes * BLOCK_TOKENS
        space = SwapSpace(
            model, clock=SystemClock(), block_bytes=block_bytes, memory_blocks=3, file_blocks=8,
            open_file=file_in(None),
        )  # fmt: skip
        scheduler = Scheduler(
            pool, max_batch_size=16, max_batch_tokens=case.chunk,
            draft_price=lambda decodes: 0.0, swap=space,
            compute_s=lambda tokens, way=case.way: 1e3 if way == "swap" else 0.0,
        )  # fmt: skip
        root = b"tenant" if case.is_hit else None
        if case.is_hit:  # a request before it; from the second case on its blocks are known too
            first = choice_of(words, prompt, 0, root=root, drafts=False, output=1)
            scheduler.add(first)
            play(model, scheduler, first, preempt_at=None)
        target = choice_of(words, prompt, 5, root=root, drafts=case.guesses)
        if case.guesses and is_hopeful:
            target.proposer = Hopeful(answer, len(prompt))  # type: ignore[assignment]  # acts as one
        company = [
            choice_of(words, text[50 + 11 * i : 60 + 12 * i], i, root=None, drafts=False)
            for i in range(10, 10 + case.together - 1)
        ]
        for sequence in [*company[:3], target, *company[3:]]:
            scheduler.add(sequence)
        is_preempted = case.way != "never"
        seen = play(model, scheduler, target, preempt_at=3 if is_preempted else None)
        reference = reference or seen
        assert len(seen) == OUTPUT, case
        assert seen == reference, case
        assert target.cached_tokens == 256 * case.is_hit
        assert target.job.preemptions == is_preempted
        # The beginning may still be known; what follows it was moved, or computed again.
        assert (space.loaded > 0) == (case.way == "swap"), case
        assert space.used == 0
        space.close()
        answer = target.tokens[len(prompt) :]
        drafted += target.job.drafted
        accepted += target.job.accepted
    assert accepted > 12
    assert drafted > accepted or not is_hopeful  # who knows the answer also guesses wrong


def test_the_bits_of_the_logits_do_not_depend_on_company(
    shaped: NativeModel, words: Tokenizer
) -> None:
    """{alone, batch of 8, of 16} × {chunks of 64, 256, whole} × {prefix hit, miss} × {never
    preempted, swapped, computed again} × {with guesses, without}: the same bits behind every token,
    on random weights of the same kind."""
    text = [3 + int(token) % 250 for token in words.encode(QUALITY.read_text())]
    held(shaped, words, text, ALL, is_hopeful=True)


def test_nor_do_those_of_the_bundled_weights(model: NativeModel, words: Tokenizer) -> None:
    """Every seventh case of the same, and so every value of every axis."""
    chosen = ALL[::7]
    assert [len({case[axis] for case in chosen}) for axis in range(5)] == [3, 3, 2, 3, 2]
    text = words.encode(QUALITY.read_text())
    held(model, words, text, chosen, is_hopeful=False)


def test_rounding_costs_no_quality(weights: GgufFile, words: Tokenizer, library: Library) -> None:
    """The gate: perplexity on a text of the repository within 1 % of unrounded arithmetic."""
    found = {}
    for dtype in ("float32", "auto", "float16", "int8", "int4"):
        model = opened(weights, library, dtype)
        found[dtype] = perplexity(model, words)
        model.close()
    exact = found["float32"]
    assert 5 < exact < 100
    assert all(abs(value / exact - 1) < 0.01 for value in found.values()), found


def perplexity(model: NativeModel, words: Tokenizer) -> float:
    text = words.encode(QUALITY.read_text())
    choice = choice_of(words, text[:1], 1, root=None, drafts=False)
    choice.blocks = list(range(KV_BLOCKS))
    # All others as drafts: a row of logits for each.
    logits, _ = model.logits([Row(choice, 0, len(text), tuple(text[1:]))])
    scores = logits[:-1].astype(np.float64)
    peak = scores.max(axis=1)
    total = peak + np.log(np.exp(scores - peak[:, None]).sum(axis=1))
    return float(np.exp((total - scores[np.arange(len(scores)), text[1:]]).mean()))


def test_a_build_is_kept_and_found_again(tmp_path: Path) -> None:
    """The first load compiles, the second takes the same file."""
    tools = Toolchain.of_this_machine(tmp_path / "cache")
    load(tools)
    [built] = list((tmp_path / "cache").iterdir())
    stamp = built.stat().st_mtime_ns
    load(tools)
    assert [built] == list((tmp_path / "cache").iterdir())
    assert built.stat().st_mtime_ns == stamp


def test_what_cannot_be_built_is_said_and_torch_takes_over(
    weights: GgufFile, tmp_path: Path
) -> None:
    """No compiler, one that fails, a CPU without AVX2, a place that cannot be written: a reason
    each; `auto` then computes with torch, `native` refuses to start."""
    from backends.engine.runner import CpuRunner

    here = Toolchain.of_this_machine(tmp_path / "cache")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cases = {
        "no C\\+\\+ compiler": Toolchain(
            compiler=None, cpu_features=here.cpu_features, cache=here.cache
        ),
        "false failed": Toolchain(
            compiler=Path("/bin/false"), cpu_features=here.cpu_features, cache=here.cache
        ),
        "lacks avx2": Toolchain(compiler=here.compiler, cpu_features="sse2", cache=here.cache),
        "cannot be used": Toolchain(
            compiler=here.compiler, cpu_features=here.cpu_features, cache=blocked / "cache"
        ),
    }
    for reason, tools in cases.items():
        with pytest.raises(Unavailable, match=reason):
            load(tools)
    tools = cases["lacks avx2"]
    runner = CpuRunner(weights, kv_blocks=2, threads=1, kernels="auto", tools=tools)
    assert runner.summary.startswith("torch kernels")
    assert "lacks avx2" in runner.summary
    with pytest.raises(StartFailed, match="lacks avx2"):
        CpuRunner(weights, kv_blocks=2, threads=1, kernels="native", tools=tools)
