"""A device side without torch, and jobs for tests of the engine's bookkeeping."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from backends.engine.stops import StopMatcher
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import (
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
        self.steps: list[list[tuple[int, int, int]]] = []
        self.copies: list[tuple[int, int]] = []
        self.blocks: dict[int, bytes] = {}
        self._choose = choose

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        self.copies += pairs

    def read_block(self, block: int) -> memoryview:
        return memoryview(self.blocks.get(block, bytes(64)))

    def write_block(self, block: int, data: memoryview) -> None:
        self.blocks[block] = bytes(data)

    def run(self, rows: SequenceOf[Row]) -> StepResult:
        self.steps.append([(row.sequence.job.job_id, row.start, row.count) for row in rows])
        return StepResult([self._choose(row) if row.needs_token else None for row in rows], 1_000)


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
