"""Read safetensors files: the tensors of one file, or of a folder's shards, memory-mapped.

Knows the file format and nothing of models. Offsets are checked against shapes and the file before
they are used; damage names the tensor. Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import math
import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from backends.engine.errors import ModelMissing, WeightsInvalid
from backends.engine.quants import Array, Raw

# More than any model has; what claims more is damaged.
_MOST_HEADER = 100 << 20
_SAMPLED_BYTES = 256
_DECODED_AT_ONCE = 1 << 22
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


class Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsFile:
    """One open file. `entries` are complete and bounds-checked from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 8:
                    raise WeightsInvalid(path, "not a safetensors file (shorter than a header)")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelMissing(f"{path}: cannot read the model file: {error.strerror}") from error
        length = int.from_bytes(self._map[:8], "little")
        if length > min(size - 8, _MOST_HEADER):
            raise WeightsInvalid(path, f"the header is cut off or damaged (of {length} bytes)")
        self._base = 8 + length
        self._header = bytes(self._map[8 : self._base])
        try:
            raw = msgspec.json.decode(self._header, type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            self.entries = {
                name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()
            }
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsInvalid(path, f"the header is damaged: {error}") from error
        for name, entry in self.entries.items():
            self._check(name, entry)

    def _check(self, name: str, entry: Entry) -> None:
        begin, end = entry.data_offsets
        width = _BYTES.get(entry.dtype)
        if width is None:
            raise WeightsInvalid(self.path, f"unknown type {entry.dtype}", tensor=name)
        if min(entry.shape, default=1) < 0 or not 0 <= begin <= end:
            raise WeightsInvalid(self.path, "an impossible shape or place", tensor=name)
        if end - begin != math.prod(entry.shape) * width:
            raise WeightsInvalid(
                self.path, f"{end - begin} bytes do not hold {entry.shape}", tensor=name
            )
        if self._base + end > len(self._map):
            raise WeightsInvalid(
                self.path,
                f"the file ends at byte {len(self._map)}, the tensor at {self._base + end}: "
                "truncated, download it again",
                tensor=name,
            )

    def bytes_of(self, name: str) -> Raw:
        begin, end = self.entries[name].data_offsets
        return np.frombuffer(self._map, np.uint8, end - begin, self._base + begin)

    def sampled(self) -> bytes:
        """Something of everything in it."""
        parts = [self._header]
        for name in sorted(self.entries):
            begin, end = self.entries[name].data_offsets
            start = self._base + begin
            parts.append(self._map[start : start + min(end - begin, _SAMPLED_BYTES)])
        return hashlib.sha256(b"".join(parts)).digest()


class Shards:
    """All tensors of a folder, whichever file they are in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        index = folder / INDEX
        if index.exists():
            names = self._indexed(index)
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                raise ModelMissing(f"{folder}: no *.safetensors in this folder")
            for path in paths:
                file = SafetensorsFile(path)
                self._files |= dict.fromkeys(file.entries, file)
            return
        opened = {name: SafetensorsFile(folder / name) for name in sorted(set(names.values()))}
        for tensor, name in names.items():
            if tensor not in opened[name].entries:
                raise WeightsInvalid(folder / name, "missing", tensor=tensor)
            self._files[tensor] = opened[name]

    def _indexed(self, index: Path) -> dict[str, str]:
        try:
            names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightsInvalid(index, f"damaged: {error}") from error
        for name in names.values():
            if Path(name).name != name:
                raise WeightsInvalid(index, f"a shard is a file beside it, not {name[:100]!r}")
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def entry(self, name: str) -> Entry:
        return self._files[name].entries[name]

    def path_of(self, name: str) -> Path:
        return self._files[name].path if name in self._files else self.folder

    def digest(self, *more: bytes) -> str:
        digest = hashlib.sha256()
        for file in sorted(set(self._files.values()), key=lambda file: file.path):
            digest.update(file.sampled())
        for data in more:
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    def array(self, name: str, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A tensor of whole numbers, as it is in the file. Raises WeightsInvalid for another."""
        entry = self._entry(name)
        if entry.dtype != dtype:
            raise self.invalid(name, f"is {entry.dtype}, not {dtype}")
        kind = {"I32": "<i4", "I64": "<i8"}[dtype]
        return self._files[name].bytes_of(name).view(kind).reshape(entry.shape)

    def floats(self, name: str) -> Array:
        """As fp32, whatever float it is. A copy."""
        entry = self._entry(name)
        raw = self._files[name].bytes_of(name).reshape(-1)
        values = np.empty(math.prod(entry.shape), np.float32)
        width = _BYTES[entry.dtype]
        for at in range(0, len(values), _DECODED_AT_ONCE):
            end = min(at + _DECODED_AT_ONCE, len(values))
            with np.errstate(all="ignore"):
                values[at:end] = self._as_floats(name, raw[at * width : end * width])
                is_finite = np.isfinite(values[at:end].sum(dtype=np.float64))
            if not is_finite:
                raise self.invalid(name, "holds values that are not finite")
        return values.reshape(entry.shape)

    def rows(self, name: str, numbers: list[int]) -> Array:
        """Those rows of a matrix, as fp32."""
        entry = self._entry(name)
        raw = self._files[name].bytes_of(name).reshape(entry.shape[0], -1)
        return self._as_floats(name, raw[numbers].reshape(-1)).reshape(len(numbers), -1)

    def invalid(self, name: str, problem: str) -> WeightsInvalid:
        return WeightsInvalid(self.path_of(name), problem, tensor=name)

    def _entry(self, name: str) -> Entry:
        if name not in self._files:
            raise self.invalid(name, "missing")
        return self.entry(name)

    def _as_floats(self, name: str, raw: Raw) -> Array:
        match self.entry(name).dtype:
            case "F32":
                return raw.view("<f4").astype(np.float32)
            case "F16":
                return raw.view("<f2").astype(np.float32)
            case "BF16":
                return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
            case other:
                raise self.invalid(name, f"weights of type {other} are not supported")
