"""The one rule for tokens that nobody reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.ledger.estimate import fill_usage, output_tokens
from telemetry.record import RequestRecord
from telemetry.usage import UsageQuality, UsageSource
from tests.fakes.records import attempt, record

counts = st.integers(0, 10_000)


def _seen(provider: str, chunks: int, size: int, limit: int | None, *, stream: bool = True) -> int:
    tried = attempt(usage=None, provider=provider)
    seen = record(tried, chunks=chunks, content_bytes=size, output_limit=limit, stream=stream)
    return output_tokens(seen, tried)


@pytest.mark.parametrize(
    ("provider", "chunks", "size", "limit", "tokens"),
    [
        pytest.param("openai", 10, 30, None, 10, id="token by token"),
        pytest.param("openai", 1, 400, None, 100, id="bundled"),
        pytest.param("openai", 50, 200, 16, 16, id="the client's limit"),
        pytest.param("openai", 9, 3, None, 3, id="not more than bytes"),
        pytest.param("openai", 0, 0, None, 0, id="nothing read"),
        pytest.param("scripted", 9, 400, None, 9, id="one token a chunk, exactly"),
        pytest.param("meterline.engine", 9, 3, None, 9, id="our engine, several tokens a byte"),
        pytest.param("meterline.engine", 9, 400, 5, 5, id="our engine within the limit"),
    ],
)
def test_output_is_counted_by_chunks_and_bytes(
    provider: str, chunks: int, size: int, limit: int | None, tokens: int
) -> None:
    """Exact where one chunk is one token, else the larger of chunks and bytes / 4, bounded."""
    assert _seen(provider, chunks, size, limit) == tokens


def test_a_whole_answer_is_counted_by_its_bytes() -> None:
    """Without a stream there is one chunk, whoever sent it."""
    assert _seen("meterline.engine", 1, 401, None, stream=False) == 101


@given(counts, counts, st.none() | counts)
def test_an_estimate_is_bounded(chunks: int, size: int, limit: int | None) -> None:
    """Never more tokens than bytes, never more than the client allowed, never negative."""
    tokens = _seen("openai", chunks, size, limit)
    assert 0 <= tokens <= size
    assert limit is None or tokens <= limit


def test_reported_usage_is_never_replaced() -> None:
    """Also an explicit zero stands; only missing usage is filled in, and marked."""
    reported: RequestRecord = record(attempt())
    before = reported.attempts[0].usage
    fill_usage(reported)
    assert reported.attempts[0].usage is before
    missing = record(attempt(usage=None), chunks=3, content_bytes=12, input_estimate=7)
    fill_usage(missing)
    (filled,) = missing.attempts
    assert filled.usage is not None
    assert (filled.usage.in_uncached_text, filled.usage.out_text) == (7, 3)
    assert filled.usage_source is UsageSource.ESTIMATED
    assert filled.usage_quality is UsageQuality.AMBIGUOUS
