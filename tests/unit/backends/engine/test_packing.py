"""Weights as the compiled step reads them, against numpy's product with what they stand for."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from backends.engine.gguf import GgufFile
from backends.engine.native.library import Library, Toolchain, load
from backends.engine.native.model import weight_struct
from backends.engine.native.packing import (
    Dtype,
    Part,
    pack,
    rounded_to_4_bits,
    rounded_to_8_bits,
)
from backends.engine.quants import BY_NAME
from backends.engine.serve import cache_folder
from tests.fakes.gguf import f32, write_gguf

ROWS, COLUMNS = 40, 512  # rows are padded to whole tiles


@pytest.fixture(scope="module")
def library() -> Library:
    return load(Toolchain.of_this_machine(cache_folder(os.environ)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0, 0.05, shape).astype(np.float32)


def product(
    library: Library, file: GgufFile, dtype: Dtype, x: np.ndarray
) -> tuple[str, np.ndarray]:
    packed = pack(file, [Part("t", (ROWS, COLUMNS))], dtype)
    out = np.empty((len(x), packed.rows), np.float32)
    weight = weight_struct(packed)
    library.linear(ctypes.byref(weight), x.ctypes.data, len(x), out.ctypes.data)
    kinds = ("float32", "float16", "q8", "q4")
    return kinds[packed.format], out[:, :ROWS]


@pytest.mark.parametrize(
    ("dtype", "kind", "error"),
    [
        ("auto", "float16", 5e-4),
        ("int8", "q8", 0.008),
        ("int4", "q4", 0.11),
        ("float32", "float32", 1e-6),
    ],
)
def test_rounding_is_as_small_as_its_bits_allow(
    tmp_path: Path, library: Library, dtype: Dtype, kind: str, error: float
) -> None:
    """The product with rounded weights differs from the exact one by what the format costs."""
    values, x = normal(ROWS, COLUMNS), normal(5, COLUMNS)
    file = GgufFile(write_gguf(tmp_path / "w.gguf", {}, {"t": f32(values)}))
    found, y = product(library, file, dtype, x)
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    assert found == kind
    assert np.sqrt(np.square(y - exact).mean() / np.square(exact).mean()) < error


@pytest.mark.parametrize(("kind", "packed"), [("Q4_K", "q4"), ("Q6_K", "float16"), ("Q8_0", "q8")])
def test_blocks_of_the_file_are_kept_where_they_can_be(
    tmp_path: Path, library: Library, kind: str, packed: str
) -> None:
    """Q4_K and Q8_0 keep their numbers, kinds without a kernel become fp16."""
    block, nbytes = BY_NAME[kind].block, BY_NAME[kind].nbytes
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (ROWS * COLUMNS // block, nbytes), np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}[kind]:
        scales = rng.uniform(1e-3, 4e-3, len(raw)).astype("<f2")
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    path = write_gguf(tmp_path / "w.gguf", {}, {"t": (kind, (ROWS, COLUMNS), raw.tobytes())})
    x, file = normal(3, COLUMNS), GgufFile(path)
    found, y = product(library, file, "auto", x)
    exact = x.astype(np.float64) @ file.tensor("t").T.astype(np.float64)
    assert found == packed
    assert np.sqrt(np.square(y - exact).mean() / np.square(exact).mean()) < 1e-3


def test_rounded_values_are_the_nearest_of_their_grid() -> None:
    """No 8-bit value is off by more than half a step; fitting 4 bits is never worse than taking
    the ends of the group; groups of one value come out exactly."""
    values = normal(16, 64)
    numbers, scales = rounded_to_8_bits(values)
    wide = scales.astype(np.float32)[:, :, None]
    back = numbers.view(np.int8) * wide
    assert np.all(np.abs(back - values.reshape(back.shape)) <= wide * 0.51 + 127 * wide / 2048)
    four, scales, least = rounded_to_4_bits(values)
    fitted = four * scales.astype(np.float32)[:, :, None] + least.astype(np.float32)[:, :, None]
    grouped = values.reshape(fitted.shape)
    low, high = grouped.min(2, keepdims=True), grouped.max(2, keepdims=True)
    naive = np.rint((grouped - low) / (high - low) * 15) / 15 * (high - low) + low
    assert np.square(fitted - grouped).sum() < np.square(naive - grouped).sum()
    for constant in (0.0, 0.5, -2.0):
        same = np.full((16, 32), constant, np.float32)
        four, scales, least = rounded_to_4_bits(same)
        assert np.all(four * scales.astype(np.float32)[:, :, None] + least[:, :, None] == constant)
        eight, scales = rounded_to_8_bits(same)
        back = eight.view(np.int8) * scales.astype(np.float32)[:, :, None]
        assert np.allclose(back, constant, rtol=1e-3)
