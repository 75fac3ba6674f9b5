"""A device side without torch, and jobs for tests of the engine's bookkeeping."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from msgspec import structs
from typing_extensions import override

from backends.engine.stops import StopMatcher
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import (
    Drafter,
    Job,
    JobRequest,
    ModelFacts,
    Row,
    Sampling,
    Sequence,
    StepResult,
    TokenChoice,
)

Choose = Callable[[Row], TokenChoice | Exception]


def facts(kv_blocks: int) -> ModelFacts:
    return ModelFacts(
        identity="fake",
        body_params=1000, head_params=100, weight_bytes=4, layers=2, heads=4, head_dim=8,
        vocab=262, kv_token_bytes=512, kv_blocks=kv_blocks,
    )  # fmt: skip


class FakeRunner:
    """Answers each row that needs a token with `choose(row)`; remembers every step."""

    def __init__(self, choose: Choose, *, kv_blocks: int = 8) -> None:
        self.facts = facts(kv_blocks)
        self.drafter: Drafter | None = None
        self.steps: list[list[tuple[int, int, int]]] = []
        self.copies: list[tuple[int, int]] = []
        self.blocks: dict[int, bytes] = {}
        self._choose = choose

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        self.copies += pairs

    def close(self) -> None:
        self.is_closed = True

    def read_block(self, block: int) -> memoryview:
        return memoryview(self.blocks.get(block, bytes(64)))

    def write_block(self, block: int, data: memoryview) -> None:
        self.blocks[block] = bytes(data)

    def run(self, rows: SequenceOf[Row]) -> StepResult:
        self.steps.append([(row.sequence.job.job_id, row.start, row.count) for row in rows])
        return StepResult([self._choose(row) if row.needs_token else None for row in rows], 1_000)


class Remembers(FakeRunner):
    """Its blocks hold the tokens themselves, and it looks: a sequence whose blocks do not hold its
    own text fails. What follows a text depends on all of it and is never an end."""

    def __init__(self, *, kv_blocks: int) -> None:
        super().__init__(self.choose, kv_blocks=kv_blocks)
        self.facts = structs.replace(self.facts, kv_token_bytes=4)
        self.memory = np.zeros((kv_blocks, 64), np.int32)

    def choose(self, row: Row) -> TokenChoice | Exception:
        sequence = row.sequence
        held = self.memory[sequence.blocks].reshape(-1)[: row.context]
        if sequence.job.job_id and held.tolist() != sequence.tokens:
            return RuntimeError("its blocks are not its own")
        return TokenChoice(follows(sequence.tokens), -0.5)

    @override
    def read_block(self, block: int) -> memoryview:
        return self.memory[block].copy().data.cast("B")

    @override
    def write_block(self, block: int, data: memoryview) -> None:
        self.memory[block] = np.frombuffer(data, np.int32)

    @override
    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.memory[target] = self.memory[source]

    @override
    def run(self, rows: SequenceOf[Row]) -> StepResult:
        for row in rows:
            for at, token in zip(range(row.start, row.context), row.tokens, strict=True):
                self.memory[row.sequence.blocks[at // 64], at % 64] = token
        return super().run(rows)


def follows(tokens: SequenceOf[int]) -> int:
    return 5 + (sum(tokens) + len(tokens)) % 200


def sequence(
    words: Tokenizer,
    prompt: SequenceOf[int],
    *,
    number: int = 1,
    max_tokens: int = 4,
    priority: int = 0,
    sampling: Sampling | None = None,
    seed: int = 0,
    root: bytes | None = None,
    tenant: str | None = None,
) -> Sequence:
    """A job with one choice, as the engine would make it."""
    request = JobRequest(
        prompts=(tuple(prompt),),
        max_tokens=(max_tokens,),
        priority=priority,
        sampling=sampling or Sampling(),
        cache_salt=tenant,
    )
    job = Job(number, request, 0)
    choice = Sequence(
        job, 0, prompt, arrival=number, max_tokens=max_tokens, seed=seed,
        decoder=words.decoder(), stops=StopMatcher(()), root=root,
    )  # fmt: skip
    job.sequences.append(choice)
    return choice
