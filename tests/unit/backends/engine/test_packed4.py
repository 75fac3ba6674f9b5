"""GPTQ and AWQ checkpoints, packed here nibble by nibble as their formats say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.engine.errors import WeightsInvalid
from backends.engine.folder import ModelFolder

INPUTS, OUTPUTS, GROUP = 64, 16, 32
CONFIG = {
    "model_type": "llama", "hidden_size": INPUTS, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
NAME = "model.layers.0.self_attn.q_proj"


def word(nibbles: list[int]) -> int:
    """Eight numbers in 32 bits, the first lowest, as the signed number that files hold."""
    value = sum(nibble << 4 * place for place, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def below(numbers: np.ndarray) -> np.ndarray:
    """(8 n, m) -> (n, m) words."""
    rows = range(0, len(numbers), 8)
    words = [[word(list(map(int, col[r : r + 8]))) for col in numbers.T] for r in rows]
    return np.array(words, np.int32)


def beside(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """(n, 8 m) -> (n, m) words; nibble i is number order[i] of the eight."""
    columns = range(0, numbers.shape[1], 8)
    words = [[word([int(row[c + at]) for at in order]) for c in columns] for row in numbers]
    return np.array(words, np.int32)


def parts(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers (inputs, outputs), zeros and scales (groups, outputs)."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 16, (INPUTS, OUTPUTS))
    zeros = rng.integers(1, 16, (INPUTS // GROUP, OUTPUTS))
    scales = rng.normal(0, 0.05, zeros.shape).astype(np.float16)
    return numbers, zeros, scales


def folder_of(path: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> ModelFolder:
    config = CONFIG | {"quantization_config": settings, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    save_file({f"{NAME}.{name}": array for name, array in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    return ModelFolder(path)


def expected(
    numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray
) -> list[list[float]]:
    """One by one, in Python's own floats."""
    return [
        [
            float(scales[index[i], o]) * (int(numbers[i, o]) - int(zeros[index[i], o]))
            for i in range(INPUTS)
        ]
        for o in range(OUTPUTS)
    ]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in-order", "act-order"])
def test_gptq_comes_out_exactly(tmp_path: Path, version: str, is_ordered: bool) -> None:
    """Every value is scale × (number - zero), with groups in order or by activation order, and
    zeros stored less one in the first version."""
    numbers, zeros, scales = parts()
    index = np.arange(INPUTS) // GROUP
    if is_ordered:
        index = np.random.default_rng(2).permutation(index)
    stored = zeros - 1 if version == "gptq" else zeros
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": is_ordered,
                "checkpoint_format": version}  # fmt: skip
    folder = folder_of(
        tmp_path, settings,
        {"qweight": below(numbers), "qzeros": beside(stored), "scales": scales,
         "g_idx": index.astype(np.int32)},
    )  # fmt: skip
    assert folder.kind("blk.0.attn_q.weight") == "F16"
    found = folder.tensor("blk.0.attn_q.weight", (OUTPUTS, INPUTS))
    assert found.tolist() == expected(numbers, zeros, scales, index)


def test_awq_comes_out_exactly(tmp_path: Path) -> None:
    """Words lie along the outputs, even ones before odd ones."""
    numbers, zeros, scales = parts(3)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    folder = folder_of(
        tmp_path,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        {"qweight": beside(numbers, order), "qzeros": beside(zeros, order), "scales": scales},
    )
    found = folder.tensor("blk.0.attn_q.weight", (OUTPUTS, INPUTS))
    assert found.tolist() == expected(numbers, zeros, scales, np.arange(INPUTS) // GROUP)


def test_damaged_checkpoints_name_the_tensor(tmp_path: Path) -> None:
    """A group that does not exist, zeros of another size, or a part that is missing: named."""
    numbers, zeros, scales = parts()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    good = {"qweight": below(numbers), "qzeros": beside(zeros), "scales": scales}
    cases = {
        r"q_proj\.qweight: 64 inputs do not fall into 2 groups": {
            "g_idx": np.full(INPUTS, 2, np.int32)
        },
        r"q_proj\.qzeros: \(2, 8\) zeros": {"qzeros": beside(zeros[:, :8])},
        r"q_proj\.scales: holds values that are not finite": {"scales": scales * np.float16("inf")},
        r"q_proj\.qweight: is I64, not I32": {"qweight": below(numbers).astype(np.int64)},
    }
    for message, change in cases.items():
        folder = folder_of(tmp_path, settings, good | change)
        with pytest.raises(WeightsInvalid, match=message):
            folder.tensor("blk.0.attn_q.weight", (OUTPUTS, INPUTS))
    without = {"qweight": below(numbers), "scales": scales}
    folder = folder_of(tmp_path, settings, without)
    with pytest.raises(WeightsInvalid, match=r"q_proj\.qzeros: missing"):
        folder.tensor("blk.0.attn_q.weight", (OUTPUTS, INPUTS))
