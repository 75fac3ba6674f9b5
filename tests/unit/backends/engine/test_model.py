"""The paged decoder against a slow one written the plain way, on a tiny random model."""

import math
import random

import pytest
import torch

from backends.engine.gguf import GgufFile
from backends.engine.kv import BlockPool, blocks_for, is_run
from backends.engine.model import Model
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Row
from tests.fakes.engine import sequence

HEADS, KV_HEADS, SIZE = 4, 2, 8


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as GGUF files are laid out: pairs next to each other. (T, heads, D)"""
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    turned = torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.view_as_real(turned).reshape(x.shape)


def reference(file: GgufFile, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, with no cache, no paging and no fused weights."""

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(file.tensor(name))

    def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale

    x = weight("token_embd.weight")[tokens]
    mask = torch.full((len(tokens), len(tokens)), -math.inf).triu(1)
    for n in range(2):
        h = normed(x, weight(f"blk.{n}.attn_norm.weight"))
        q = rotate_pairs((h @ weight(f"blk.{n}.attn_q.weight").T).view(-1, HEADS, SIZE))
        k = rotate_pairs((h @ weight(f"blk.{n}.attn_k.weight").T).view(-1, KV_HEADS, SIZE))
        v = (h @ weight(f"blk.{n}.attn_v.weight").T).view(-1, KV_HEADS, SIZE)
        heads = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, kv].T / math.sqrt(SIZE) + mask
            heads.append(scores.softmax(-1) @ v[:, kv])
        x = x + torch.cat(heads, -1) @ weight(f"blk.{n}.attn_output.weight").T
        h = normed(x, weight(f"blk.{n}.ffn_norm.weight"))
        gate = h @ weight(f"blk.{n}.ffn_gate.weight").T
        up = h @ weight(f"blk.{n}.ffn_up.weight").T
        x = x + (gate * gate.sigmoid() * up) @ weight(f"blk.{n}.ffn_down.weight").T
    return normed(x, weight("output_norm.weight")) @ weight("token_embd.weight").T


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["run", "scattered"])
def test_chunks_over_blocks_equal_the_plain_model(
    file: GgufFile, words: Tokenizer, chunk: int, is_scattered: bool
) -> None:
    """Any chunking, next-door or scattered blocks, beside another sequence: the same logits."""
    rng = random.Random(chunk)
    model = Model(file, kv_blocks=8)
    prompt = [rng.randrange(words.size) for _ in range(150)]
    mine, other = sequence(words, prompt), sequence(words, prompt[::-1][:90])
    mine.blocks = [6, 1, 4] if is_scattered else [3, 4, 5]
    other.blocks = [0, 7] if is_scattered else [0, 1]
    assert is_run(mine.blocks) is not is_scattered
    logits = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        rows = [Row(mine, start, min(chunk, len(prompt) - start))]
        if start < 90:
            rows.insert(0, Row(other, start, min(chunk, 90 - start)))
        logits, _ = model.logits(rows)
    expected = reference(file, prompt)
    assert torch.allclose(logits[-1], expected[-1], atol=1e-4)


def test_rows_without_a_token_due_give_no_logits(file: GgufFile, words: Tokenizer) -> None:
    """Only the last chunk of a prompt pays for the head."""
    model = Model(file, kv_blocks=4)
    choice = sequence(words, [5] * 40)
    choice.blocks = BlockPool(4).allocate(blocks_for(40)) or []
    assert model.logits([Row(choice, 0, 30)])[0].shape == (0, words.size)
    assert model.logits([Row(choice, 30, 10)])[0].shape == (1, words.size)
