"""The order of rows in query and key matrices, which both decoders undo in one way. No torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.engine.shape import ModelShape
from backends.engine.weights import Weights

Array = NDArray[Any]


def unpermuted(rows: Array, heads: int) -> Array:
    """Some files store the rows of a head in pairs (x0, x_{D/2}, x1, …) for another rotary kernel;
    we rotate halves, as transformers does."""
    paired = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def arranged(rows: Array, shape: ModelShape, heads: int) -> Array:
    """Rows of queries or keys, or their biases, in halves."""
    return unpermuted(rows, heads) if shape.is_paired else rows


def qkv_biases(weights: Weights, shape: ModelShape, number: int) -> NDArray[np.float32]:
    """Of queries, keys and values, one after another."""
    parts = []
    for name, heads in (("attn_q", shape.heads), ("attn_k", shape.kv_heads)):
        bias = weights.tensor(f"blk.{number}.{name}.bias", (heads * shape.head_dim,))
        parts.append(arranged(bias, shape, heads))
    values = shape.kv_heads * shape.head_dim
    parts.append(weights.tensor(f"blk.{number}.attn_v.bias", (values,)))
    return np.concatenate(parts)
