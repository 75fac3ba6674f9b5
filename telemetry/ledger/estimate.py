"""Tokens of an attempt whose backend reported none: cut streams, disconnects, crashes. Pure.

The one rule for every exit, so that an abandoned request is estimated like a cancelled one. The
scripted backend and our engine send one token per content chunk, so their streams are counted
exactly. Of others: the larger of one token a chunk (servers that stream token by token) and four
bytes a token (servers that bundle), since under-counting is the costlier mistake; never more than
one token a byte. Never more than the client allowed.
"""

from telemetry.record import Attempt, Outcome, RequestRecord
from telemetry.usage import Usage, UsageQuality, UsageSource

ONE_TOKEN_PER_CHUNK = frozenset({"meterline.engine", "meterline.scripted", "scripted"})
BYTES_PER_TOKEN = 4  # of UTF-8 text; the usual rule of thumb for English with BPE vocabularies


def output_tokens(record: RequestRecord, attempt: Attempt) -> int:
    """Tokens in the content that was read from the attempt's backend."""
    if attempt.provider in ONE_TOKEN_PER_CHUNK and record.stream:
        tokens = record.chunks
    else:
        tokens = max(record.chunks, -(-record.content_bytes // BYTES_PER_TOKEN))
        tokens = min(tokens, record.content_bytes)
    return tokens if record.output_limit is None else min(tokens, record.output_limit)


def fill_usage(record: RequestRecord) -> None:
    """Estimate the served attempt's usage if nobody reported it and content was read."""
    served = record.served
    if served is not None and served.usage is None:
        served.usage = Usage(
            in_uncached_text=record.input_estimate, out_text=output_tokens(record, served)
        )
        served.usage_source = UsageSource.ESTIMATED
        served.usage_quality = UsageQuality.AMBIGUOUS


def end_attempts(record: RequestRecord, *, outcome: Outcome, ended_ns: int) -> None:
    """Close what is still open. Nothing ends before it started."""
    for attempt in record.attempts:
        if attempt.ended_ns is None:
            attempt.ended_ns = max(ended_ns, attempt.started_ns)
        if attempt.outcome is None:
            attempt.outcome = outcome
