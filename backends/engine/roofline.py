"""What this machine could do at most, measured in the same run, and what a number is of that.

The limits of a decoder: it reads its weights and the sequences' keys and values once a step, and
computes two operations per weight and token. Whichever takes longer bounds it.
"""

import time
from collections.abc import Callable

import torch
from msgspec import Struct

from backends.engine.types import ModelFacts


class Machine(Struct, frozen=True):
    """Measured."""

    bytes_s: float  # read from memory
    flops_s: float  # fp32


def measure(threads: int) -> Machine:
    """The best of a few tries of a long sum and a large matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    numbers = torch.ones(128 * 1024 * 1024 // 4)
    square = torch.ones(1024, 1024)
    sum_s = min(_took_s(lambda: numbers.sum()) for _ in range(8))
    product_s = min(_took_s(lambda: square @ square) for _ in range(8))
    torch.set_num_threads(before)
    return Machine(numbers.numel() * 4 / sum_s, 2 * 1024**3 / product_s)


def _took_s(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def decode_limit(machine: Machine, facts: ModelFacts, *, batch: int, context: float) -> float:
    """Tokens a second of that many sequences of that mean length."""
    params = facts.body_params + facts.head_params
    read_s = (
        params * facts.weight_bytes + batch * context * facts.kv_token_bytes
    ) / machine.bytes_s
    pairs = 4 * facts.layers * facts.heads * facts.head_dim * context
    compute_s = batch * (2 * params + pairs) / machine.flops_s
    return batch / max(read_s, compute_s)


def prefill_limit(machine: Machine, facts: ModelFacts, tokens: int) -> float:
    """Prompt tokens a second."""
    flops = 2 * facts.body_params * tokens + 2 * facts.head_params
    flops += 2 * facts.layers * facts.heads * facts.head_dim * tokens**2
    return tokens / (flops / machine.flops_s)


def served_limit(
    machine: Machine, facts: ModelFacts, batch: int, prompt: float, output: float
) -> float:
    """Generated tokens a second of a batch that comes with its prompts: they are computed first,
    and nothing is generated meanwhile."""
    decoding_s = (
        batch * output / decode_limit(machine, facts, batch=batch, context=prompt + output / 2)
    )
    prefill_s = batch * prompt / prefill_limit(machine, facts, max(1, round(prompt)))
    return batch * output / (decoding_s + prefill_s)
