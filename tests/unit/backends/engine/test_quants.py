"""Block formats against an independent implementation, bit for bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from backends.engine.gguf import GgufFile
from backends.engine.quants import BY_NAME
from tests.fakes.gguf import TYPES, write_gguf

HALVES = {  # where the fp16 scales of a block are
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def any_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Every bit at random, scales any finite fp16."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    block, nbytes = BY_NAME[kind].block, BY_NAME[kind].nbytes
    count = rows * columns // block
    raw = rng.integers(0, 256, (count, nbytes), np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0, 1, count) * 10.0 ** rng.integers(-6, 3, count)
        raw[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_values_equal_the_reference_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Whatever is in the blocks, and across the reader's own chunks, values are the reference's."""
    raw = any_blocks(kind, 257, 256)
    path = write_gguf(tmp_path / "w.gguf", {}, {"t": (kind, (257, 256), raw.tobytes())})
    file = GgufFile(path)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert file.tensor("t").tobytes() == expected.astype(np.float32).tobytes()
    picked = file.rows("t", (257, 256))([256, 3])
    assert picked.tobytes() == expected[[256, 3]].astype(np.float32).tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_files_of_the_reference_writer_are_read(tmp_path: Path, kind: str) -> None:
    """A file quantised and written by the `gguf` package holds, for us, what it holds for it."""
    values = np.random.default_rng(5).normal(0, 0.1, (4, 96)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    raw = quantize(values, number)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=number)
    writer.add_array("words", ["a", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "w.gguf")
    assert file.tensor("t", (4, 96)).tolist() == dequantize(raw, number).tolist()
    assert file.texts("words") == ["a", "é"]


def test_every_kind_that_files_may_have_is_tested() -> None:
    """The fake writer knows exactly the kinds that the reader knows."""
    assert set(TYPES) == set(BY_NAME) == set(HALVES) | {"F32", "F16", "BF16"}
