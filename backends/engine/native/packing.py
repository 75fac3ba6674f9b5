"""Lay a weight matrix out for the compiled step: tiles of 16 outputs, inputs in order.

Quantised matrices keep the file's own numbers: 4-bit blocks stay nibbles with their scale and
minimum, 8-bit blocks stay bytes with their scale; nothing is rounded a second time.

    format     of a tile, for each group of 32 inputs                    fp16 scales of a group
    F32, F16   32 × 16 values                                            none
    Q8         16 pairs of inputs × 16 outputs                           16
    Q4         8 fours of inputs × 8 outputs; outputs 0-7 are the low    16, then 16 minima
               nibbles, outputs 8-15 the high ones
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from backends.engine.errors import WeightsInvalid
from backends.engine.weights import Weights

Dtype = Literal["auto", "float32", "float16"]
Array = NDArray[Any]

F32, F16, Q8, Q4 = range(4)
FORMAT_NAMES = ("float32", "float16", "q8", "q4")
_GROUP = 32
_TILE = 16
_FLOAT16_MOST = 65_504.0
_Q4_KINDS = {"Q4_0", "Q4_1"}


class Packed(Struct, frozen=True):
    format: int
    rows: int  # outputs, a multiple of 16: the last ones may be padding
    columns: int
    data: Array
    scales: Array | None = None

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))


class Part(Struct, frozen=True):
    """A tensor of the file, and what to do to the order of its rows."""

    name: str
    shape: tuple[int, int]
    arrange: Callable[[Array], Array] | None = None


def pack(
    weights: Weights, parts: Sequence[Part], dtype: Dtype, order: Array | None = None
) -> Packed:
    """One matrix of the parts' rows, below each other, then in `order`. Raises WeightsInvalid.

    `auto` keeps 4- and 8-bit matrices as they are; others become float16."""
    kinds = {weights.kind(part.name) for part in parts}
    if dtype == "auto" and kinds <= _Q4_KINDS:
        return _q4(*_stacked([_q4_rows(weights, part) for part in parts], order))
    if dtype == "auto" and kinds == {"Q8_0"}:
        return _q8(*_stacked([_q8_rows(weights, part) for part in parts], order))
    [values] = _stacked(
        [(_arranged(weights.tensor(part.name, part.shape), part),) for part in parts], order
    )
    is_half = dtype != "float32" and float(np.abs(values).max()) < _FLOAT16_MOST
    return _float(values.astype(np.float16) if is_half else values)


def _q4_rows(weights: Weights, part: Part) -> tuple[Array, ...]:
    kind, raw = weights.blocks(part.name, part.shape)
    blocks = raw.reshape(part.shape[0], part.shape[1] // _GROUP, -1)
    scales = blocks[:, :, 0:2].copy().view("<f2")[:, :, 0]
    if kind == "Q4_1":
        minima, nibbles = blocks[:, :, 2:4].copy().view("<f2")[:, :, 0], blocks[:, :, 4:]
    else:
        minima, nibbles = scales * np.float16(-8), blocks[:, :, 2:]
    quants = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)  # (rows, groups, 32)
    return _checked(part, weights, quants, scales, minima)


def _q8_rows(weights: Weights, part: Part) -> tuple[Array, ...]:
    _, raw = weights.blocks(part.name, part.shape)
    blocks = raw.reshape(part.shape[0], part.shape[1] // _GROUP, 34)
    scales = blocks[:, :, 0:2].copy().view("<f2")[:, :, 0]
    return _checked(part, weights, blocks[:, :, 2:], scales)


def _checked(part: Part, weights: Weights, quants: Array, *scales: Array) -> tuple[Array, ...]:
    if not all(np.isfinite(values).all() for values in scales):
        raise WeightsInvalid(weights.path, "holds values that are not finite", tensor=part.name)
    return tuple(_arranged(values, part) for values in (quants, *scales))


def _arranged(rows: Array, part: Part) -> Array:
    return rows if part.arrange is None else part.arrange(rows)


def _stacked(parts: Sequence[tuple[Array, ...]], order: Array | None) -> list[Array]:
    """Each array of all parts as one, its rows in order and padded to whole tiles."""
    result = []
    for arrays in zip(*parts, strict=True):
        rows = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        rows = rows if order is None else rows[order]
        missing = -len(rows) % _TILE
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
        result.append(rows)
    return result


def _q4(quants: Array, scales: Array, minima: Array) -> Packed:
    rows, groups, _ = quants.shape
    # (tile, half, output, group, step) of four nibbles in four bytes; inputs 0 and 2 in the first
    # two, so that a shift of 8 turns the pair (0, 1) of 16-bit lanes into the pair (2, 3).
    swapped = quants.reshape(rows, groups, 8, 4)[..., [0, 2, 1, 3]]
    fours = np.ascontiguousarray(swapped).view(np.uint32).reshape(rows // _TILE, 2, 8, groups, 8)
    low, high = fours[:, 0], fours[:, 1]
    data = np.ascontiguousarray((low | high << 4).transpose(0, 2, 3, 1))
    both = np.stack([_by_tile(scales), _by_tile(minima)], axis=2)  # (tile, group, 2, 16)
    return Packed(Q4, rows, groups * _GROUP, data, both)


def _q8(quants: Array, scales: Array) -> Packed:
    rows, groups, _ = quants.shape
    pairs = np.ascontiguousarray(quants).view(np.uint16).reshape(rows // _TILE, _TILE, groups, 16)
    data = np.ascontiguousarray(pairs.transpose(0, 2, 3, 1))
    return Packed(Q8, rows, groups * _GROUP, data, _by_tile(scales))


def _by_tile(scales: Array) -> Array:
    """(rows, groups) -> (tile, group, 16)"""
    rows, groups = scales.shape
    return np.ascontiguousarray(scales.reshape(rows // _TILE, _TILE, groups).swapaxes(1, 2))


def _float(values: Array) -> Packed:
    rows, columns = values.shape
    tiles = values.reshape(rows // _TILE, _TILE, columns).swapaxes(1, 2)
    kind = F16 if values.dtype == np.float16 else F32
    return Packed(kind, rows, columns, np.ascontiguousarray(tiles))
