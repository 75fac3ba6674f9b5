"""The device side of the engine on a CPU: loads weights, computes steps, samples.

With `engine.py` on the other side of the `Runner` protocol: this file knows torch and nothing of
requests' lives, that one the reverse.
"""

import time
from collections.abc import Sequence

import torch

from backends.engine.gguf import GgufFile
from backends.engine.model import Model
from backends.engine.sampler import sample
from backends.engine.shape import ModelShape
from backends.engine.types import ModelFacts, Row, StepResult, TokenChoice


class CpuRunner:
    """One model in fp32. Used by one thread."""

    def __init__(self, file: GgufFile, *, kv_blocks: int, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = Model(file, kv_blocks=kv_blocks)
        self.facts = _facts(file, self._model.shape, kv_blocks)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._model.copy_block(source, target)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult:
        logits = self._model.logits(rows)
        started_ns = time.perf_counter_ns()
        choices: list[TokenChoice | Exception | None] = []
        at = 0
        for row in rows:
            if not row.needs_token:
                choices.append(None)
                continue
            choices.append(_sampled(logits[at], row))
            at += 1
        return StepResult(choices, time.perf_counter_ns() - started_ns)


def _sampled(logits: torch.Tensor, row: Row) -> TokenChoice | Exception:
    try:
        return sample(logits, row.sequence)
    except (ArithmeticError, RuntimeError, IndexError, ValueError) as error:
        return error  # this sequence fails; its neighbours do not


def _facts(file: GgufFile, shape: ModelShape, kv_blocks: int) -> ModelFacts:
    return ModelFacts(
        identity=f"{file.header_digest}/float32/kv-float32",
        body_params=shape.body_params,
        head_params=shape.head_params,
        weight_bytes=4,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        kv_token_bytes=shape.kv_token_bytes,
        kv_blocks=kv_blocks,
    )
