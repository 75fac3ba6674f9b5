"""The engine's vocabulary: what is asked, what is being computed, what comes out. No torch.

A `Job` is one request; it has one `Sequence` per choice. The engine thread alone changes them.
"""

from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from backends.engine.guided import Guide
from backends.engine.spec import Pace, Proposer
from backends.engine.stops import StopMatcher
from backends.engine.swap import Saved
from backends.engine.tokenizer import TextDecoder
from backends.engine.weights import Pooling


class FinishReason(StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"  # told to stop by whoever pays for it; clients never see it


class Sampling(Struct, frozen=True, kw_only=True):
    """How to choose a token. Validated before it gets here."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0  # output tokens only
    frequency_penalty: float = 0.0  # output tokens only
    repetition_penalty: float = 1.0  # prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k best
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    is_guided: bool = False  # the sequence's guide says which tokens may be drawn

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def takes_best(self) -> bool:
        """Whether the largest logit is all there is to know."""
        return self.is_greedy and self.is_plain and self.logprobs is None

    @property
    def is_plain(self) -> bool:
        """Whether the raw logits decide, with nothing to change in them."""
        return (
            not self.logit_bias
            and not self.is_guided
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
        )


class JobRequest(Struct, frozen=True, kw_only=True):
    """One request, validated. Choice `i` continues `prompts[i // n]`."""

    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    sampling: Sampling = Sampling()
    max_tokens: tuple[int, ...]  # per prompt
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    priority: int = 0  # lower first, as in vLLM
    cache_salt: str | None = None  # whose cached prefixes it may find, and who may find its own
    traceparent: str | None = None
    model: str = ""
    guide: Guide | None = None  # at its start; each choice gets a copy
    pooling: Pooling | None = None  # not to be continued, but to become a vector
    shown: frozenset[int] = frozenset()  # special tokens whose text is part of the answer


class TokenLogprob(Struct, frozen=True, gc=False):
    token: int
    logprob: float


class TokenChoice(Struct, frozen=True, gc=False):
    """One sampled token. `best` are the most likely ones, first the best."""

    token: int
    logprob: float | None = None
    best: tuple[TokenLogprob, ...] = ()


class Away(Struct, frozen=True):
    """A choice was preempted and waited."""

    kind: Literal["preempted", "swapped"]
    start_ns: int
    end_ns: int


class Clocks:
    """Stamps of one job in nanoseconds since the epoch (0: not yet), and what it was charged."""

    __slots__ = (
        "admitted_ns", "arrived_ns", "away", "device_us", "finished_ns", "first_token_ns",
        "kv_block_us", "last_token_ns", "neighbours", "sampling_ns", "seen_step", "steps",
        "swapped_block_us",
    )  # fmt: skip

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.admitted_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.finished_ns = 0
        self.sampling_ns = 0  # wall time of the samplings this job was in
        self.seen_step = -1
        self.steps = 0
        self.neighbours = 0  # rows of those steps, summed: over steps it is the mean batch
        self.device_us: dict[str, int] = {}
        self.kv_block_us = 0  # blocks of the pool times the time they were held
        self.swapped_block_us = 0  # the same of blocks in swap space
        self.away: list[Away] = []


class Job:
    """One request from intake to its terminal event. `sequences` in order of choice index."""

    __slots__ = (
        "accepted", "clocks", "drafted", "job_id", "open_choices", "preemptions", "request",
        "sequences",
    )  # fmt: skip

    def __init__(self, job_id: int, request: JobRequest, arrived_ns: int) -> None:
        self.job_id = job_id
        self.request = request
        self.clocks = Clocks(arrived_ns)
        self.preemptions = 0
        self.drafted = 0  # guessed tokens that were checked, and that came true
        self.accepted = 0
        self.sequences: list[Sequence] = []
        self.open_choices = 0

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, each counted once, however many choices continue it."""
        return sum(sequence.cached_tokens for sequence in self.sequences[:: self.request.n])


class Entries:
    """Log-probabilities wait for their text: a token whose text is held back as a possible stop
    string, or is cut off by one, must not show up here either."""

    __slots__ = ("_fed", "_released", "_waiting")

    def __init__(self) -> None:
        self._fed = 0  # characters
        self._released = 0
        self._waiting: list[tuple[int, TokenChoice]] = []  # with where its text starts

    def add(self, choice: TokenChoice) -> None:
        if choice.logprob is not None:
            self._waiting.append((self._fed, choice))

    def fed(self, characters: int) -> None:
        self._fed += characters

    def released(self, characters: int, *, is_cut: bool, is_last: bool) -> tuple[TokenChoice, ...]:
        """Those whose text has begun to go out; at an uncut end, all."""
        self._released += characters
        ready = [
            choice
            for start, choice in self._waiting
            if start < self._released or (is_last and not is_cut)
        ]
        self._waiting = self._waiting[len(ready) :]
        return tuple(ready)


class Sequence:
    """One choice being generated.

    `tokens[:n_computed]` have their keys and values in `blocks`. `high_water` is the most that
    was ever computed: what is computed again below it, after a preemption, is "recompute".
    `keys` name its full blocks (see `kv`), the first `n_published` of which others can find.
    `leader` is the choice of the same prompt whose blocks this one forks, instead of computing
    the prompt again."""

    __slots__ = (
        "arrival", "blocks", "cached_tokens", "counts", "credit_us", "decoder", "draws",
        "entries", "finish", "guide", "high_water", "index", "is_scored_told", "job", "joined",
        "keys", "leader", "left_as", "left_ns", "max_tokens", "n_computed", "n_prompt",
        "n_published", "pool", "preemptions", "priority", "proposer", "root", "saved", "scores",
        "seed", "seen", "stops", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        index: int,
        prompt: SequenceOf[int],
        *,
        arrival: int,
        max_tokens: int,
        seed: int,
        decoder: TextDecoder,
        stops: StopMatcher,
        root: bytes | None = None,
        leader: "Sequence | None" = None,
        proposer: Proposer | Pace | None = None,
    ) -> None:
        self.job = job
        self.index = index
        self.arrival = arrival
        self.tokens = list(prompt)
        self.n_prompt = len(self.tokens)
        self.n_computed = 0
        self.high_water = 0
        self.blocks: list[int] = []
        self.root = root  # None: finds nothing and is not found
        self.keys: list[bytes] = []
        self.n_published = 0
        self.leader = leader
        self.tenant = job.request.cache_salt or ""
        self.priority = job.request.priority  # lower, once its class has waited too long
        self.joined = 0  # the scheduler's step of its last admission
        self.preemptions = 0
        self.saved: Saved | None = None  # its blocks, while it waits after a preemption
        self.left_ns = 0  # since when it waits after a preemption, and how it left
        self.left_as: Literal["preempted", "swapped"] = "preempted"
        self.credit_us = 0  # of its estimated cost, not yet used up
        self.proposer = proposer
        self.pool: Any = None  # the runner's, while it sums up states
        self.cached_tokens = 0  # of the prompt, found when it was first admitted
        self.max_tokens = max_tokens
        self.seed = seed
        self.draws = 0
        self.counts: dict[int, int] = {}  # of output tokens
        self.seen: set[int] = set(prompt)  # prompt and output tokens
        self.decoder = decoder
        self.stops = stops
        self.entries = Entries()
        is_scored = job.request.sampling.prompt_logprobs is not None
        # Of the prompt's tokens; the first has nothing before it.
        self.scores: list[TokenChoice] | None = [TokenChoice(self.tokens[0])] if is_scored else None
        self.is_scored_told = False
        self.finish: FinishReason | None = None
        guide = job.request.guide
        self.guide = None if guide is None else guide.fork()

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        return self.n_pending == 1 and self.n_output > 0

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        self.seen.add(token)
        if self.guide is not None:
            self.guide.advance(token)

    @property
    def is_complete(self) -> bool:
        """Whether its guide lets nothing follow but an end."""
        return self.guide is not None and self.guide.is_over

    def unsay(self, count: int) -> None:
        """Take the last tokens back, as if they had never been appended: they were a guess."""
        for _ in range(count):
            token = self.tokens.pop()
            self.counts[token] -= 1
            if not self.counts[token]:
                del self.counts[token]
                if token not in self.tokens[: self.n_prompt]:
                    self.seen.discard(token)
        if self.guide is not None:
            self.guide.rollback(count)

    def text_of(self, token: int) -> str:
        """What may be sent now that this token came."""
        return self._matched(self.decoder.feed(token))

    def last_text(self) -> str:
        """What was held back, now that nothing follows."""
        return self._matched(self.decoder.flush()) + self.stops.flush()

    def _matched(self, text: str) -> str:
        self.entries.fed(len(text))
        return self.stops.feed(text)


class Row(Struct, frozen=True):
    """What one sequence computes in one step: `tokens[start : start + count]`. The last ones may
    be `drafts`: guesses at what follows its known tokens, checked in the same step. A second model
    may have worked `drafting_s` on them, as modelled."""

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    drafting_s: float = 0.0

    @property
    def context(self) -> int:
        return self.start + self.count

    @property
    def needs_token(self) -> bool:
        """Whether the last computed token is the last known one, so that the next is sampled."""
        return self.ends_text and self.sequence.job.request.pooling is None

    @property
    def ends_text(self) -> bool:
        return self.context - len(self.drafts) == len(self.sequence.tokens)

    @property
    def tokens(self) -> SequenceOf[int]:
        known = self.sequence.tokens[self.start : self.context]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def is_scored(self) -> bool:
        """Whether each of its tokens says how likely the next one of the prompt was."""
        return self.sequence.scores is not None and self.start < self.sequence.n_prompt

    @property
    def logits_rows(self) -> int:
        """Of the last computed tokens: one more than there are drafts; of a scored prompt, all."""
        if self.is_scored:
            return self.count
        return 1 + len(self.drafts) if self.needs_token else 0

    @property
    def phase(self) -> str:
        if self.start < self.sequence.high_water:
            return "recompute"
        return "decode" if self.start >= self.sequence.n_prompt else "prefill"


class Pooled(Struct, frozen=True):
    """All of a text that was to become a vector is computed."""

    values: list[float]


Outcome = TokenChoice | tuple[TokenChoice, ...] | Pooled | Exception | None


class StepResult(Struct, frozen=True):
    """`choices[i]` belongs to the i-th row: None where no token was due, an exception where this
    row failed alone; for a row with drafts, those that came true and the token after them."""

    choices: list[Outcome]
    sampling_ns: int


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the cost model and the limits need to know of a loaded model. `identity` names all that
    keys and values depend on beside the text: weights, their format, that of the pool."""

    identity: str

    body_params: int
    head_params: int
    weight_bytes: float  # per parameter
    layers: int
    heads: int
    head_dim: int
    vocab: int
    kv_token_bytes: int
    kv_blocks: int
    is_strict: bool = False  # a token's numbers do not depend on how it is computed


class Guesses(Struct, frozen=True):
    """What a second model thinks comes next, and its share of that model's time, as modelled."""

    tokens: tuple[int, ...] = ()
    drafting_s: float = 0.0


class Drafter(Protocol):
    """A second, smaller model. Used by the engine thread alone."""

    def draft(self, asked: SequenceOf[tuple[Sequence, int]]) -> list[Guesses]:
        """For each sequence at most so many tokens that may follow its own."""
        ...

    def guess_s(self, sequences: int) -> float:
        """What one guess for each of so many takes, as modelled."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It is over. Idempotent."""
        ...


class Runner(Protocol):
    """The device side. Used by the engine thread alone."""

    facts: ModelFacts
    drafter: Drafter | None

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy keys and values between blocks of the pool: (from, to)."""
        ...

    def read_block(self, block: int) -> memoryview:
        """A copy of a block's keys and values."""
        ...

    def write_block(self, block: int, data: memoryview) -> None: ...

    def run(self, rows: SequenceOf[Row]) -> StepResult:
        """Compute the rows and sample where due. Raises whatever the device raises."""
        ...

    def close(self) -> None:
        """Give threads and memory back, after the last step."""
        ...


class Delta(Struct, frozen=True, kw_only=True):
    """What one step added to one choice."""

    index: int
    text: str
    choices: tuple[TokenChoice, ...] = ()  # with logprobs asked: the tokens it came from
    prompt: tuple[TokenChoice, ...] = ()  # in a choice's first delta, if that was asked for
    finish: FinishReason | None = None


class Vector(Struct, frozen=True):
    """One text as a vector."""

    index: int
    values: list[float]


class JobUsage(Struct, frozen=True, kw_only=True):
    """The final count of a job, and the timing extension."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float
    prefill_s: float
    decode_s: float
    sampling_s: float
    preemptions: int
    kv_block_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    device_us: dict[str, int] = field(default_factory=dict)


class Done(Struct, frozen=True):
    """The terminal event of a job that ended well."""

    usage: JobUsage


class Failed(Struct, frozen=True):
    """The terminal event of a job that did not."""

    message: str


class Cancelled(Struct, frozen=True):
    """The terminal event after a cancel."""


Output = Delta | Vector | Done | Failed | Cancelled
