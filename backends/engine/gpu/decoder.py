"""The Llama family's decoder in torch on one device, over a paged pool, with the attention that
passed its self-test (`attention.py`).

On a CUDA device a step in which every row decodes one token is replayed as one graph of the whole
step, from embeddings to the best ids: kernels of a small model take less time than launching them.
A graph is captured for a batch size when it first comes, compared with the same step run plainly,
and given up, for good and with a word in the log, if it fails or differs.

Nothing here is specific to a device but the graphs, so all else is tested on a CPU.
"""

import logging
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch.nn.functional import embedding, linear, rms_norm, silu

from backends.engine.gpu.attention import Attention, Places, choose
from backends.engine.kv import BLOCK_TOKENS, blocks_for
from backends.engine.rope import amplitude, frequencies
from backends.engine.shape import ModelShape
from backends.engine.types import Row

log = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, *range(16, 257, 16))
_GRAPH_SPLITS = 8
_GRAPH_TOLERANCE = 0.05  # of logits: other splits, so other roundings


class Layer(Struct, frozen=True):
    attention_norm: torch.Tensor
    qkv: torch.Tensor  # ((H + 2 K) D, hidden), rotary halves, not pairs
    output: torch.Tensor
    feed_norm: torch.Tensor
    gate_up: torch.Tensor  # (2 feed_forward, hidden)
    down: torch.Tensor


