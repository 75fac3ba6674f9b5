"""A stand-in for the usage normaliser, for tests of what carries usage."""

import msgspec

from telemetry.usage import Usage, UsageQuality


def normalise(usage: bytes, /) -> tuple[Usage, UsageQuality]:
    """Prompt and completion tokens as text, nothing cached; ValueError without them."""
    counts = msgspec.json.decode(usage)
    try:
        return (
            Usage(in_uncached_text=counts["prompt_tokens"], out_text=counts["completion_tokens"]),
            UsageQuality.EXACT,
        )
    except (KeyError, TypeError) as error:
        raise ValueError("no token counts") from error
