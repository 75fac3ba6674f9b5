"""A stand-in for the usage normaliser, for tests of what carries usage."""

import msgspec
from msgspec import Struct

from telemetry.record import Timings
from telemetry.usage import Usage, UsageQuality


class FakeCut(Struct, frozen=True):
    """What the real one returns has these fields too."""

    usage: Usage
    quality: UsageQuality = UsageQuality.EXACT
    timings: Timings | None = None


class _Report(Struct):
    prompt_tokens: int
    completion_tokens: int
    meterline: Timings | None = None


def normalise(usage: bytes, /) -> FakeCut | None:
    """Prompt and completion tokens as text, nothing cached; None without them."""
    try:
        report = msgspec.json.decode(usage, type=_Report)
    except msgspec.ValidationError:
        return None
    counts = Usage(in_uncached_text=report.prompt_tokens, out_text=report.completion_tokens)
    return FakeCut(counts, timings=report.meterline)
