"""From a row of logits to a token. One row never sees another: a request's choices do not depend
on what else is in the batch.

Order: repetition, presence and frequency penalty, logit_bias; log-probabilities are reported from
here; then a guide's mask, temperature, top_k, top_p, min_p, and the draw. Greedy takes the lowest
id among equals.
The n-th draw of a sequence uses the n-th number of a counter-based generator, so a seed gives the
same text whatever was drawn for others in between.
"""

import math
from collections.abc import Sequence as SequenceOf

import torch

from backends.engine.guided import Guide, GuideFailed
from backends.engine.seeds import uniform
from backends.engine.types import Sampling, Sequence, TokenChoice, TokenLogprob


class LogitsInvalid(ArithmeticError):
    """NaN or infinite logits: this request fails, loudly, instead of answering nonsense."""


def sample(logits: torch.Tensor, sequence: Sequence) -> TokenChoice:
    """Choose one token. `logits` (vocab,) fp32 is not changed."""
    sampling = sequence.job.request.sampling
    if not sampling.is_plain:
        logits = _adjusted(logits, sequence, sampling)
    if not math.isfinite(float(logits.max())):
        raise LogitsInvalid("the model produced numbers that are not finite")
    open_to = logits if sequence.guide is None else _guided(logits, sequence.guide)
    if sampling.is_greedy:
        token = int(torch.argmax(open_to))
    else:
        draw = uniform(sequence.seed, sequence.draws)
        sequence.draws += 1
        token = _draw(probabilities(open_to, sampling), draw)
    if sampling.logprobs is None:
        return TokenChoice(token)
    return _with_logprobs(token, logits, sampling.logprobs)


def score(logits: torch.Tensor, tokens: SequenceOf[int], count: int) -> list[TokenChoice]:
    """How likely each token was: the i-th of `logits` (n, vocab) is what stood before the i-th."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise LogitsInvalid("the model produced numbers that are not finite")
    return [_with_logprobs(token, row, count) for row, token in zip(logits, tokens, strict=True)]


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(vocab,) fp64: what is drawn from, not normalised after filtering."""
    p = torch.softmax(logits.double() / max(sampling.temperature, 1e-6), dim=-1)
    if sampling.top_k and sampling.top_k < p.numel():
        p = _keep_best(p, sampling.top_k)
    if sampling.top_p < 1.0:
        p = _keep_best(p, _nucleus(p, sampling.top_p * float(p.sum())))
    if sampling.min_p > 0.0:
        p = torch.where(p >= sampling.min_p * p.max(), p, 0.0)
    return p


def _guided(logits: torch.Tensor, guide: Guide) -> torch.Tensor:
    allowed = torch.frombuffer(bytearray(guide.allowed()), dtype=torch.uint8)  # (vocab,)
    masked = torch.full_like(logits, -math.inf)
    ids = torch.nonzero(allowed[: logits.numel()])[:, 0]
    if not ids.numel():
        raise GuideFailed("no token may follow")
    masked[ids] = logits[ids]
    return masked


def _adjusted(logits: torch.Tensor, sequence: Sequence, sampling: Sampling) -> torch.Tensor:
    logits = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(sequence.seen))
        value = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(value > 0, value / penalty, value * penalty)
    if sequence.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(sequence.counts))
        counts = torch.tensor(list(sequence.counts.values()), dtype=torch.float32)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        ids = torch.tensor([token for token, _ in sampling.logit_bias])
        logits[ids] += torch.tensor([bias for _, bias in sampling.logit_bias])
    return logits


def _nucleus(p: torch.Tensor, mass: float) -> int:
    """How many of the best reach that mass. The first thousand nearly always do; sorting all
    49,152 takes milliseconds."""
    for size in (1024, p.numel()):
        best = torch.topk(p, min(size, p.numel())).values.cumsum(0)
        if size >= p.numel() or float(best[-1]) >= mass:
            return min(int(torch.searchsorted(best, mass)) + 1, best.numel())
    raise AssertionError("the last size is the whole vocabulary")


def _keep_best(p: torch.Tensor, count: int) -> torch.Tensor:
    """Zero all but the `count` best; among equals the lowest ids stay."""
    threshold = torch.topk(p, count).values[-1]
    kept = p > threshold
    equal = torch.nonzero(p == threshold)[: count - int(kept.sum()), 0]
    kept[equal] = True
    return torch.where(kept, p, 0.0)


def _draw(p: torch.Tensor, u: float) -> int:
    """Inverse of the cumulative distribution, in order of id."""
    cumulative = p.cumsum(0)
    at = torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True)
    token = min(int(at), p.numel() - 1)
    if p[token] == 0.0:  # u was so near 1 that rounding went past the last possible token
        token = int(torch.nonzero(p)[-1, 0])
    return token


def _with_logprobs(token: int, logits: torch.Tensor, count: int) -> TokenChoice:
    logprobs = torch.log_softmax(logits, dim=-1)
    best = torch.topk(logprobs, count)
    return TokenChoice(
        token,
        float(logprobs[token]),
        tuple(
            TokenLogprob(int(token_id), float(value))
            for token_id, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ),
    )
