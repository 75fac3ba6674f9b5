"""Rotary position embeddings: how fast each pair of a head turns per token, scaled as models are.

Pure. The formulas are those of the models' reference implementation (`modeling_rope_utils.py` of
transformers), in fp32 in the same order, so that angles agree to the last place.
"""

import math
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Array = NDArray[np.float32]
Scaling = Literal["default", "linear", "llama3", "yarn"]


class Rope(Struct, frozen=True, kw_only=True):
    base: float
    scaling: Scaling = "default"
    factor: float = 1.0
    original_context: int = 0  # what the model was first trained for: of llama3 and yarn
    low_factor: float = 1.0  # llama3
    high_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncates: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: from the factor
    divisors: tuple[float, ...] = ()  # one for each pair, where a file has them ready-made

    @property
    def problem(self) -> str | None:
        """Why these figures make no sense; None: they do."""
        positive = (self.base, self.factor, *self.divisors)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            return "rotary embeddings: base and factors are numbers above 0"
        if self.scaling in ("llama3", "yarn") and self.original_context < 1:
            return f"rotary scaling {self.scaling} needs the original context"
        if self.scaling == "llama3" and not 0 < self.low_factor < self.high_factor:
            return "rotary scaling llama3: the low factor is below the high one"
        return None


def frequencies(rope: Rope, size: int) -> Array:
    """(D / 2) radians per token of a head of that size."""
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    plain: Array = np.float32(1.0) / np.float32(rope.base) ** exponent
    if rope.divisors:
        return (plain / np.array(rope.divisors, np.float32)).astype(np.float32)
    match rope.scaling:
        case "default":
            return plain
        case "linear":
            return (plain / np.float32(rope.factor)).astype(np.float32)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, size)


def amplitude(rope: Rope) -> float:
    """What cosines and sines are multiplied with."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def angles(rope: Rope, size: int, positions: int) -> tuple[Array, Array]:
    """(positions, D / 2) cosines and sines."""
    turned = np.arange(positions, dtype=np.float32)[:, None] * frequencies(rope, size)
    scale = np.float32(amplitude(rope))
    return np.cos(turned) * scale, np.sin(turned) * scale


def _llama3(rope: Rope, plain: Array) -> Array:
    """Fast pairs as they are, slow ones divided by the factor, those between between."""
    lengths = np.float32(2 * math.pi) / plain
    longest = rope.original_context / rope.low_factor
    shortest = rope.original_context / rope.high_factor
    slow = np.where(lengths > longest, plain / np.float32(rope.factor), plain)
    smooth = (np.float32(rope.original_context) / lengths - np.float32(rope.low_factor)) / (
        np.float32(rope.high_factor - rope.low_factor)
    )
    between = (1 - smooth) * slow / np.float32(rope.factor) + smooth * slow
    is_between = ~(lengths < shortest) & ~(lengths > longest)
    result: Array = np.where(is_between, between, slow).astype(np.float32)
    return result


def _yarn(rope: Rope, plain: Array, size: int) -> Array:
    """https://arxiv.org/abs/2309.00071: a ramp over the pairs, by how often each turns within the
    original context."""

    def pair_that_turns(times: float) -> float:
        turns = rope.original_context / (times * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(rope.base))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = np.float32(1) - ramp.astype(np.float32)
    result: Array = (plain / np.float32(rope.factor) * (1 - kept) + plain * kept).astype(np.float32)
    return result
