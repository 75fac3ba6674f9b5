"""The GPU path without a GPU: Triton's kernels under its interpreter, the decoder on a CPU."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from backends.engine.errors import StartFailed
from backends.engine.gguf import GgufFile
from backends.engine.gpu.attention import Places, choose, gathered
from backends.engine.gpu.runner import open_on
from backends.engine.model import Model
from backends.engine.runner import CpuRunner
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import JobRequest, Row, Sampling
from tests.fakes.engine import sequence
from tests.unit.backends.engine.test_engine import outputs, running, text_of

CPU = torch.device("cpu")


@pytest.mark.timeout(300)
def test_triton_kernels_equal_the_reference() -> None:
    """Decode over split contexts and prefill over tiles, grouped heads, scattered blocks, lengths
    around block borders: under the interpreter the kernels agree with gather and torch's
    attention to rounding; a head size that they cannot take falls back to those."""
    pytest.importorskip("triton")
    told = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", "kernels", "--device", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)
    assert len(rows) >= 4
    for row in rows:
        if row["size"] == 48:
            assert row["used"].startswith("gathered")
        else:
            assert row["used"].startswith("Triton"), row
            assert row["error"] < (1e-5 if row["dtype"] == "float32" else 1e-2)


def test_without_triton_the_reference_is_used() -> None:
    """On a CPU without the interpreter the self-test fails, and says why."""
    attend, found = choose(heads=4, kv_heads=2, size=32, dtype=torch.float32, device=CPU)
    assert attend is gathered
    assert found.startswith("gathered (")


def test_the_reference_is_attention() -> None:
    """Gathered attention over scattered blocks equals a softmax written out."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(4, 2, 64, 16, generator=generator) for _ in range(2))
    places = Places([(99, 2, [3, 1])], CPU)
    queries = torch.randn(2, 4, 16, generator=generator)
    out = gathered(queries, keys, values, places)
    for token, head in [(0, 0), (1, 3)]:
        mine = keys[[3, 1], head // 2].reshape(-1, 16)[: 100 + token]
        weights = (mine @ queries[token, head] / 4).softmax(0)
        expected = weights @ values[[3, 1], head // 2].reshape(-1, 16)[: 100 + token]
        assert torch.allclose(out[token, head], expected, atol=1e-5)


def test_the_decoder_equals_the_cpu_one(file: GgufFile, words: Tokenizer) -> None:
    """The same logits as the torch decoder for prompts in chunks beside decodes."""
    rng = random.Random(2)
    prompt = [rng.randrange(words.size) for _ in range(150)]
    ours = open_on(file, "cpu", torch.float32, kv_blocks=8)
    theirs = Model(file, kv_blocks=8)
    mine, other = sequence(words, prompt), sequence(words, prompt[::-1][:90])
    mine.blocks, other.blocks = [6, 1, 4], [0, 7]
    for rows in (
        [Row(mine, 0, 100)],
        [Row(other, 0, 89), Row(mine, 100, 49)],
        [Row(other, 89, 1), Row(mine, 149, 1)],
    ):
        logits, best = ours.decoder.logits(rows)
        expected, _ = theirs.logits(rows)
        assert torch.allclose(logits, expected, atol=1e-4)
        assert best == expected.argmax(-1).tolist()
    ours.copy_blocks([(6, 5)])
    mine.blocks[0] = 5
    assert torch.allclose(ours.decoder.logits([Row(mine, 149, 1)])[0], expected[1:], atol=1e-4)


async def test_an_engine_runs_on_it(file: GgufFile, words: Tokenizer) -> None:
    """Greedy and sampled answers, several at once, are those of the CPU runner."""
    texts = []
    for runner in (
        CpuRunner(file, kv_blocks=16, threads=1),
        open_on(file, "cpu", torch.float32, kv_blocks=16),
    ):
        async with running(words, runner) as engine:
            streams = [
                engine.submit(
                    JobRequest(
                        prompts=(tuple(words.encode("the thing")),), max_tokens=(20,), seed=1,
                        sampling=Sampling(temperature=temperature, top_k=5), ignore_eos=True,
                    )
                )
                for temperature in (0.0, 0.8)
            ]  # fmt: skip
            texts.append([text_of(await outputs(stream)) for stream in streams])
    assert texts[0] == texts[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_clear_line(file: GgufFile) -> None:
    """Asked for a GPU that is not there, the engine says so and does not start."""
    with pytest.raises(StartFailed, match="sees no GPU"):
        open_on(file, "cuda", torch.float32, kv_blocks=8)
