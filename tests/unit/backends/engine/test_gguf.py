"""The GGUF reader: exact values, and a clear word about every kind of damage."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.engine.errors import ModelMissing, StartFailed, WeightsInvalid
from backends.engine.gguf import GgufFile
from tests.fakes.gguf import f32, tiny_llama, write_gguf

NIBBLES = bytes(low | high << 4 for low, high in zip(range(16), range(15, -1, -1), strict=True))
LOW_HIGH = [*range(16), *range(15, -1, -1)]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        ("F32", np.arange(32, dtype="<f4").tobytes(), list(range(32))),
        ("F16", np.arange(32, dtype="<f2").tobytes(), list(range(32))),
        ("Q8_0", half(0.5) + bytes(range(256 - 16, 256)) + bytes(range(16)),
         [0.5 * v for v in range(-16, 16)]),
        ("Q4_0", half(2.0) + NIBBLES, [2.0 * (v - 8) for v in LOW_HIGH]),
        ("Q4_1", half(0.25) + half(-1.0) + NIBBLES, [0.25 * v - 1.0 for v in LOW_HIGH]),
    ],
)  # fmt: skip
def test_values_are_exact(tmp_path: Path, kind: str, raw: bytes, expected: list[float]) -> None:
    """Each tensor type gives exactly the values its definition says."""
    path = write_gguf(tmp_path / "w.gguf", {"k": 1}, {"t": (kind, (1, 32), raw)})
    assert GgufFile(path).tensor("t", (1, 32)).tolist() == [expected]


def test_rows_are_those_of_the_tensor(tmp_path: Path) -> None:
    """Rows read one by one equal the rows of the whole matrix, in the order asked for."""
    raw = b"".join(half(n + 0.5) + NIBBLES for n in range(6))
    file = GgufFile(write_gguf(tmp_path / "w.gguf", {}, {"t": ("Q4_0", (3, 64), raw)}))
    whole = file.tensor("t")
    assert file.rows("t", (3, 64))([2, 0, 2]).tolist() == whole[[2, 0, 2]].tolist()


def test_metadata_comes_back(tmp_path: Path) -> None:
    """Numbers, texts and lists of the header are read as written."""
    metadata = {"a": 7, "b": "é", "c": ["x", "yz"], "d": [1, -2], "e": 0.5, "f": True}
    assert GgufFile(write_gguf(tmp_path / "w.gguf", metadata, {})).metadata == metadata


def test_a_truncated_file_names_its_tensor(tmp_path: Path) -> None:
    """A file cut off inside the data says which tensor is incomplete."""
    path = write_gguf(
        tmp_path / "w.gguf", {}, {"first": f32(np.ones(64)), "last": f32(np.ones(64))}
    )
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsInvalid, match=r"w\.gguf: tensor last: .*truncated"):
        GgufFile(path)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """A damaged scale is found when the tensor is read, and the tensor named."""
    raw = half(float("nan")) + bytes(32)
    file = GgufFile(write_gguf(tmp_path / "w.gguf", {}, {"bad": ("Q8_0", (32,), raw)}))
    with pytest.raises(WeightsInvalid, match=r"tensor bad: .*not finite"):
        file.tensor("bad")


def test_wrong_shapes_and_missing_tensors_are_named(tmp_path: Path) -> None:
    """A model that needs another shape, or another tensor, says which."""
    file = GgufFile(write_gguf(tmp_path / "w.gguf", {}, {"t": f32(np.ones((2, 3)))}))
    with pytest.raises(WeightsInvalid, match=r"tensor t: shape \(2, 3\), not \(3, 2\)"):
        file.tensor("t", (3, 2))
    with pytest.raises(WeightsInvalid, match="tensor u: missing"):
        file.tensor("u")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\3\4" + bytes(60), b"GGUF\xff" + bytes(60)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    """Something that is no GGUF file is said to be none."""
    path = tmp_path / "w.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsInvalid, match=r"w\.gguf"):
        GgufFile(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    """No file, no traceback: one clear error."""
    with pytest.raises(ModelMissing, match="cannot read"):
        GgufFile(tmp_path / "nothing.gguf")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_to_the_header_is_an_error_or_harmless(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Cut anywhere or with any byte changed, the reader ends in StartFailed or a valid file, and
    never in anything else."""
    good = tiny_llama(tmp_path / "good.gguf").read_bytes()
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))])
    if damaged:
        at = data.draw(st.integers(0, min(len(damaged), 9_000) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "bad.gguf"
    path.write_bytes(damaged)
    try:
        file = GgufFile(path)
        for name in file.tensors:
            file.tensor(name)
    except StartFailed as error:
        assert "bad.gguf" in error.message


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (struct.pack("<IQQ", 3, 0, 1 << 40), "keys"),
        (struct.pack("<IQQ", 3, 1 << 40, 0), "tensors"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 1 << 23) + bytes(1 << 23), "numbers"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 1 << 60), "texts"),
        (struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, 1 << 25) + bytes(1 << 25), "a text"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "a list of lists"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_bombs_are_refused(tmp_path: Path, header: bytes, what: str) -> None:
    """A header that claims, or even holds, absurdly much is refused before it is read into
    memory."""
    path = tmp_path / "bomb.gguf"
    path.write_bytes(b"GGUF" + header + bytes(64))
    with pytest.raises(WeightsInvalid, match=r"bomb\.gguf: .*(damaged|unknown type)"):
        GgufFile(path)
