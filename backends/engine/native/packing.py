"""Lay a weight matrix out for the compiled step: tiles of 16 outputs, inputs in order.

Quantised matrices keep the file's own numbers: 4-bit blocks stay nibbles with their scale and
minimum, 8-bit blocks stay bytes with their scale; nothing is rounded a second time (but the scales
of Q4_K, products of two numbers, to fp16). With `int8` and `int4` matrices are rounded here, in
groups of 32 inputs.

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
from backends.engine.quants import q4_k_parts
from backends.engine.weights import Weights

Dtype = Literal["auto", "float32", "float16", "int8", "int4"]
Array = NDArray[Any]

F32, F16, Q8, Q4 = range(4)
FORMAT_NAMES = ("float32", "float16", "q8", "q4")
_GROUP = 32
_TILE = 16
_FLOAT16_MOST = 65_504.0
_FLOAT16_LEAST = 6.2e-5  # smaller ones lose digits
_Q4_KINDS = {"Q4_0", "Q4_1", "Q4_K"}
_FITS = 3  # of scale and minimum to the numbers they give


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

    `auto` keeps 4- and 8-bit matrices as they are; others become float16. `int8` and `int4` keep
    those that are as small already."""
    kinds = {weights.kind(part.name) for part in parts}
    keeps = dtype not in ("float32", "float16")
    if keeps and kinds <= _Q4_KINDS:
        found = [_q4_rows(weights, part) for part in parts]
        if all(_fits_float16(scales) for _, *both in found for scales in both):
            return _q4(*_stacked(found, order))
    if keeps and dtype != "int4" and kinds == {"Q8_0"}:
        return _q8(*_stacked([_q8_rows(weights, part) for part in parts], order))
    [values] = _stacked(
        [(_arranged(weights.tensor(part.name, part.shape), part),) for part in parts], order
    )
    if dtype == "int8":
        return _q8(*rounded_to_8_bits(values))
    if dtype == "int4":
        return _q4(*rounded_to_4_bits(values))
    is_half = dtype != "float32" and float(np.abs(values).max()) < _FLOAT16_MOST
    return _float(values.astype(np.float16) if is_half else values)


def _q4_rows(weights: Weights, part: Part) -> tuple[Array, ...]:
    kind, raw = weights.blocks(part.name, part.shape)
    if kind == "Q4_K":
        numbers, wide, least = q4_k_parts(raw)
        shape = (part.shape[0], part.shape[1] // _GROUP)
        both = (wide.reshape(shape), -least.reshape(shape))
        return _checked(part, weights, numbers.reshape(*shape, _GROUP), *both)
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


def _fits_float16(scales: Array) -> bool:
    """Nothing is lost but the last digits."""
    if scales.dtype == np.float16:
        return True
    sizes = np.abs(scales[scales != 0])
    return not len(sizes) or bool(sizes.min() > _FLOAT16_LEAST and sizes.max() < _FLOAT16_MOST)


def rounded_to_8_bits(values: Array) -> tuple[Array, Array]:
    """(rows, groups, 32) int8 and (rows, groups) fp16 scales, the nearest to fp32 values."""
    groups = values.reshape(len(values), -1, _GROUP)
    scales = (np.abs(groups).max(axis=2) / 127).astype(np.float16)
    wide = scales.astype(np.float32)[:, :, None]
    numbers = np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0)
    return np.clip(np.rint(numbers), -127, 127).astype(np.int8).view(np.uint8), scales


def rounded_to_4_bits(values: Array) -> tuple[Array, Array, Array]:
    """(rows, groups, 32) numbers 0-15, (rows, groups) fp16 scales and minima. They begin at the
    ends of the group and are then fitted to the numbers by least squares."""
    groups = values.reshape(len(values), -1, _GROUP)
    least = groups.min(axis=2, keepdims=True)
    scales = (groups.max(axis=2, keepdims=True) - least) / np.float32(15)
    best = best_error = numbers = None
    for _ in range(1 + _FITS):
        scales = scales.astype(np.float16).astype(np.float32)
        least = least.astype(np.float16).astype(np.float32)
        steps = np.divide(groups - least, scales, out=np.zeros_like(groups), where=scales > 0)
        numbers = np.clip(np.rint(steps), 0, 15)
        error = np.square(numbers * scales + least - groups).sum(axis=2, keepdims=True)
        found = (numbers.astype(np.uint8), scales, least)
        if best is None or best_error is None:
            best, best_error = found, error
        else:
            better = error < best_error
            best = (
                np.where(better, found[0], best[0]),
                np.where(better, found[1], best[1]),
                np.where(better, found[2], best[2]),
            )
            best_error = np.minimum(error, best_error)
        mean_n = numbers.mean(axis=2, keepdims=True)
        mean_v = groups.mean(axis=2, keepdims=True)
        spread = np.square(numbers - mean_n).sum(axis=2, keepdims=True)
        product = ((numbers - mean_n) * (groups - mean_v)).sum(axis=2, keepdims=True)
        scales = np.divide(product, spread, out=np.zeros_like(product), where=spread > 0)
        least = mean_v - scales * mean_n
    assert best is not None
    halves = (best[1][:, :, 0].astype(np.float16), best[2][:, :, 0].astype(np.float16))
    return best[0], *halves


def _q4(quants: Array, scales: Array, minima: Array) -> Packed:
    rows, groups, _ = quants.shape
    # (tile, half, output, group, step) of four nibbles in four bytes; inputs 0 and 2 in the first
    # two, so that a shift of 8 turns the pair (0, 1) of 16-bit lanes into the pair (2, 3).
    swapped = quants.reshape(rows, groups, 8, 4)[..., [0, 2, 1, 3]]
    fours = np.ascontiguousarray(swapped).view(np.uint32).reshape(rows // _TILE, 2, 8, groups, 8)
    low, high = fours[:, 0], fours[:, 1]
    data = np.ascontiguousarray((low | high << 4).transpose(0, 2, 3, 1))
    tiles = [_by_tile(values.astype(np.float16)) for values in (scales, minima)]
    both = np.stack(tiles, axis=2)  # (tile, group, 2, 16)
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
