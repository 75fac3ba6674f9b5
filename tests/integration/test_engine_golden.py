"""The engine against independent implementations, on the bundled weights.

How the golden files were made stands in the scripts beside them.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.engine import tokenizer
from backends.engine.gguf import GgufFile
from backends.engine.kv import BlockPool
from backends.engine.native.library import Toolchain
from backends.engine.native.packing import Dtype
from backends.engine.scheduler import Scheduler
from backends.engine.serve import cache_folder, default_threads, prepare_environment
from backends.engine.stops import StopMatcher
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Job, JobRequest, Runner, Sampling, Sequence, TokenChoice
from backends.engine.weights import BUNDLED_NAME, open_weights

if TYPE_CHECKING:
    from backends.engine.runner import Kernels

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
KV_BLOCKS = 120


@pytest.fixture(scope="module")
def weights() -> GgufFile:
    return open_weights(BUNDLED_NAME)


@pytest.fixture(scope="module")
def words(weights: GgufFile) -> Tokenizer:
    return tokenizer.from_gguf(weights)


@pytest.fixture(
    scope="module", params=[("torch", "float32"), ("native", "float32"), ("native", "auto")],
    ids="-".join,
)  # fmt: skip
def runner(weights: GgufFile, request: pytest.FixtureRequest) -> Runner:
    """Both decoders with nothing rounded, and the default."""
    kernels, dtype = request.param
    return runner_of(weights, kernels=kernels, dtype=dtype)


def runner_of(weights: GgufFile, *, kernels: "Kernels", dtype: Dtype) -> Runner:
    prepare_environment(os.environ)
    from backends.engine.runner import CpuRunner  # after the environment: it imports torch

    return CpuRunner(
        weights, kv_blocks=KV_BLOCKS, threads=default_threads(), dtype=dtype, kernels=kernels,
        tools=Toolchain.of_this_machine(cache_folder(os.environ)),
    )  # fmt: skip


def generate(
    runner: Runner, words: Tokenizer, prompts: list[list[int]], count: int, *, step_tokens: int
) -> list[list[int]]:
    """Greedy, all prompts together through the scheduler, end tokens ignored."""
    pool = BlockPool(KV_BLOCKS)
    scheduler = Scheduler(pool, max_batch_size=16, max_batch_tokens=step_tokens)
    sequences = []
    for number, prompt in enumerate(prompts):
        job = Job(
            number,
            JobRequest(
                prompts=(tuple(prompt),), max_tokens=(count,), sampling=Sampling(temperature=0.0)
            ),
            0,
        )
        sequence = Sequence(
            job, 0, prompt, arrival=number, max_tokens=count, seed=0,
            decoder=words.decoder(), stops=StopMatcher(()),
        )  # fmt: skip
        sequences.append(sequence)
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        rows = scheduler.plan().rows
        for row, choice in zip(rows, runner.run(rows).choices, strict=True):
            row.sequence.n_computed = row.context
            if isinstance(choice, TokenChoice):
                row.sequence.append(choice.token)
                if row.sequence.n_output == count:
                    scheduler.remove(row.sequence)
    assert pool.used == 0
    return [sequence.tokens[sequence.n_prompt :] for sequence in sequences]


@pytest.mark.parametrize(
    ("chosen", "together", "step_tokens"),
    [
        (slice(0, 40, 14), 1, 512),
        (slice(0, 40, 5), 16, 128),
        pytest.param(slice(None), 16, 128, marks=pytest.mark.parity),
        pytest.param(slice(None), 1, 512, marks=pytest.mark.parity),
    ],
    ids=["alone", "batched-in-chunks", "all-batched", "all-alone"],
)
def test_greedy_equals_transformers(
    runner: Runner, words: Tokenizer, chosen: slice, together: int, step_tokens: int
) -> None:
    """Greedy output equals transformers' fp32 token for token, alone and batched in chunks."""
    cases = json.loads((GOLDEN / "greedy.json").read_text())["cases"]
    assert len(cases) == 40
    assert all(len(case["output"]) == 64 for case in cases)
    is_all = chosen == slice(None)
    cases = cases[chosen]
    if not is_all and "torch" in runner.facts.identity:
        cases = cases[:: 2 if together == 1 else 3]  # enough for the slow one
    for start in range(0, len(cases), together):
        group = cases[start : start + together]
        outputs = generate(
            runner,
            words,
            [case["prompt"] for case in group],
            len(group[0]["output"]),
            step_tokens=step_tokens,
        )
        assert outputs == [case["output"] for case in group]


def test_tokens_equal_llama_cpp(words: Tokenizer) -> None:
    """Text becomes the same tokens as in llama.cpp, over more than ten thousand of them."""
    cases = json.loads((GOLDEN / "tokenizer.json").read_text())["cases"]
    assert sum(len(case["tokens"]) for case in cases) >= 10_000
    for case in cases:
        assert words.encode(case["text"]) == case["tokens"], case["text"][:80]


def test_tokens_come_back_as_text(words: Tokenizer) -> None:
    """Decoding the tokens of a text gives the text back, byte for byte."""
    for case in json.loads((GOLDEN / "tokenizer.json").read_text())["cases"]:
        assert words.decode(case["tokens"]) == case["text"]
