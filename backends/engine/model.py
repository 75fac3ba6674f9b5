"""The decoder of the Llama, Qwen and SmolLM families in fp32 on a CPU, over a paged KV pool.

Letters: T tokens of the step, H query heads, K kv heads, D head size, V vocabulary.
Numbers equal those of `transformers` to rounding; the golden tests hold greedy text to equality.
Linear layers use oneDNN with weights packed once (2-4 times faster than packing
at every call for 2 to 64 rows, and exact fp32); without oneDNN they are ordinary ones.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch.nn.functional import linear, rms_norm, silu

from backends.engine import attention
from backends.engine.kv import BLOCK_TOKENS
from backends.engine.layout import arranged, qkv_biases
from backends.engine.rope import amplitude, frequencies
from backends.engine.shape import ModelShape, read_shape
from backends.engine.types import Row
from backends.engine.weights import Weights


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
    qkv_bias: torch.Tensor | None
    head_norms: torch.Tensor | None  # (H + K, D): of queries, then of keys
    rotates: bool
    output: PackedLinear  # H D -> hidden
    output_bias: torch.Tensor | None
    feed_norm: torch.Tensor  # (hidden,)
    gate_up: PackedLinear  # hidden -> 2 feed_forward
    down: PackedLinear  # feed_forward -> hidden


class Model:
    """Weights and the KV pool. Not safe for two threads."""

    def __init__(
        self,
        weights: Weights,
        *,
        kv_blocks: int,
        progress: Callable[[float], None] = lambda part: None,
    ) -> None:
        self.shape = shape = read_shape(weights)
        self.weight_bytes = 4 * (shape.body_params + shape.head_params)
        table = (shape.vocab, shape.hidden)
        self._embedding = weights.rows("token_embd.weight", table)
        self._layers: list[_Layer] = []
        for number in range(shape.layers):
            self._layers.append(_layer(weights, shape, number))
            body = shape.body_params * (number + 1) / shape.layers
            progress(body / (shape.body_params + shape.head_params))
        self._norm = torch.from_numpy(weights.tensor("output_norm.weight", (shape.hidden,)))
        is_tied = weights.kind("output.weight") is None
        head = "token_embd.weight" if is_tied else "output.weight"
        self._head = PackedLinear(weights.tensor(head, table))
        progress(1.0)
        size = (shape.layers, shape.kv_heads, kv_blocks * BLOCK_TOKENS, shape.head_dim)
        # Not zeroed: memory is taken by the blocks that are used, not by the pool's size.
        self._keys, self._values = torch.empty(size), torch.empty(size)
        self._frequencies = torch.from_numpy(frequencies(shape.rope, shape.head_dim))  # (D / 2,)
        self._amplitude = amplitude(shape.rope)
        self._hidden = torch.empty(0, shape.hidden)

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
        cos = angles.cos()[:, None] * self._amplitude  # (T, 1, D / 2)
        sin = angles.sin()[:, None] * self._amplitude
        slots = attention.write_slots(rows)
        segments = attention.segments(rows)
        x = torch.from_numpy(self._embedding(tokens))  # (T, hidden)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, x, cos, sin, slots, segments)
            x = x + self._feed_forward(layer, x)
        self._hidden = x
        wanted = _last_tokens(rows)
        if not wanted:
            return x.new_empty(0, self.shape.vocab), None
        return self._head(self._normalised(x[wanted], self._norm)), None

    @torch.inference_mode()
    def states(self, tokens: range) -> NDArray[np.float32]:
        """Of those tokens of the last step, normalised as before the head."""
        mine = self._hidden[tokens.start : tokens.stop]
        result: NDArray[np.float32] = self._normalised(mine, self._norm).numpy()
        return result

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
        qkv = layer.qkv(self._normalised(x, layer.attention_norm))
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qkv = qkv.view(len(x), -1, size)
        rotated = qkv[:, : heads + kv_heads]  # (T, H + K, D)
        if layer.head_norms is not None:
            rotated = rms_norm(rotated, (size,), None, self.shape.norm_epsilon) * layer.head_norms
        if layer.rotates:
            rotated = _rotate(rotated, cos, sin)
        keys, values = self._keys[number], self._values[number]
        keys.index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        values.index_copy_(1, slots, qkv[:, heads + kv_heads :].transpose(0, 1))
        attended = attention.attend(rotated[:, :heads], keys, values, segments)
        out = layer.output(attended.reshape(len(x), heads * size))
        return out if layer.output_bias is None else out + layer.output_bias

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._normalised(x, layer.feed_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_epsilon)


def _layer(weights: Weights, shape: ModelShape, number: int) -> _Layer:
    queries = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    hidden, feed_forward = shape.hidden, shape.feed_forward

    def read(name: str, *size: int) -> NDArray[np.float32]:
        return weights.tensor(f"blk.{number}.{name}", size)

    gate = read("ffn_gate.weight", feed_forward, hidden)
    up = read("ffn_up.weight", feed_forward, hidden)
    qkv = [
        arranged(read("attn_q.weight", queries, hidden), shape, shape.heads),
        arranged(read("attn_k.weight", kv, hidden), shape, shape.kv_heads),
        read("attn_v.weight", kv, hidden),
    ]
    qkv_bias = head_norms = output_bias = None
    if shape.has_qkv_bias:
        qkv_bias = torch.from_numpy(qkv_biases(weights, shape, number))
    if shape.has_head_norm:
        head_norms = torch.cat([
            torch.from_numpy(read("attn_q_norm.weight", shape.head_dim)).expand(shape.heads, -1),
            torch.from_numpy(read("attn_k_norm.weight", shape.head_dim)).expand(shape.kv_heads, -1),
        ])  # fmt: skip
    if shape.has_output_bias:
        output_bias = torch.from_numpy(read("attn_output.bias", hidden))
    return _Layer(
        attention_norm=torch.from_numpy(read("attn_norm.weight", hidden)),
        qkv=PackedLinear(np.concatenate(qkv)),
        qkv_bias=qkv_bias,
        head_norms=head_norms,
        rotates=number not in shape.still_layers,
        output=PackedLinear(read("attn_output.weight", hidden, queries)),
        output_bias=output_bias,
        feed_norm=torch.from_numpy(read("ffn_norm.weight", hidden)),
        gate_up=PackedLinear(np.concatenate([gate, up])),
        down=PackedLinear(read("ffn_down.weight", hidden, feed_forward)),
    )


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
