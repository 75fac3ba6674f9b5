"""The safetensors reader: exact values, and a clear word about every kind of damage."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from backends.engine.errors import ModelMissing, StartFailed, WeightsInvalid
from backends.engine.safetensors import INDEX, SafetensorsFile, Shards


def written(folder: Path, name: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / name)
    return folder / name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """What the library wrote comes back as fp32, whole and by rows."""
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    written(tmp_path, t=values)
    shards = Shards(tmp_path)
    assert shards.floats("t").tolist() == values.float().tolist()
    assert shards.rows("t", [3, 0]).tolist() == values[[3, 0]].float().tolist()


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    """Tensors of several files; one that is not where the index says is named."""
    written(tmp_path, "a.safetensors", x=torch.ones(2))
    written(tmp_path, "b.safetensors", y=torch.zeros(3))
    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    shards = Shards(tmp_path)
    assert (shards.floats("x").tolist(), shards.floats("y").tolist()) == ([1, 1], [0, 0, 0])
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    with pytest.raises(WeightsInvalid, match=r"b\.safetensors: tensor x: missing"):
        Shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(WeightsInvalid, match="a shard is a file beside it"):
        Shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    with pytest.raises(ModelMissing, match=r"c\.safetensors: cannot read"):
        Shards(tmp_path)


def test_an_empty_folder_is_said_to_be_one(tmp_path: Path) -> None:
    """No weights, no traceback."""
    with pytest.raises(ModelMissing, match=r"no \*\.safetensors"):
        Shards(tmp_path)


def test_a_truncated_file_names_its_tensor(tmp_path: Path) -> None:
    """A file cut off inside the data says which tensor is incomplete."""
    path = written(tmp_path, first=torch.ones(64), last=torch.ones(64))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsInvalid, match=r"tensor last: .*truncated"):
        SafetensorsFile(path)


def test_values_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Not finite, of a type that is no weight, or not there."""
    written(tmp_path, bad=torch.tensor([1.0, float("nan")]), whole=torch.ones(2, dtype=torch.int8))
    shards = Shards(tmp_path)
    for name, message in (("bad", "not finite"), ("whole", "type I8"), ("none", "missing")):
        with pytest.raises(WeightsInvalid, match=f"tensor {name}: .*{message}"):
            shards.floats(name)


def test_digests_tell_weights_apart(tmp_path: Path) -> None:
    """Two models of one shape have different digests."""
    written(tmp_path, t=torch.ones(64))
    first = Shards(tmp_path).digest()
    assert Shards(tmp_path).digest() == first
    written(tmp_path, t=torch.zeros(64))
    assert Shards(tmp_path).digest() != first


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere or with any byte changed, the reader ends in StartFailed or a valid file."""
    good = written(tmp_path, a=torch.ones(4, 4), b=torch.ones(8)).read_bytes()
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))])
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(damaged)
    try:
        shards = Shards(tmp_path)
        for name in ("a", "b"):
            if name in shards:
                shards.floats(name)
    except StartFailed as error:
        assert "model.safetensors" in error.message
