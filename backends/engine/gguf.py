"""Read GGUF files: metadata and tensors, memory-mapped.

Knows the file format and nothing of models. Every offset and length is checked against the file
before it is used, so a damaged or truncated file ends in `WeightsInvalid` that names the tensor.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3).
"""

import hashlib
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from backends.engine.errors import ModelMissing, WeightsInvalid
from backends.engine.quants import BY_NAME, KINDS, Array, Raw

Scalar = str | int | float | bool
Value = Scalar | Sequence[Scalar]

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
# More than any model has; what claims more is damaged or means to exhaust our memory.
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_ITEMS = 1 << 22  # of one list
_MOST_CHARACTERS = 1 << 24  # of one text, in bytes
_SAMPLED_BYTES = 256
_DECODED_AT_ONCE = 1 << 20  # values: decoders need several times the room of their result


class TensorInfo(Struct, frozen=True):
    """Where one tensor lies. `shape` is in row-major order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int  # from the beginning of the file
    nbytes: int


class GgufFile:
    """An open file. `metadata` and `tensors` are complete and bounds-checked from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 24:
                    raise WeightsInvalid(path, "not a GGUF file (shorter than a header)")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelMissing(f"{path}: cannot read the model file: {error.strerror}") from error
        reader = _Reader(path, self._map)
        if reader.take(4) != b"GGUF":
            raise WeightsInvalid(path, "not a GGUF file (wrong magic)")
        version = reader.number("I")
        if version not in (2, 3):
            raise WeightsInvalid(path, f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, key_count = reader.number("Q"), reader.number("Q")
        self.metadata: Mapping[str, Value] = {
            reader.string(): reader.value() for _ in range(reader.count(key_count, 13, _MOST_KEYS))
        }
        count = reader.count(tensor_count, 24, _MOST_TENSORS)
        infos = [_tensor_info(reader) for _ in range(count)]
        alignment = self.integer("general.alignment", 32)
        if alignment < 1:
            raise WeightsInvalid(path, f"alignment of {alignment} bytes")
        base = -(-reader.at // alignment) * alignment
        self.tensors = {info.name: self._placed(info, base) for info in infos}
        if len(self.tensors) < len(infos):
            raise WeightsInvalid(path, "the header is damaged (a tensor is there twice)")
        self.digest = self._digest(reader.at)

    def _digest(self, header: int) -> str:
        """Of the header and the beginning of every tensor: cheap, and different for two models of
        one shape."""
        digest = hashlib.sha256(self._map[:header])
        for info in self.tensors.values():
            digest.update(self._map[info.start : info.start + min(info.nbytes, _SAMPLED_BYTES)])
        return digest.hexdigest()

    def _placed(self, info: TensorInfo, base: int) -> TensorInfo:
        start = base + info.start
        if start + info.nbytes > len(self._map):
            raise WeightsInvalid(
                self.path,
                f"the file ends at byte {len(self._map)}, the tensor at {start + info.nbytes}: "
                "truncated, download it again",
                tensor=info.name,
            )
        return TensorInfo(info.name, info.shape, info.kind, start, info.nbytes)

    @property
    def weight_bytes(self) -> int:
        return len(self._map)

    def kind(self, name: str) -> str | None:
        """The kind of a tensor's numbers; None: it is not there."""
        info = self.tensors.get(name)
        return None if info is None else info.kind

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int):
            raise WeightsInvalid(self.path, f"metadata `{key}` is missing or not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float):
            raise WeightsInvalid(self.path, f"metadata `{key}` is missing or not a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise WeightsInvalid(self.path, f"metadata `{key}` is missing or not a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise WeightsInvalid(self.path, f"metadata `{key}` is missing or not a list of texts")
        return [str(item) for item in value]

    def integers(self, key: str) -> list[int]:
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise WeightsInvalid(self.path, f"metadata `{key}` is missing or not a list of numbers")
        return [int(item) for item in value]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Array:
        """Dequantised to fp32. `shape`, where given, is what the model needs."""
        info = self._needed(name, shape)
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, info.start)
        kind = BY_NAME[info.kind]
        blocks = raw.reshape(-1, kind.nbytes)
        values = np.empty(len(blocks) * kind.block, np.float32)
        some = max(1, _DECODED_AT_ONCE // kind.block)
        for at in range(0, len(blocks), some):
            part = values[at * kind.block : (at + some) * kind.block]
            with np.errstate(all="ignore"):
                part[:] = kind.decode(blocks[at : at + some].reshape(-1)).reshape(-1)
                # One non-finite scale poisons its whole block, so a sum is enough to see it.
                is_finite = np.isfinite(part.sum(dtype=np.float64))
            if not is_finite:
                raise WeightsInvalid(self.path, "holds values that are not finite", tensor=name)
        return values.reshape(info.shape)

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, Raw]:
        """The kind of a matrix, and its bytes as they are in the file."""
        info = self._needed(name, shape)
        return info.kind, np.frombuffer(self._map, np.uint8, info.nbytes, info.start)

    def rows(self, name: str, shape: tuple[int, int]) -> Callable[[Sequence[int]], Array]:
        """Rows of a matrix, dequantised when asked for: an embedding stays as small as its file.
        Its values are those of `tensor`, which also checks them."""
        info = self._needed(name, shape)
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, info.start).reshape(shape[0], -1)
        decode = BY_NAME[info.kind].decode
        return lambda numbers: decode(raw[list(numbers)].reshape(-1)).reshape(-1, shape[1])

    def _needed(self, name: str, shape: tuple[int, ...] | None) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise WeightsInvalid(self.path, "missing", tensor=name)
        if shape is not None and info.shape != shape:
            raise WeightsInvalid(self.path, f"shape {info.shape}, not {shape}", tensor=name)
        return info


class _Reader:
    """A bounds-checked cursor."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._data):
            raise WeightsInvalid(self._path, f"the header is cut off at byte {len(self._data)}")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        return int(value)

    def count(self, claimed: int, least_bytes: int, most: int) -> int:
        """A count of things that take at least that many bytes each: absurd ones stop here."""
        if claimed > most or claimed * least_bytes > len(self._data) - self.at:
            raise WeightsInvalid(self._path, f"the header is cut off or damaged at byte {self.at}")
        return claimed

    def string(self) -> str:
        size = self.number("Q")
        try:
            return self.take(self.count(size, 1, _MOST_CHARACTERS)).decode()
        except UnicodeDecodeError as error:
            raise WeightsInvalid(
                self._path, f"the header is damaged near byte {self.at} (not UTF-8)"
            ) from error

    def value(self) -> Value:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            return self._strings(self.count(count, 8, _MOST_ITEMS))
        return self._scalars(element, count)

    def _strings(self, count: int) -> list[str]:
        """The vocabulary: 50,000 short strings, so this loop does as little as it can."""
        data, at, length = self._data, self.at, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                strings.append(data[start:at].decode())
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            raise WeightsInvalid(self._path, f"the header is damaged near byte {at}") from error
        if at > len(data):
            raise WeightsInvalid(self._path, f"the header is cut off at byte {len(data)}")
        self.at = at
        return strings

    def _scalars(self, kind: int, count: int) -> list[Scalar]:
        code = _SCALARS.get(kind)
        if code is None:
            raise WeightsInvalid(self._path, f"metadata of unknown type {kind} at byte {self.at}")
        size = struct.calcsize(code)
        count = self.count(count, size, _MOST_ITEMS)
        return list(struct.unpack(f"<{count}{code}", self.take(count * size)))


def _tensor_info(reader: _Reader) -> TensorInfo:
    """As written: `start` is still relative to the data section."""
    name = reader.string()
    dimensions = reader.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise WeightsInvalid(reader._path, f"{dimensions} dimensions", tensor=name)
    shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
    number, start = reader.number("I"), reader.number("Q")
    kind = KINDS.get(number)
    if kind is None:
        known = ", ".join(sorted(BY_NAME))
        raise WeightsInvalid(
            reader._path, f"GGML type {number} is not supported ({known} are)", tensor=name
        )
    values = 1
    for size in shape:
        values *= size
    if values == 0 or shape[-1] % kind.block:
        raise WeightsInvalid(
            reader._path, f"shape {shape} does not fit blocks of {kind.block}", tensor=name
        )
    return TensorInfo(name, shape, kind.name, start, values // kind.block * kind.nbytes)
