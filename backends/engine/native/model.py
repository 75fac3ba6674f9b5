"""The decoder of the Llama, Qwen and SmolLM families as one compiled call per step.

The numbers of a token do not depend on what else is computed in the step, on chunks, threads or
blocks: see `step.cpp`. With dtype `auto` the weights are the file's own 4- and 8-bit numbers, and
activations are rounded to 8 bits in groups of 32 before each product; with `float32` nothing is
rounded and greedy text equals that of transformers.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from backends.engine.kv import BLOCK_TOKENS, blocks_for
from backends.engine.layout import arranged, qkv_biases
from backends.engine.native.library import (
    ConfigStruct,
    LayerStruct,
    Library,
    StepStruct,
    Unavailable,
    WeightStruct,
)
from backends.engine.native.packing import FORMAT_NAMES, Array, Dtype, Packed, Part, pack
from backends.engine.rope import angles
from backends.engine.shape import ModelShape, read_shape
from backends.engine.types import Row
from backends.engine.weights import Weights

_GROUP = 32


class NativeModel:
    """Weights and the KV pool. Not safe for two threads; `close` ends its own threads."""

    def __init__(
        self,
        weights: Weights,
        library: Library,
        *,
        kv_blocks: int,
        threads: int,
        dtype: Dtype,
        progress: Callable[[float], None] = lambda part: None,
    ) -> None:
        self.shape = shape = read_shape(weights)
        check_shape(shape)
        self._library = library
        self._kept: list[Array] = []  # what the C++ side points to
        table = (shape.vocab, shape.hidden)
        self._embedding = weights.rows("token_embd.weight", table)
        packed = []
        for number in range(shape.layers):
            packed.append(_layer(weights, shape, number, dtype))
            progress(packed_part(shape, number + 1))
        is_tied = weights.kind("output.weight") is None
        # Every logit depends on its row of the head alone: 4 bits are too few there.
        head = pack(
            weights,
            [Part("token_embd.weight" if is_tied else "output.weight", table)],
            "int8" if dtype == "int4" else dtype,
        )
        self.formats = sorted(
            {FORMAT_NAMES[p.format] for layer in packed for p in layer[1:]}
            | {FORMAT_NAMES[head.format]}
        )
        self.weight_bytes = head.nbytes + sum(p.nbytes for layer in packed for p in layer[1:])
        layers = (LayerStruct * shape.layers)()
        for number, (vectors, *matrices) in enumerate(packed):
            layers[number] = LayerStruct(
                *(None if vector is None else self._pointer(vector) for vector in vectors),
                number not in shape.still_layers,
                *map(self._weight, matrices),
            )
        self._norm = weights.tensor("output_norm.weight", (shape.hidden,))
        # Not zeroed: memory is taken by the blocks that are used, not by the pool's size.
        pool = (shape.layers, kv_blocks, shape.kv_heads * shape.head_dim * BLOCK_TOKENS)
        self._keys, self._values = np.empty(pool, np.float32), np.empty(pool, np.float32)
        positions = min(shape.context, kv_blocks * BLOCK_TOKENS)  # more can never be computed
        cosines, sines = angles(shape.rope, shape.head_dim, positions)
        self._config = ConfigStruct(
            layers=shape.layers,
            hidden=shape.hidden,
            feed_forward=shape.feed_forward,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab=shape.vocab,
            kv_blocks=kv_blocks,
            threads=threads,
            epsilon=shape.norm_epsilon,
            layer=layers,
            norm=self._pointer(self._norm),
            head=self._weight(head),
            cosines=self._pointer(cosines),
            sines=self._pointer(sines),
            keys=self._pointer(self._keys),
            values=self._pointer(self._values),
        )
        self._layers = layers
        self.hidden = np.empty((0, shape.hidden), np.float32)
        self._logits = np.empty((0, shape.vocab), np.float32)
        progress(1.0)
        self._handle: int | None = library.open(ctypes.byref(self._config))

    def logits(self, rows: Sequence[Row]) -> tuple[NDArray[np.float32], list[int]]:
        """Compute the rows' new tokens into the pool. The logits that rows ask for, in order
        (valid until the next call), and the lowest best id of each, -1 where they are no numbers.
        """
        tokens = [token for row in rows for token in row.tokens]
        places: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        wanted: list[int] = []
        begin = 0
        for row in rows:
            places.append((begin, row.start, row.count, len(tables)))
            tables += row.sequence.blocks[: blocks_for(row.context)]
            begin += row.count
            wanted += range(begin - row.logits_rows, begin)
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self.shape.vocab), np.float32)
        x = np.ascontiguousarray(self._embedding(tokens))
        arrays = [np.array(values, np.int32) for values in (places, tables, wanted)]
        best = np.empty(len(wanted), np.int32)
        step = StepStruct(
            len(tokens), len(rows), len(wanted), x.ctypes.data,
            *(array.ctypes.data for array in arrays), self._logits.ctypes.data, best.ctypes.data,
        )  # fmt: skip
        self._library.step(self._handle, ctypes.byref(step))
        self.hidden = x
        return self._logits[: len(wanted)], best.tolist()

    def states(self, tokens: range) -> NDArray[np.float32]:
        """Of those tokens of the last step, normalised as before the head."""
        x = self.hidden[tokens.start : tokens.stop]
        mean = np.square(x.astype(np.float64)).mean(axis=1, keepdims=True)
        wide = x / np.sqrt(mean + self.shape.norm_epsilon) * self._norm
        result: NDArray[np.float32] = wide.astype(np.float32)
        return result

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of all layers."""
        self._library.copy_block(self._handle, source, target)

    def read_block(self, block: int) -> memoryview:
        """A copy of the keys and values of all layers."""
        return np.stack((self._keys[:, block], self._values[:, block])).data.cast("B")

    def write_block(self, block: int, data: memoryview) -> None:
        values = np.frombuffer(data, np.float32).reshape(2, self.shape.layers, -1)
        self._keys[:, block], self._values[:, block] = values

    def close(self) -> None:
        if self._handle is not None:
            self._library.close(self._handle)
            self._handle = None

    def _pointer(self, array: Array) -> int:
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return int(array.ctypes.data)

    def _weight(self, packed: Packed) -> WeightStruct:
        self._kept += [packed.data] if packed.scales is None else [packed.data, packed.scales]
        return weight_struct(packed)


