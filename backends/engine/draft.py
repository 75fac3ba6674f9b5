"""A second, smaller model that guesses what the first will say, for all sequences that want
guesses at once.

It runs inside the step, before the first model, and has a pool of its own: what it has computed of
a sequence is a cache that may be dropped at any time and is computed again. It draws as the first
model will, with the same random numbers, so that where both agree on what is likely they agree on
the token. A wrong or missing guess costs time and never changes a text. Its time is modelled like
that of the first and charged to those it worked for (`account.charge`).
"""

import logging
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Protocol

import torch

from backends.engine.account import CostModel, Work, calibrate, shares
from backends.engine.guided import GuideFailed
from backends.engine.kv import BlockPool, blocks_for
from backends.engine.runner import Decoder, sampled
from backends.engine.stops import StopMatcher
from backends.engine.tokenizer import TextDecoder
from backends.engine.types import (
    Guesses,
    Job,
    JobRequest,
    ModelFacts,
    Row,
    Sampling,
    Sequence,
    TokenChoice,
)

log = logging.getLogger(__name__)

CATCH_UP = 256  # tokens of a sequence that it computes in one step before it guesses
_WARMUP_TOKENS = 64


class Words(Protocol):
    """Of a tokenizer: what a sequence needs to exist."""

    def decoder(self) -> TextDecoder: ...


class _Shadow:
    """What the draft model knows of one sequence: a copy that runs ahead of it."""

    __slots__ = ("agreed", "copy", "used")

    def __init__(self, original: Sequence) -> None:
        job = original.job
        self.copy = Sequence(
            job, original.index, original.tokens[: original.n_prompt], arrival=0,
            max_tokens=original.max_tokens, seed=original.seed, decoder=original.decoder,
            stops=StopMatcher(()),
        )  # fmt: skip
        self.agreed = original.n_prompt  # tokens that both have
        self.used = 0

    def follow(self, original: Sequence) -> None:
        """Take back what the original did not say and add what it did."""
        copy = self.copy
        while self.agreed < min(len(copy.tokens), len(original.tokens)) and (
            copy.tokens[self.agreed] == original.tokens[self.agreed]
        ):
            self.agreed += 1
        copy.unsay(len(copy.tokens) - self.agreed)
        copy.n_computed = min(copy.n_computed, self.agreed, len(original.tokens) - 1)
        for token in original.tokens[self.agreed :]:
            copy.append(token)
        self.agreed = len(copy.tokens)
        copy.draws = original.draws


class DraftModel:
    """Used by the engine thread alone."""

    def __init__(self, decoder: Decoder, facts: ModelFacts, words: Words) -> None:
        self.facts = facts
        self._decoder = decoder
        self._pool = BlockPool(facts.kv_blocks)
        self._shadows: dict[int, _Shadow] = {}
        self._calls = 0
        self.costs = self._calibrated(words)

    @torch.inference_mode()
    def draft(self, asked: SequenceOf[tuple[Sequence, int]]) -> list[Guesses]:
        self._calls += 1
        shadows = [self._shadow(sequence, count) for sequence, count in asked]
        told: list[list[int]] = [[] for _ in asked]
        drafting_s = [0.0] * len(asked)
        going = [i for i, shadow in enumerate(shadows) if shadow is not None]
        while going:
            rows = [_next_row(shadow.copy) for i in going if (shadow := shadows[i]) is not None]
            for i, spent_s in zip(going, self._spent_s(rows), strict=True):
                drafting_s[i] += spent_s
            try:
                tokens = self._compute(rows)
            except RuntimeError:  # of torch: the text does not need this model
                log.exception("drafting failed")
                break
            still = []
            for i, row, token in zip(going, rows, tokens, strict=True):
                row.sequence.n_computed = row.context
                if token is None:  # the rest of its text in the next steps, or no number came out
                    continue
                told[i].append(token)
                if len(told[i]) == asked[i][1]:
                    continue
                with suppress(GuideFailed):
                    row.sequence.append(token)
                    if not row.sequence.is_complete:
                        still.append(i)
            going = still
        return [Guesses(tuple(t), s) for t, s in zip(told, drafting_s, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(id(sequence), None)
        if shadow is not None:
            self._pool.release(shadow.copy.blocks)

    @property
    def used_blocks(self) -> int:
        return self._pool.used

    def _shadow(self, sequence: Sequence, count: int) -> _Shadow | None:
        """Up to date and with room for the guesses; None if there is no room."""
        if id(sequence) not in self._shadows:
            self._shadows[id(sequence)] = _Shadow(sequence)
        shadow = self._shadows[id(sequence)]
        shadow.used = self._calls
        shadow.follow(sequence)
        blocks = shadow.copy.blocks
        missing = blocks_for(len(sequence.tokens) + count) - len(blocks)
        if missing <= 0:
            return shadow
        while (more := self._pool.allocate(missing, after=blocks[-1] if blocks else None)) is None:
            idle = [other for other in self._shadows.values() if other.used < self._calls]
            idle = [other for other in idle if other.copy.blocks]
            if not idle:
                return None
            oldest = min(idle, key=lambda other: other.used)
            self._pool.release(oldest.copy.blocks)
            oldest.copy.n_computed = 0
        blocks += more
        return shadow

    def _compute(self, rows: list[Row]) -> list[int | None]:
        """The next token of each row that is due one."""
        logits, known = self._decoder.logits(rows)
        best = [None] * len(logits) if known is None else known
        tokens: list[int | None] = []
        at = 0
        for row in rows:
            if not row.logits_rows:
                tokens.append(None)
                continue
            choice = sampled(logits[at], row, best[at])
            tokens.append(choice.token if isinstance(choice, TokenChoice) else None)
            at += 1
        return tokens

    def _spent_s(self, rows: list[Row]) -> list[float]:
        work = [Work(row.count, row.context, row.logits_rows) for row in rows]
        return [share.model_s + share.sampling_s for share in shares(work, self.costs)]

    def _calibrated(self, words: Words) -> CostModel:
        request = JobRequest(prompts=((0,),), max_tokens=(1,), sampling=Sampling(temperature=0.0))
        sequence = Sequence(
            Job(0, request, 0), 0, [0] * _WARMUP_TOKENS, arrival=0, max_tokens=1, seed=0,
            decoder=words.decoder(), stops=StopMatcher(()),
        )  # fmt: skip
        blocks = self._pool.allocate(1)
        assert blocks is not None, "the pool is new"
        sequence.blocks = blocks
        last, prompt = Row(sequence, _WARMUP_TOKENS - 1, 1), Row(sequence, 0, _WARMUP_TOKENS)
        self._took_s(prompt)
        self._took_s(last)
        many_s = self._took_s(prompt)
        one_s = min(self._took_s(last) for _ in range(3))
        self._pool.release(sequence.blocks)
        return calibrate(
            self.facts, one_token_s=one_s, many_tokens_s=many_s, many=_WARMUP_TOKENS,
            sampling_s=0.0,
        )  # fmt: skip

    @torch.inference_mode()
    def _took_s(self, row: Row) -> float:
        started_ns = time.perf_counter_ns()
        self._compute([row])
        return max(1, time.perf_counter_ns() - started_ns) / 1e9


def _next_row(copy: Sequence) -> Row:
    return Row(copy, copy.n_computed, min(CATCH_UP, copy.n_pending))
