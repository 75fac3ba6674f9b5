"""`meterline engine info` and `bench`: what is printed, and what is measured beside what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backends.engine.bench import Figure, padded
from backends.engine.roofline import Machine, decode_limit, prefill_limit, served_limit
from tests.fakes.engine import facts
from tests.fakes.gguf import tiny_llama


def told(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gateway", "engine", *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf", context=640)


def test_info_names_what_is_chosen_and_why(model: Path) -> None:
    """Model, kernels with the reason, memory plan and limits, for programs and for people."""
    options = ("--model", str(model), "--kv-memory-gb", "0.001", "--kernels", "torch")
    found = json.loads(told("info", *options, "--json").stdout)
    assert found["model"]["layers"] == 2
    assert found["computes_with"]["kernels"].startswith("torch kernels, float32 weights")
    assert found["memory"]["kv_blocks"] * 64 == found["memory"]["kv_tokens"]
    assert found["memory"]["kv_pool_mb"] <= 1.0
    assert all(value > 0 for value in found["limits_tok_s"].values())
    shown = told("info", *options).stdout
    assert "torch kernels" in shown
    assert "decode 16 context 200" in shown


def test_a_quick_bench_has_a_share_beside_its_rates(model: Path) -> None:
    """Each rate of prefill and decode stands beside its share of what the machine allows."""
    answer = told("bench", "--model", str(model), "--quick", "--json", "--one-core")
    rows = json.loads(answer.stdout)
    shares = {row["what"]: row["of_limit"] for row in rows}
    for name in ("prefill of 512", "1 at once, 40+48", "8 at once, 40+48", "16 at once, 40+48"):
        assert shares[name] is not None, answer.stderr
    assert {"step of 16, around it", "first token after 40"} <= set(shares)


def test_a_model_that_is_not_there_is_one_line() -> None:
    """Exit status 2, and what is missing."""
    answer = told("info", "--model", "/nowhere.gguf")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "/nowhere.gguf" in answer.stderr


def test_limits_are_arithmetic() -> None:
    """Bytes or operations, whichever takes longer; with the prompts, less than decode alone."""
    slow_memory, slow_cores = Machine(1e6, 1e12), Machine(1e12, 1e6)
    small = facts(8)
    weights = 1100 * 4
    assert decode_limit(slow_memory, small, batch=1, context=10) == pytest.approx(
        1e6 / (weights + 10 * 512)
    )
    assert decode_limit(slow_cores, small, batch=4, context=10) == pytest.approx(
        1e6 / (2 * 1100 + 4 * 2 * 4 * 8 * 10)
    )
    assert prefill_limit(slow_cores, small, 2) < 1e6 / 2000
    served = served_limit(slow_memory, small, 4, 10, 10)
    assert served < decode_limit(slow_memory, small, batch=4, context=15)
    assert Figure("x", 5.0, "tok/s", 20.0).of_limit == 25
    assert Figure("x", 5.0, "ms").of_limit is None


def test_a_static_batch_is_padded_to_its_longest() -> None:
    """Every group computes its longest prompt and its longest answer, for all."""
    requests = [([1] * 3, 5), ([1] * 7, 2), ([1], 1)]
    made = padded(requests, 2)
    assert [(len(prompt), count) for prompt, count in made] == [(7, 5), (7, 5), (1, 1)]