def packed_part(shape: ModelShape, layers: int) -> float:
    """How much of the parameters so many layers are."""
    body = shape.body_params * layers / shape.layers
    return body / (shape.body_params + shape.head_params)


def check_shape(shape: ModelShape) -> None:
    """Raises Unavailable for a model that does not come in whole groups."""
    for size in (shape.hidden, shape.feed_forward, shape.head_dim):
        if size % _GROUP:
            raise Unavailable(f"the compiled step needs multiples of {_GROUP}, not {size}")


def weight_struct(packed: Packed) -> WeightStruct:
    """Points into the arrays of `packed`, which must live as long."""
    scales = None
    if packed.scales is not None:
        address = ctypes.c_void_p(packed.scales.ctypes.data)
        scales = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16))
    return WeightStruct(packed.format, packed.rows, packed.columns, packed.data.ctypes.data, scales)


def _layer(
    weights: Weights, shape: ModelShape, number: int, dtype: Dtype
) -> tuple[tuple[Array | None, ...], Packed, Packed, Packed, Packed]:
    """The vectors in the order of `LayerStruct`; qkv, output, gate and up, down."""
    queries = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    hidden, feed_forward = shape.hidden, shape.feed_forward

    def part(name: str, rows: int, columns: int, heads: int | None = None) -> Part:
        arrange = None if heads is None else lambda values: arranged(values, shape, heads)
        return Part(f"blk.{number}.{name}.weight", (rows, columns), arrange)

    qkv = [
        part("attn_q", queries, hidden, shape.heads),
        part("attn_k", kv, hidden, shape.kv_heads),
        part("attn_v", kv, hidden),
    ]
    gate_up = [part("ffn_gate", feed_forward, hidden), part("ffn_up", feed_forward, hidden)]
    # 32 rows of the gate, the 32 of the way up, and so on: a task multiplies one with the other.
    order = np.arange(2 * feed_forward).reshape(2, -1, _GROUP).swapaxes(0, 1).reshape(-1)

    def vector(name: str, size: int, *, is_there: bool = True) -> Array | None:
        return weights.tensor(f"blk.{number}.{name}", (size,)) if is_there else None

    return (
        (
            vector("attn_norm.weight", hidden),
            vector("ffn_norm.weight", hidden),
            qkv_biases(weights, shape, number) if shape.has_qkv_bias else None,
            vector("attn_output.bias", hidden, is_there=shape.has_output_bias),
            vector("attn_q_norm.weight", shape.head_dim, is_there=shape.has_head_norm),
            vector("attn_k_norm.weight", shape.head_dim, is_there=shape.has_head_norm),
        ),
        pack(weights, qkv, dtype),
        pack(weights, [part("attn_output", hidden, queries)], dtype),
        pack(weights, gate_up, dtype, order),
        pack(weights, [part("ffn_down", hidden, feed_forward)], dtype),
    )
