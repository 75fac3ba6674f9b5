"""The Llama family's decoder in fp32 on a CPU, over a paged KV pool.

Letters: T tokens of the step, H query heads, K kv heads, D head size, V vocabulary.
Numbers equal those of `transformers`' LlamaForCausalLM to rounding; the golden test holds greedy
text to equality. Linear layers use oneDNN with weights packed once (2-4 times faster than packing
at every call for 2 to 64 rows, and exact fp32); without oneDNN they are ordinary ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch.nn.functional import linear, rms_norm, silu

from backends.engine import attention
from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS
from backends.engine.shape import ModelShape, read_shape
from backends.engine.types import Row


class PackedLinear:
    """y = x Wt with the weight packed for oneDNN, where this torch has it."""

    __slots__ = ("_is_packed", "_weight")

    def __init__(self, weight: NDArray[np.float32]) -> None:
        tensor = torch.from_numpy(weight)  # (out, in)
        self._is_packed = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch
        if self._is_packed:
            tensor = torch.ops.mkldnn._reorder_linear_weight(tensor)
        self._weight = tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return linear(x, self._weight)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, None, "none", [], ""
        )
        return result


class _Layer(Struct, frozen=True):
    attention_norm: torch.Tensor  # (hidden,)
    qkv: PackedLinear  # hidden -> (H + 2 K) D
    output: PackedLinear  # H D -> hidden
    feed_norm: torch.Tensor  # (hidden,)
    gate_up: PackedLinear  # hidden -> 2 feed_forward
    down: PackedLinear  # feed_forward -> hidden


class Model:
    """Weights and the KV pool. Not safe for two threads."""

    def __init__(self, file: GgufFile, *, kv_blocks: int) -> None:
        self.shape = shape = read_shape(file)
        self.weight_bytes = 4 * (shape.body_params + shape.head_params)
        table = (shape.vocab, shape.hidden)
        self._embedding = file.rows("token_embd.weight", table)
        self._layers = [_layer(file, shape, number) for number in range(shape.layers)]
        self._norm = torch.from_numpy(file.tensor("output_norm.weight", (shape.hidden,)))
        is_tied = "output.weight" not in file.tensors
        head = "token_embd.weight" if is_tied else "output.weight"
        self._head = PackedLinear(file.tensor(head, table))
        size = (shape.layers, shape.kv_heads, kv_blocks * BLOCK_TOKENS, shape.head_dim)
        # Not zeroed: memory is taken by the blocks that are used, not by the pool's size.
        self._keys, self._values = torch.empty(size), torch.empty(size)
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        self._frequencies = 1.0 / shape.rope_base**exponent  # (D / 2,)

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of all layers."""
        for pool in (self._keys, self._values):
            blocks = pool.view(*pool.shape[:2], -1, BLOCK_TOKENS, self.shape.head_dim)
            blocks[:, :, target] = blocks[:, :, source]

    def read_block(self, block: int) -> memoryview:
        """A copy of the keys and values of all layers."""
        return np.stack([pool[:, :, block] for pool in self._blocks()]).data.cast("B")

    def write_block(self, block: int, data: memoryview) -> None:
        keys, values = self._blocks()
        size = (2, *keys.shape[:2], *keys.shape[3:])
        keys[:, :, block], values[:, :, block] = np.frombuffer(data, np.float32).reshape(size)

    def _blocks(self) -> list[NDArray[np.float32]]:
        """The pool as (layers, K, blocks, tokens of a block, D), without a copy."""
        return [
            pool.view(*pool.shape[:2], -1, BLOCK_TOKENS, self.shape.head_dim).numpy()
            for pool in (self._keys, self._values)
        ]

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> tuple[torch.Tensor, None]:
        """Compute the rows' new tokens into the pool; (logits that rows ask for, V) fp32, and no
        word on which are best."""
        tokens = [token for row in rows for token in row.tokens]
        positions = torch.cat([torch.arange(row.start, row.context) for row in rows])
        angles = positions[:, None].float() * self._frequencies  # (T, D / 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # (T, 1, D / 2)
        slots = attention.write_slots(rows)
        segments = attention.segments(rows)
        x = torch.from_numpy(self._embedding(tokens))  # (T, hidden)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, x, cos, sin, slots, segments)
            x = x + self._feed_forward(layer, x)
        wanted = _last_tokens(rows)
        if not wanted:
            return x.new_empty(0, self.shape.vocab), None
        return self._head(self._normalised(x[wanted], self._norm)), None

    def _attention(
        self,
        number: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        segments: list[attention.Segment],
    ) -> torch.Tensor:
        heads, kv_heads, size = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv = layer.qkv(self._normalised(x, layer.attention_norm)).view(len(x), -1, size)
        rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)  # (T, H + K, D)
        keys, values = self._keys[number], self._values[number]
        keys.index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        values.index_copy_(1, slots, qkv[:, heads + kv_heads :].transpose(0, 1))
        attended = attention.attend(rotated[:, :heads], keys, values, segments)
        return layer.output(attended.reshape(len(x), heads * size))

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._normalised(x, layer.feed_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_epsilon)


def _layer(file: GgufFile, shape: ModelShape, number: int) -> _Layer:
    queries = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    hidden, feed_forward = shape.hidden, shape.feed_forward

    def read(name: str, *size: int) -> NDArray[np.float32]:
        return file.tensor(f"blk.{number}.{name}.weight", size)

    q = _unpermuted(read("attn_q", queries, hidden), shape.heads)
    k = _unpermuted(read("attn_k", kv, hidden), shape.kv_heads)
    gate, up = read("ffn_gate", feed_forward, hidden), read("ffn_up", feed_forward, hidden)
    return _Layer(
        attention_norm=torch.from_numpy(read("attn_norm", hidden)),
        qkv=PackedLinear(np.concatenate([q, k, read("attn_v", kv, hidden)])),
        output=PackedLinear(read("attn_output", hidden, queries)),
        feed_norm=torch.from_numpy(read("ffn_norm", hidden)),
        gate_up=PackedLinear(np.concatenate([gate, up])),
        down=PackedLinear(read("ffn_down", hidden, feed_forward)),
    )


def _unpermuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF stores the rows of a head in pairs (x0, x_{D/2}, x1, …) for its own rotary kernel; we
    rotate halves, as transformers does."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding over the two halves of each head (T, heads, D)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _last_tokens(rows: Sequence[Row]) -> list[int]:
    """Which of the T tokens of the step give the logits that rows ask for."""
    wanted: list[int] = []
    end = 0
    for row in rows:
        end += row.count
        wanted += range(end - row.logits_rows, end)
    return wanted
