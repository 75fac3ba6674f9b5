"""The Llama family's decoder as one compiled call per step.

The numbers of a token do not depend on what else is computed in the step, on chunks, threads or
blocks: see `step.cpp`. With dtype `auto` the weights are the file's own 4- and 8-bit numbers, and
activations are rounded to 8 bits in groups of 32 before each product; with `float32` nothing is
rounded and greedy text equals that of transformers.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS, blocks_for
from backends.engine.native.library import (
    ConfigStruct,
    LayerStruct,
    Library,
    StepStruct,
    Unavailable,
    WeightStruct,
)
from backends.engine.native.packing import FORMAT_NAMES, Array, Dtype, Packed, Part, pack
from backends.engine.shape import ModelShape, read_shape
from backends.engine.types import Row

_GROUP = 32


class NativeModel:
    """Weights and the KV pool. Not safe for two threads; `close` ends its own threads."""

    def __init__(
        self, file: GgufFile, library: Library, *, kv_blocks: int, threads: int, dtype: Dtype
    ) -> None:
        self.shape = shape = read_shape(file)
        check_shape(shape)
        self._library = library
        self._kept: list[Array] = []  # what the C++ side points to
        table = (shape.vocab, shape.hidden)
        self._embedding = file.rows("token_embd.weight", table)
        packed = [_layer(file, shape, number, dtype) for number in range(shape.layers)]
        is_tied = "output.weight" not in file.tensors
        head = pack(file, [Part("token_embd.weight" if is_tied else "output.weight", table)], dtype)
        self.formats = sorted(
            {FORMAT_NAMES[p.format] for layer in packed for p in layer[1:]}
            | {FORMAT_NAMES[head.format]}
        )
        self.weight_bytes = head.nbytes + sum(p.nbytes for layer in packed for p in layer[1:])
        layers = (LayerStruct * shape.layers)()
        for number, (norms, *weights) in enumerate(packed):
            layers[number] = LayerStruct(
                self._pointer(norms[0]), self._pointer(norms[1]), *map(self._weight, weights)
            )
        # Not zeroed: memory is taken by the blocks that are used, not by the pool's size.
        pool = (shape.layers, kv_blocks, shape.kv_heads * shape.head_dim * BLOCK_TOKENS)
        self._keys, self._values = np.empty(pool, np.float32), np.empty(pool, np.float32)
        cosines, sines = _angles(shape)
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
            norm=self._pointer(file.tensor("output_norm.weight", (shape.hidden,))),
            head=self._weight(head),
            cosines=self._pointer(cosines),
            sines=self._pointer(sines),
            keys=self._pointer(self._keys),
            values=self._pointer(self._values),
        )
        self._layers = layers
        self._logits = np.empty((0, shape.vocab), np.float32)
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
        return self._logits[: len(wanted)], best.tolist()

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
    file: GgufFile, shape: ModelShape, number: int, dtype: Dtype
) -> tuple[tuple[Array, Array], Packed, Packed, Packed, Packed]:
    """The two norms; qkv, output, gate and up, down."""
    queries = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    hidden, feed_forward = shape.hidden, shape.feed_forward

    def part(name: str, rows: int, columns: int, heads: int | None = None) -> Part:
        arrange = None if heads is None else lambda values: unpermuted(values, heads)
        return Part(f"blk.{number}.{name}.weight", (rows, columns), arrange)

    qkv = [
        part("attn_q", queries, hidden, shape.heads),
        part("attn_k", kv, hidden, shape.kv_heads),
        part("attn_v", kv, hidden),
    ]
    gate_up = [part("ffn_gate", feed_forward, hidden), part("ffn_up", feed_forward, hidden)]
    # 32 rows of the gate, the 32 of the way up, and so on: a task multiplies one with the other.
    order = np.arange(2 * feed_forward).reshape(2, -1, _GROUP).swapaxes(0, 1).reshape(-1)
    return (
        (
            file.tensor(f"blk.{number}.attn_norm.weight", (hidden,)),
            file.tensor(f"blk.{number}.ffn_norm.weight", (hidden,)),
        ),
        pack(file, qkv, dtype),
        pack(file, [part("attn_output", hidden, queries)], dtype),
        pack(file, gate_up, dtype, order),
        pack(file, [part("ffn_down", hidden, feed_forward)], dtype),
    )


def unpermuted(rows: Array, heads: int) -> Array:
    """GGUF stores the rows of a head in pairs (x0, x_{D/2}, x1, …) for its own rotary kernel; we
    rotate halves, as transformers does."""
    paired = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _angles(shape: ModelShape) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(positions, D / 2) cosines and sines."""
    exponent = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
    frequencies = np.float32(1.0) / np.float32(shape.rope_base) ** exponent
    angles = np.arange(shape.context, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)
