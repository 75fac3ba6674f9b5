"""What is drawn has the distribution that was asked for, and depends on nothing else."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.sampler import LogitsInvalid, probabilities, sample
from backends.engine.seeds import lane_seed, uniform
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Sampling
from tests.fakes.engine import sequence

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -30.0])


def chi_square(counts: Counter[int], expected: torch.Tensor) -> float:
    """Pearson's statistic over the tokens that can occur; tokens that cannot must not."""
    draws = sum(counts.values())
    assert all(expected[token] > 0 for token in counts)
    return math.fsum(
        (counts[token] - draws * p) ** 2 / (draws * p)
        for token, p in enumerate(expected.tolist())
        if draws * p >= 1
    )


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 7),
        (Sampling(temperature=0.5), 7),
        (Sampling(temperature=2.0), 7),
        (Sampling(top_p=0.8), 3),
        (Sampling(top_k=2), 2),
        (Sampling(min_p=0.2), 3),
        (Sampling(temperature=1.5, top_k=4, top_p=0.9, min_p=0.05), 4),
    ],
    ids=["plain", "cold", "hot", "top-p", "top-k", "min-p", "all"],
)
def test_draws_follow_the_distribution(words: Tokenizer, sampling: Sampling, kept: int) -> None:
    """6,000 draws against a softmax computed here by hand: chi-square below the 0.1 % limit."""
    weights = [math.exp(float(x) / sampling.temperature) for x in LOGITS]
    expected = torch.tensor(weights[:kept] + [0.0] * (len(weights) - kept), dtype=torch.float64)
    expected /= expected.sum()
    choice = sequence(words, [5], sampling=sampling, seed=lane_seed(7, 0))
    counts = Counter(sample(LOGITS, choice).token for _ in range(6_000))
    assert chi_square(counts, expected) < 22.5  # 6 degrees of freedom


def test_a_seed_gives_the_same_draws_whatever_happens_between(words: Tokenizer) -> None:
    """Draws of others in between change nothing; another choice of the request draws others."""

    def draws(seed: int, *, noise: bool) -> list[int]:
        mine = sequence(words, [5], seed=seed)
        other = sequence(words, [5], seed=99)
        result = []
        for _ in range(40):
            if noise:
                sample(LOGITS, other)
            result.append(sample(LOGITS, mine).token)
        return result

    assert draws(lane_seed(1, 0), noise=False) == draws(lane_seed(1, 0), noise=True)
    assert draws(lane_seed(1, 0), noise=False) != draws(lane_seed(1, 1), noise=False)
    assert draws(lane_seed(1, 0), noise=False) != draws(lane_seed(2, 0), noise=False)


@given(seed=st.integers(-(2**63), 2**64), draw=st.integers(0, 10**6))
def test_uniform_is_in_range(seed: int, draw: int) -> None:
    """Every number lies in [0, 1)."""
    assert 0.0 <= uniform(lane_seed(seed, 0), draw) < 1.0


def test_greedy_takes_the_lowest_id_among_equals(words: Tokenizer) -> None:
    """Ties are broken by id, always the same way."""
    choice = sequence(words, [5], sampling=Sampling(temperature=0.0))
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), choice).token == 1


def test_filters_keep_the_lowest_ids_among_equals() -> None:
    """top_k and top_p over equal probabilities keep exactly as many as they say."""
    flat = torch.zeros(10)
    assert torch.nonzero(probabilities(flat, Sampling(top_k=3)))[:, 0].tolist() == [0, 1, 2]
    assert torch.nonzero(probabilities(flat, Sampling(top_p=0.35)))[:, 0].tolist() == [0, 1, 2, 3]
    assert torch.nonzero(probabilities(LOGITS, Sampling(top_p=0.0)))[:, 0].tolist() == [0]


def test_a_large_nucleus_is_exact() -> None:
    """Beyond the thousand best the nucleus is still the smallest set that reaches top_p."""
    logits = torch.randn(5_000, generator=torch.Generator().manual_seed(1)) * 0.1
    p = torch.softmax(logits.double(), -1)
    kept = probabilities(logits, Sampling(top_p=0.9))
    assert float(kept.sum()) >= 0.9
    assert float(kept.sum()) - float(kept[kept > 0].min()) < 0.9
    assert float(kept[kept > 0].min()) >= float(p[kept == 0].max())


def test_penalties_count_what_they_should(words: Tokenizer) -> None:
    """Presence and frequency look at the output only, repetition at the prompt too."""
    logits = torch.tensor([1.0, 0.9, 0.8, 0.1])
    repeated = sequence(words, [0], sampling=Sampling(temperature=0.0, repetition_penalty=2.0))
    assert sample(logits, repeated).token == 1
    present = sequence(words, [0], sampling=Sampling(temperature=0.0, presence_penalty=0.3))
    assert sample(logits, present).token == 0
    present.append(0)
    assert sample(logits, present).token == 1
    frequent = sequence(words, [3], sampling=Sampling(temperature=0.0, frequency_penalty=0.06))
    for token, following in [(0, 0), (0, 1), (1, 0)]:
        frequent.append(token)
        assert sample(logits, frequent).token == following
    assert logits.tolist() == torch.tensor([1.0, 0.9, 0.8, 0.1]).tolist()


def test_logit_bias_bans_and_forces(words: Tokenizer) -> None:
    """A bias of −100 bans a token, +100 forces one."""
    banned = sequence(words, [5], sampling=Sampling(temperature=0.0, logit_bias=((0, -100.0),)))
    assert sample(LOGITS, banned).token == 1
    forced = sequence(words, [5], sampling=Sampling(logit_bias=((6, 100.0),)))
    assert {sample(LOGITS, forced).token for _ in range(50)} == {6}


def test_logprobs_are_of_the_distribution_before_temperature(words: Tokenizer) -> None:
    """The chosen token's and the best ones' log-probabilities, best first."""
    choice = sequence(words, [5], sampling=Sampling(temperature=0.0, logprobs=2))
    picked = sample(LOGITS, choice)
    expected = torch.log_softmax(LOGITS, -1)
    assert picked.logprob == pytest.approx(float(expected[0]))
    assert [best.token for best in picked.best] == [0, 1]
    assert [best.logprob for best in picked.best] == pytest.approx(expected[:2].tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_fail_loudly(words: Tokenizer, bad: float) -> None:
    """NaN or infinity is an error of this row, never a token."""
    with pytest.raises(LogitsInvalid):
        sample(torch.tensor([0.0, bad]), sequence(words, [5]))
