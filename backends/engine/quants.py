"""ggml's block formats, as numbers: each decoder takes raw blocks and gives fp32 values.

The arithmetic is ggml's, operation by operation in fp32, so values equal those of its own reference
bit for bit. Knows nothing of files. Layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Array = NDArray[np.float32]
Raw = NDArray[np.uint8]

GROUP = 32  # values of a block of the simple formats; eight of them make one of the K formats
SUPER = 256


class Kind(Struct, frozen=True):
    name: str
    block: int  # values per block
    nbytes: int  # bytes per block
    decode: Callable[[Raw], Array]


def _f32(raw: Raw) -> Array:
    return raw.view("<f4").astype(np.float32)  # a copy: nobody may write to the map


def _f16(raw: Raw) -> Array:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Raw) -> Array:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _halves(blocks: Raw, at: int) -> Array:
    """The fp16 at that byte of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Raw) -> Array:
    """(n, 16) bytes -> (n, 32): all low nibbles, then all high ones."""
    values = np.empty((packed.shape[0], 32), np.float32)
    values[:, :16] = packed & 0x0F
    values[:, 16:] = packed >> 4
    return values


def _fifth_bits(packed: Raw) -> Array:
    """(n, 4) bytes -> (n, 32): 16 where the bit is set, which is worth 16."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    return bits.astype(np.float32) * np.float32(16)


def _q4_0(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _halves(blocks, 0)
    return values


def _q4_1(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 20)
    values = _nibbles(blocks[:, 4:])
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q5_0(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 22)
    values = _nibbles(blocks[:, 6:])
    values += _fifth_bits(blocks[:, 2:6])
    values -= 16
    values *= _halves(blocks, 0)
    return values


def _q5_1(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 24)
    values = _nibbles(blocks[:, 8:])
    values += _fifth_bits(blocks[:, 4:8])
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _halves(blocks, 0)
    return values


def _spread(packed: Raw, width: int, bits: int) -> Raw:
    """(n, bytes) -> (n, values): runs of `width` bytes hold their low bits first, for all of the
    run, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, width)
    values: Raw = (runs >> shifts & np.uint8(2**bits - 1)).reshape(len(packed), -1)
    return values


def _q2_k(raw: Raw) -> Array:
    """16 scales and minima of 4 bits, 2-bit numbers, d, dmin."""
    blocks = raw.reshape(-1, 84)
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima = _halves(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    values = _spread(blocks[:, 16:80], 32, 2).astype(np.float32).reshape(-1, 16, 16)
    return (values * scales[:, :, None] - minima[:, :, None]).reshape(-1, SUPER)


def _q3_k(raw: Raw) -> Array:
    """Third bits (0 means minus 4), 2-bit numbers, 16 scales of 6 bits, d."""
    blocks = raw.reshape(-1, 110)
    packed = blocks[:, 96:108]
    low, high = _spread(packed[:, :8], 8, 4), _spread(packed[:, 8:], 4, 2)
    scales = _halves(blocks, 108) * ((low | high << 4).astype(np.float32) - np.float32(32))
    values = _spread(blocks[:, 32:96], 32, 2).astype(np.float32)
    values -= (1 - _spread(blocks[:, :32], 32, 1)).astype(np.float32) * np.float32(4)
    return (values.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, SUPER)


def q4_k_parts(raw: Raw) -> tuple[Raw, Array, Array]:
    """(blocks, 256) numbers of 4 bits, and (blocks, 8) scales and minima: value = scale × number
    - minimum."""
    blocks = raw.reshape(-1, 144)
    scales, minima = _k_scales(blocks)
    return _spread(blocks[:, 16:], 32, 4), scales, minima


def _k_scales(blocks: Raw) -> tuple[Array, Array]:
    """d, dmin and twelve bytes with eight scales and eight minima of 6 bits each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return (
        _halves(blocks, 0) * scales.astype(np.float32),
        _halves(blocks, 2) * minima.astype(np.float32),
    )


def _q4_k(raw: Raw) -> Array:
    numbers, scales, minima = q4_k_parts(raw)
    values = numbers.astype(np.float32).reshape(-1, 8, 32)
    return (values * scales[:, :, None] - minima[:, :, None]).reshape(-1, SUPER)


def _q5_k(raw: Raw) -> Array:
    blocks = raw.reshape(-1, 176)
    scales, minima = _k_scales(blocks)
    numbers = _spread(blocks[:, 48:], 32, 4) | _spread(blocks[:, 16:48], 32, 1) << 4
    values = numbers.astype(np.float32).reshape(-1, 8, 32)
    return (values * scales[:, :, None] - minima[:, :, None]).reshape(-1, SUPER)


def _q6_k(raw: Raw) -> Array:
    """Low 4 bits, high 2 bits, 16 scales of 8 bits, d."""
    blocks = raw.reshape(-1, 210)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    numbers = _spread(blocks[:, :128], 64, 4) | _spread(blocks[:, 128:192], 32, 2) << 4
    values = numbers.astype(np.float32).reshape(-1, 16, 16) - np.float32(32)
    return (values * (_halves(blocks, 208) * scales)[:, :, None]).reshape(-1, SUPER)


KINDS = {
    0: Kind("F32", 1, 4, _f32),
    1: Kind("F16", 1, 2, _f16),
    2: Kind("Q4_0", GROUP, 18, _q4_0),
    3: Kind("Q4_1", GROUP, 20, _q4_1),
    6: Kind("Q5_0", GROUP, 22, _q5_0),
    7: Kind("Q5_1", GROUP, 24, _q5_1),
    8: Kind("Q8_0", GROUP, 34, _q8_0),
    10: Kind("Q2_K", SUPER, 84, _q2_k),
    11: Kind("Q3_K", SUPER, 110, _q3_k),
    12: Kind("Q4_K", SUPER, 144, _q4_k),
    13: Kind("Q5_K", SUPER, 176, _q5_k),
    14: Kind("Q6_K", SUPER, 210, _q6_k),
    30: Kind("BF16", 1, 2, _bf16),
}
"""By the numbers of ggml's `enum ggml_type`."""

BY_NAME = {kind.name: kind for kind in KINDS.values()}
