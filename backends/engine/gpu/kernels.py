"""Paged attention in Triton: the step's queries against blocks of keys and values.

Letters: T tokens of the step, H query heads, K kv heads, G = H / K, D head size, S splits.
A layer's pool is (blocks, K, 64, D): one program streams one head's tile of a block linearly.
`tables` (rows, most blocks) lists each row's blocks. With one query a row, the G query heads of a
kv head share a program and the context is cut into S parts, so that a few long sequences fill the
device; a second kernel joins the parts. With more, a program takes 64 queries of one head.

Only launches and arithmetic: `attention.py` decides when this is used.
"""

import torch
import triton
import triton.language as tl

from backends.engine.kv import BLOCK_TOKENS

_TILE = 64  # queries of a prefill program
_LEAST_DOT = 16  # rows that a matrix product needs


@triton.jit
def _decode_part(
    queries,
    keys,
    values,
    tables,
    contexts,
    parts,
    peaks,
    masses,
    scale,
    table_stride,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # a kernel
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    blocks = tl.cdiv(context, BLOCK)
    each = tl.cdiv(blocks, splits)
    member = tl.arange(0, ROWS)
    within = tl.arange(0, SIZE)
    token = tl.arange(0, BLOCK)
    is_mine = member < GROUP
    at = (row * KV_HEADS + head) * GROUP + member
    q = tl.load(queries + at[:, None] * SIZE + within[None, :], mask=is_mine[:, None], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for number in range(split * each, tl.minimum((split + 1) * each, blocks)):
        block = tl.load(tables + row * table_stride + number).to(tl.int64)
        tile = (block * KV_HEADS + head) * BLOCK * SIZE
        k = tl.load(keys + tile + token[None, :] * SIZE + within[:, None])  # (D, 64)
        v = tl.load(values + tile + token[:, None] * SIZE + within[None, :])
        seen = number * BLOCK + token < context
        scores = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        mass = mass * kept + tl.sum(weights, 1)
        total = total * kept[:, None]
        total += tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        peak = higher
    part = at * splits + split
    tl.store(parts + part[:, None] * SIZE + within[None, :], total, mask=is_mine[:, None])
    tl.store(peaks + part, peak, mask=is_mine)
    tl.store(masses + part, mass, mask=is_mine)


@triton.jit
def _decode_join(
    parts, peaks, masses, out, splits, SPLITS: tl.constexpr, SIZE: tl.constexpr
):  # a kernel
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    within = tl.arange(0, SIZE)
    is_there = split < splits
    peak = tl.load(peaks + at * splits + split, mask=is_there, other=float("-inf"))
    mass = tl.load(masses + at * splits + split, mask=is_there, other=0.0)
    part = tl.load(
        parts + (at * splits + split[:, None]) * SIZE + within[None, :],
        mask=is_there[:, None], other=0.0,
    )  # fmt: skip
    kept = tl.exp(peak - tl.max(peak, 0))
    joined = tl.sum(part * kept[:, None], 0) / tl.sum(mass * kept, 0)
    tl.store(out + at * SIZE + within, joined.to(out.dtype.element_ty))


@triton.jit
def _prefill(
    queries,
    keys,
    values,
    tables,
    tiles,
    out,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # a kernel
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + tile * 4)
    first = tl.load(tiles + tile * 4 + 1)  # of its queries, among the T
    count = tl.load(tiles + tile * 4 + 2)
    start = tl.load(tiles + tile * 4 + 3)  # position of the first
    kv_head = head // (HEADS // KV_HEADS)
    query = tl.arange(0, TILE)
    within = tl.arange(0, SIZE)
    token = tl.arange(0, BLOCK)
    is_mine = query < count
    at = ((first + query).to(tl.int64) * HEADS + head) * SIZE
    q = tl.load(queries + at[:, None] + within[None, :], mask=is_mine[:, None], other=0.0)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, SIZE), tl.float32)
    for number in range(tl.cdiv(start + count, BLOCK)):
        block = tl.load(tables + row * table_stride + number).to(tl.int64)
        base = (block * KV_HEADS + kv_head) * BLOCK * SIZE
        k = tl.load(keys + base + token[None, :] * SIZE + within[:, None])
        v = tl.load(values + base + token[:, None] * SIZE + within[None, :])
        position = number * BLOCK + token
        # A query beyond the count sees what the first one sees: its result is not stored.
        last = start + tl.where(is_mine, query, 0)
        scores = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scale
        scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        mass = mass * kept + tl.sum(weights, 1)
        total = total * kept[:, None]
        total += tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        peak = higher
    result = total / mass[:, None]
    tl.store(
        out + at[:, None] + within[None, :], result.to(out.dtype.element_ty), mask=is_mine[:, None]
    )


def decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    splits: int,
) -> torch.Tensor:
    """(rows, H, D), one query each at the end of its context (rows,) int32 -> (rows, H, D)."""
    rows, heads, size = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    parts = queries.new_empty((rows, heads, splits, size), dtype=torch.float32)
    peaks = queries.new_empty((rows, heads, splits), dtype=torch.float32)
    masses = torch.empty_like(peaks)
    out = torch.empty_like(queries)
    _decode_part[(rows, kv_heads, splits)](
        queries, keys, values, tables, contexts, parts, peaks, masses,
        size**-0.5, tables.stride(0), splits,
        KV_HEADS=kv_heads, GROUP=group,
        ROWS=max(_LEAST_DOT, triton.next_power_of_2(group)),
        SIZE=size, BLOCK=BLOCK_TOKENS,
    )  # fmt: skip
    _decode_join[(rows * heads,)](
        parts, peaks, masses, out, splits, SPLITS=triton.next_power_of_2(splits), SIZE=size
    )
    return out


def prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
) -> torch.Tensor:
    """(T, H, D) -> (T, H, D). `tiles` (n, 4) int32: row, first query, queries, position, at most
    64 queries each."""
    heads, size = queries.shape[1:]
    out = torch.empty_like(queries)
    _prefill[(len(tiles), heads)](
        queries, keys, values, tables, tiles, out, size**-0.5, tables.stride(0),
        HEADS=heads, KV_HEADS=keys.shape[1], TILE=_TILE, SIZE=size, BLOCK=BLOCK_TOKENS,
    )  # fmt: skip
    return out


def tiles_of(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """From (first query, start, count) of each row to the tiles of its queries."""
    return [
        (number, first + at, min(_TILE, count - at), start + at)
        for number, (first, start, count) in enumerate(rows)
        for at in range(0, count, _TILE)
    ]
