"""Paged attention on a GPU: by Triton kernels where they pass a self-test, else by gathering each
sequence's blocks for torch's own attention. Same numbers to rounding, either way.

A layer's pool is (blocks, K, 64, D). Letters as in `kernels.py`.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.engine.kv import BLOCK_TOKENS, blocks_for

log = logging.getLogger(__name__)

_SPLIT_TOKENS = 512  # of a context, a program
_MOST_SPLITS = 16
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Places:
    """Where the rows of a step are: built once, used by every layer. `rows`: (start, count) and
    the blocks of each, in the order of their tokens."""

    def __init__(
        self, rows: Sequence[tuple[int, int, Sequence[int]]], device: torch.device
    ) -> None:
        self.rows: list[tuple[int, int, int]] = []  # first query, start, count
        first = 0
        for start, count, _ in rows:
            self.rows.append((first, start, count))
            first += count
        most = max(len(blocks) for _, _, blocks in rows)
        padded = [[*blocks, *[0] * (most - len(blocks))] for _, _, blocks in rows]
        self.tables = torch.tensor(padded, dtype=torch.int32, device=device)
        self.contexts = torch.tensor(
            [start + count for start, count, _ in rows], dtype=torch.int32, device=device
        )
        self.is_decode = all(count == 1 for _, count, _ in rows)
        longest = max(start + count for start, count, _ in rows)
        self.splits = min(_MOST_SPLITS, -(-longest // _SPLIT_TOKENS))
        slots = [
            blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            for start, count, blocks in rows
            for at in range(start, start + count)
        ]
        self.slots = torch.tensor(slots, device=device)
        self.tiles: torch.Tensor | None = None

    def targets(self, kv_heads: int) -> torch.Tensor:
        """(T K,) where the step's keys and values belong, among the rows of D numbers of a layer's
        pool. On the device, from `slots`, so that a graph computes it anew at each replay."""
        heads = torch.arange(kv_heads, device=self.slots.device)
        blocks, within = self.slots // BLOCK_TOKENS, self.slots % BLOCK_TOKENS
        return ((blocks[:, None] * kv_heads + heads) * BLOCK_TOKENS + within[:, None]).flatten()


class Attention(Protocol):
    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places
    ) -> torch.Tensor: ...


def gathered(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places
) -> torch.Tensor:
    """The reference: copies each sequence's keys and values together."""
    out = torch.empty_like(queries)
    groups = queries.shape[1] // keys.shape[1]
    for number, (first, start, count) in enumerate(places.rows):
        context = start + count
        blocks = places.tables[number, : blocks_for(context)].long()

        def together(pool: torch.Tensor, blocks: torch.Tensor = blocks, context: int = context):  # type: ignore[no-untyped-def]  # (1, H, L, D)
            rows = pool[blocks].transpose(0, 1).flatten(1, 2)[:, :context]
            return rows.repeat_interleave(groups, 0)[None]

        seen = torch.ones(count, context, dtype=torch.bool, device=queries.device).tril(start)
        mine = queries[first : first + count].transpose(0, 1)[None]  # (1, H, n, D)
        attended = scaled_dot_product_attention(
            mine, together(keys), together(values), attn_mask=seen
        )
        out[first : first + count] = attended[0].transpose(0, 1)
    return out


def by_triton(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places
) -> torch.Tensor:
    from backends.engine.gpu import kernels

    queries = queries.contiguous()
    if places.is_decode:
        return kernels.decode(
            queries, keys, values, places.tables, places.contexts, splits=places.splits
        )
    if places.tiles is None:
        tiles = kernels.tiles_of(places.rows)
        places.tiles = torch.tensor(tiles, dtype=torch.int32, device=queries.device)
    return kernels.prefill(queries, keys, values, places.tables, places.tiles)


def choose(
    *, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Attention, str]:
    """The kernels if they compile here and agree with the reference, and what was found."""
    try:
        found = largest_error(by_triton, heads, kv_heads, size, dtype, device)
    except Exception as error:  # a plug-in: whatever compiling a kernel may raise
        log.warning("Triton kernels cannot be used", exc_info=True)
        return gathered, f"gathered ({type(error).__name__} in the self-test of Triton's kernels)"
    if found > _TOLERANCE[dtype]:
        return gathered, f"gathered (Triton's kernels were off by {found:.1e} in their self-test)"
    return by_triton, f"Triton kernels (self-test: off by {found:.1e} at most)"


def largest_error(
    attention: Attention,
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Against the reference, over decodes of several lengths and chunks of prompts."""
    random = torch.Generator().manual_seed(5)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    keys, values = (some(24, kv_heads, BLOCK_TOKENS, size) for _ in range(2))
    order = torch.randperm(24, generator=random).tolist()
    steps = [
        [(0, 1, order[:1]), (63, 1, order[1:2]), (64, 1, order[2:4]), (700, 1, order[4:15])],
        [(0, 70, order[:2]), (90, 3, order[2:4]), (128, 1, order[4:7]), (200, 130, order[7:13])],
    ]
    most = 0.0
    for rows in steps:
        places = Places(rows, device)
        queries = some(sum(count for _, count, _ in rows), heads, size)
        ours = attention(queries, keys, values, places).float()
        reference = gathered(queries, keys, values, places).float()
        error = float((ours - reference).abs().max())
        most = max(most, error if error == error else float("inf"))
    return most