class Parameters(Struct, frozen=True):
    """On the device, in the type that is computed with."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


def random_parameters(
    shape: ModelShape, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Parameters:
    """Of that shape, for measuring: made where they are used."""
    generator = torch.Generator(device).manual_seed(seed)

    def some(*size: int) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=device)
        return (values / math.sqrt(size[-1])).to(dtype)

    ones = torch.ones(shape.hidden, device=device, dtype=dtype)
    heads, size = shape.heads, shape.head_dim
    layers = [
        Layer(
            attention_norm=ones,
            qkv=some((heads + 2 * shape.kv_heads) * size, shape.hidden),
            output=some(shape.hidden, heads * size),
            feed_norm=ones,
            gate_up=some(2 * shape.feed_forward, shape.hidden),
            down=some(shape.hidden, shape.feed_forward),
        )
        for _ in range(shape.layers)
    ]
    table = some(shape.vocab, shape.hidden)
    return Parameters(table, layers, ones, table)


class DeviceDecoder:
    """Implements `runner.Decoder`. Not safe for two threads."""

    def __init__(self, shape: ModelShape, parameters: Parameters, *, kv_blocks: int) -> None:
        self.shape = shape
        table = parameters.embedding
        self.device, self.dtype = table.device, table.dtype
        self.weight_bytes = table.element_size() * (shape.body_params + shape.head_params)
        self._parameters = parameters
        self.attend: Attention
        self.attend, self.summary = choose(
            heads=shape.heads, kv_heads=shape.kv_heads, size=shape.head_dim, dtype=self.dtype,
            device=self.device,
        )  # fmt: skip
        # One block more: rows that fill a graph's batch up write there.
        pool = (shape.layers, kv_blocks + 1, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)
        self._keys = torch.zeros(pool, device=self.device, dtype=self.dtype)
        self._values = torch.zeros_like(self._keys)
        turning = torch.from_numpy(frequencies(shape.rope, shape.head_dim))
        self._frequencies = turning.to(self.device)
        self._amplitude = amplitude(shape.rope)
        self._hidden = torch.empty(0, shape.hidden, device=self.device, dtype=self.dtype)
        self._graphs = _Graphs(self, kv_blocks) if self.device.type == "cuda" else None

    def copy_block(self, source: int, target: int) -> None:
        for pool in (self._keys, self._values):
            pool[:, target] = pool[:, source]

    @torch.inference_mode()
    def read_block(self, block: int) -> memoryview:
        """A copy of the keys and values of all layers, in the pool's own format."""
        both = torch.stack([pool[:, block] for pool in (self._keys, self._values)]).cpu()
        return both.view(torch.uint8).numpy().data.cast("B")

    @torch.inference_mode()
    def write_block(self, block: int, data: memoryview) -> None:
        pools = (self._keys, self._values)
        both = torch.frombuffer(bytearray(data), dtype=self.dtype)
        for pool, part in zip(pools, both.chunk(2), strict=True):
            pool[:, block] = part.view(pool[:, block].shape).to(pool.device)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[int]]:
        """(rows that a sample is due for, V) fp32 on the device, and their best ids (-1: the row
        holds something that is no number)."""
        keeps_states = any(row.sequence.job.request.pooling is not None for row in rows)
        if self._graphs is not None and not keeps_states:
            found = self._graphs.step(rows)
            if found is not None:
                return found
        tokens = torch.tensor([t for row in rows for t in row.tokens], device=self.device)
        positions = torch.cat([torch.arange(row.start, row.context) for row in rows])
        places = Places(
            [
                (row.start, row.count, row.sequence.blocks[: blocks_for(row.context)])
                for row in rows
            ],
            self.device,
        )
        wanted: list[int] = []
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + row.count)
        for row, (_, end) in zip(rows, pairwise(ends), strict=True):
            wanted += range(end - row.logits_rows, end)
        at = torch.tensor(wanted, dtype=torch.long, device=self.device)
        logits, best = self.compute(tokens, positions.to(self.device), places, at)
        return logits, best.tolist()

    @torch.inference_mode()
    def states(self, tokens: range) -> NDArray[np.float32]:
        """Of those tokens of the last step, normalised as before the head."""
        mine = self._hidden[tokens.start : tokens.stop]
        normalised = self._normalised(mine, self._parameters.norm)
        found: NDArray[np.float32] = normalised.float().cpu().numpy()
        return found

    def compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, places: Places, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole step; nothing in it waits for the device."""
        heads, kv_heads, size = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        angles = positions[:, None].float() * self._frequencies
        cos = angles.cos()[:, None] * self._amplitude  # (T, 1, D / 2)
        sin = angles.sin()[:, None] * self._amplitude
        targets = places.targets(kv_heads)
        x = embedding(tokens, self._parameters.embedding)
        for number, layer in enumerate(self._parameters.layers):
            qkv = linear(self._normalised(x, layer.attention_norm), layer.qkv).view(
                len(x), -1, size
            )
            rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)
            keys, values = self._keys[number], self._values[number]
            keys.view(-1, size).index_copy_(0, targets, rotated[:, heads:].reshape(-1, size))
            new = qkv[:, heads + kv_heads :].reshape(-1, size)
            values.view(-1, size).index_copy_(0, targets, new)
            attended = self.attend(rotated[:, :heads], keys, values, places)
            x = x + linear(attended.reshape(len(x), -1), layer.output)
            gate, up = linear(self._normalised(x, layer.feed_norm), layer.gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down)
        self._hidden = x
        last = self._normalised(x[wanted], self._parameters.norm)
        logits = linear(last, self._parameters.head).float()
        finite = torch.isfinite(logits).all(-1)
        return logits, torch.where(finite, logits.argmax(-1), -1)

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class _Graphs:
    """Decode steps of a few sizes, captured when first needed."""

    def __init__(self, decoder: DeviceDecoder, spare_block: int) -> None:
        self._decoder = decoder
        self._spare = spare_block
        self._captured: dict[int, _Captured] = {}
        self._is_off = False

    def step(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[int]] | None:
        """None: compute it plainly."""
        if self._is_off or any(row.count != 1 or row.logits_rows != 1 for row in rows):
            return None
        size = next((size for size in GRAPH_SIZES if size >= len(rows)), None)
        if size is None:
            return None
        try:
            if size not in self._captured:
                self._captured[size] = _Captured(self._decoder, size, self._spare)
            captured = self._captured[size]
            logits, best = captured.replay(rows)
            if not captured.is_checked:
                captured.check(rows, logits)
        except RuntimeError:
            log.warning("CUDA graphs are given up", exc_info=True)
            self._is_off = True
            self._captured.clear()
            return None
        return logits[: len(rows)], best[: len(rows)].tolist()


class _Captured:
    """One size: its inputs stay where they are, a replay reads what was put there."""

    def __init__(self, decoder: DeviceDecoder, size: int, spare_block: int) -> None:
        device = decoder.device
        self._decoder, self._size, self._spare = decoder, size, spare_block
        width = min(spare_block, blocks_for(decoder.shape.context))
        self._tokens = torch.zeros(size, dtype=torch.long, device=device)
        self._positions = torch.zeros(size, dtype=torch.long, device=device)
        rows = [(0, 1, [spare_block])] * size
        self._places = Places(rows, device)
        self._places.tables = torch.full(
            (size, width), spare_block, dtype=torch.int32, device=device
        )
        self._places.splits = _GRAPH_SPLITS
        self._wanted = torch.arange(size, device=device)
        self.is_checked = False
        for _ in range(2):  # warm-up outside the graph: kernels compile, workspaces appear
            self._compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits, self._best = self._compute()

    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decoder.compute(self._tokens, self._positions, self._places, self._wanted)

    def replay(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        self._fill(rows)
        self._graph.replay()
        return self._logits, self._best

    def check(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """The same step without the graph must give the same logits. Raises RuntimeError."""
        seen = logits.clone()
        plain, _ = self._compute()
        error = float((seen[: len(rows)] - plain[: len(rows)]).abs().max())
        if not error <= _GRAPH_TOLERANCE:
            raise RuntimeError(f"the graph for {self._size} rows is off by {error}")
        self.is_checked = True

    def _fill(self, rows: Sequence[Row]) -> None:
        missing = self._size - len(rows)
        tables = [row.sequence.blocks[: blocks_for(row.context)] for row in rows]
        width = max(map(len, tables))
        padded = [[*blocks, *[self._spare] * (width - len(blocks))] for blocks in tables]
        slots = [
            blocks[row.start // BLOCK_TOKENS] * BLOCK_TOKENS + row.start % BLOCK_TOKENS
            for row, blocks in zip(rows, tables, strict=True)
        ]
        spare = self._spare * BLOCK_TOKENS
        put: list[tuple[torch.Tensor, list[int] | list[list[int]]]] = [
            (self._tokens, [*(row.tokens[0] for row in rows), *[0] * missing]),
            (self._positions, [*(row.start for row in rows), *[0] * missing]),
            (self._places.contexts, [*(row.context for row in rows), *[1] * missing]),
            (self._places.slots, [*slots, *[spare] * missing]),
            (self._places.tables[:, :width], [*padded, *[[self._spare] * width] * missing]),
        ]
        for target, values in put:
            target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)
