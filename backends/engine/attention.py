"""Attention over the paged KV pool, on a CPU.

Letters: T tokens of the step, H query heads, K kv heads, G = H / K, D head size, L context.
The pool of a layer is (K, slots, D), head-major: the blocks of a sequence that lie next to each
other are a view of it, and attention reads them without a copy. Others are gathered first.
Each sequence is computed by itself, so its result does not depend on its neighbours.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.engine.kv import BLOCK_TOKENS, blocks_for, is_run
from backends.engine.types import Row


class Segment:
    """Where one row's queries, keys and values are; built once per step, used by every layer."""

    __slots__ = ("begin", "context", "count", "index", "is_causal", "mask", "slot")

    def __init__(self, row: Row, begin: int) -> None:
        self.begin = begin
        self.count = row.count
        self.context = row.context
        blocks = row.sequence.blocks[: blocks_for(row.context)]
        self.slot = blocks[0] * BLOCK_TOKENS
        self.index = None if is_run(blocks) else _slots(blocks, 0, row.context)
        self.is_causal = row.start == 0 and row.count > 1
        self.mask = None
        if row.count > 1 and row.start > 0:
            ones = torch.ones(row.count, row.context, dtype=torch.bool)
            self.mask = ones.tril(row.start)  # query i sees keys up to start + i

    def view(self, pool: torch.Tensor) -> torch.Tensor:
        """(K, L, D): this sequence's keys or values."""
        if self.index is None:
            return pool[:, self.slot : self.slot + self.context]
        return pool.index_select(1, self.index)


def segments(rows: Sequence[Row]) -> list[Segment]:
    result, begin = [], 0
    for row in rows:
        result.append(Segment(row, begin))
        begin += row.count
    return result


def write_slots(rows: Sequence[Row]) -> torch.Tensor:
    """(T,) int64: where each new token's key and value go."""
    return torch.cat([_slots(row.sequence.blocks, row.start, row.context) for row in rows])


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[Segment]
) -> torch.Tensor:
    """(T, H, D) queries against the pools (K, slots, D) -> (T, H, D)."""
    kv_heads, _, size = keys.shape
    groups = queries.shape[1] // kv_heads
    out = torch.empty_like(queries)
    for row in rows:
        mine = slice(row.begin, row.begin + row.count)
        k, v = row.view(keys), row.view(values)
        q = queries[mine]
        if row.count == 1:
            # The G queries of one kv head become G rows of one head: no copy of keys, no mask.
            folded = q.view(1, kv_heads, groups, size)
            attended = scaled_dot_product_attention(folded, k[None], v[None])
            out[mine] = attended.reshape(1, kv_heads * groups, size)
            continue
        shape = (kv_heads, groups, row.context, size)
        attended = scaled_dot_product_attention(
            q.view(row.count, kv_heads, groups, size).permute(1, 2, 0, 3),  # (K, G, n, D)
            k[:, None].expand(shape),
            v[:, None].expand(shape),
            attn_mask=row.mask,
            is_causal=row.is_causal,
        )
        out[mine] = attended.permute(2, 0, 1, 3).reshape(row.count, kv_heads * groups, size)
    return out


def _slots(blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
    positions = torch.arange(start, end)
    table = torch.tensor(blocks)
    return table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
