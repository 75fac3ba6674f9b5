"""Matrices of 4-bit numbers as GPTQ and AWQ store them: to fp32, exactly.

value = scale × (number - zero), both per group of inputs and per output. A 4-bit difference times
an fp16 scale fits into fp32's mantissa, so nothing is rounded.
GPTQ: https://github.com/AutoGPTQ/AutoGPTQ, AWQ: https://github.com/casper-hansen/AutoAWQ (GEMM).
"""

from typing import Any

import numpy as np
from msgspec import Struct

from backends.engine.quants import Array
from backends.engine.safetensors import Shards

_PER_WORD = 8
# AWQ's kernels want even outputs before odd ones: nibble i of a word belongs to output _AWQ[i].
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)

Words = np.ndarray[Any, np.dtype[np.int32]]


class Settings(Struct, frozen=True, kw_only=True):
    """`quantization_config` of config.json."""

    quant_method: str
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None  # act-order: `g_idx` in the file says it anyway
    version: str | None = None  # of AWQ's layout
    checkpoint_format: str | None = None  # of GPTQ's: v1 stores zeros less one

    @property
    def problem(self) -> str | None:
        """Why such a checkpoint cannot be read; None: it can."""
        if self.quant_method not in ("gptq", "awq"):
            return f"quant_method `{self.quant_method[:40]}` is not supported (gptq and awq are)"
        if self.bits != 4:
            return f"{self.bits} bits are not supported (4 are)"
        size = self.group_size
        if size is None or (size != -1 and size < 1):
            return f"group_size {size} is not a size, or -1 for whole columns"
        if self.quant_method == "awq" and (self.version or "gemm").lower() != "gemm":
            return f"AWQ's layout `{self.version}` is not supported (gemm is)"
        if (self.checkpoint_format or "gptq") not in ("gptq", "gptq_v2", "gemm"):
            return f"GPTQ's layout `{self.checkpoint_format}` is not supported (gptq and gptq_v2)"
        return None


def matrix(shards: Shards, base: str, settings: Settings) -> Array:
    """(outputs, inputs) of the linear layer `base`."""
    names = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales")]
    words, zero_words = (shards.array(name, "I32") for name in names[:2])
    scales = shards.floats(names[2])  # (groups, outputs)
    for name, array in zip(names, (words, zero_words, scales), strict=True):
        if array.ndim != 2:
            raise shards.invalid(name, f"shape {array.shape} is not that of a matrix")
    is_awq = settings.quant_method == "awq"
    if is_awq:
        numbers = _by_columns(words)[:, _awq_columns(words)]  # (inputs, outputs)
        zeros = _by_columns(zero_words)[:, _awq_columns(zero_words)]  # (groups, outputs)
    else:
        numbers, zeros = _by_rows(words), _by_columns(zero_words)
        if settings.checkpoint_format != "gptq_v2":
            zeros = zeros + np.int8(1)
    inputs, outputs = numbers.shape
    groups = len(scales)
    size = inputs if settings.group_size == -1 else settings.group_size
    assert size is not None, "`problem` refuses a missing one"
    if scales.shape[1] != outputs or zeros.shape != scales.shape:
        raise shards.invalid(names[1], f"{zeros.shape} zeros and {scales.shape} scales")
    index = np.arange(inputs) // size
    if not is_awq and f"{base}.g_idx" in shards:
        index = shards.array(f"{base}.g_idx", "I32").astype(np.int64)
    if index.shape != (inputs,) or index.min() < 0 or index.max() >= groups:
        raise shards.invalid(names[0], f"{inputs} inputs do not fall into {groups} groups")
    result = np.empty((outputs, inputs), np.float32)
    some = max(1, (1 << 20) // outputs)
    for at in range(0, inputs, some):
        mine = index[at : at + some]
        whole = numbers[at : at + some] - zeros[mine]
        result[:, at : at + some] = (whole.astype(np.float32) * scales[mine]).T
    return result


def _by_rows(words: Words) -> np.ndarray[Any, np.dtype[np.int8]]:
    """(n, m) words -> (8 n, m): the nibbles of a word are below each other."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    spread = (words.view(np.uint32)[:, None, :] >> shifts & np.uint32(15)).astype(np.int8)
    return spread.reshape(-1, words.shape[1])


def _by_columns(words: Words) -> np.ndarray[Any, np.dtype[np.int8]]:
    """(n, m) words -> (n, 8 m): beside each other."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    spread = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & np.uint32(15)
    return spread.astype(np.int8).reshape(len(words), -1)


def _awq_columns(words: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where output 0, 1, 2 … is among the nibbles as they lie."""
    place = np.argsort(np.array(_AWQ))
    return (np.arange(words.shape[1])[:, None] * _PER_WORD + place).reshape(-1)
