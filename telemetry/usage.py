"""Tokens of one attempt, in buckets that never overlap.

Providers report overlapping sets (OpenAI's prompt_tokens include cached_tokens, Anthropic's
input_tokens do not). Most cost bugs of the field are two conventions added together, so every
report is first cut into these twelve disjoint buckets and the sum is checked against the report.
"""

from enum import StrEnum

from msgspec import Struct, structs


class UsageSource(StrEnum):
    """Who counted."""

    REPORTED = "reported"  # the provider's own figures
    ENGINE = "engine"  # our engine's figures
    ESTIMATED = "estimated"  # counted by us from what passed through
    NONE = "none"  # nothing was generated, so there is nothing to count


class UsageQuality(StrEnum):
    """Whether the report could be cut into disjoint buckets without a guess."""

    EXACT = "exact"
    AMBIGUOUS = "ambiguous"


class Usage(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Token counts, all >= 0 and disjoint: their sum is what was read and written."""

    in_uncached_text: int = 0
    in_cached_read: int = 0
    in_cache_write_5m: int = 0
    in_cache_write_1h: int = 0
    in_audio: int = 0
    in_image: int = 0
    in_video: int = 0
    in_document: int = 0
    out_text: int = 0
    out_reasoning: int = 0
    out_audio: int = 0
    out_image: int = 0

    @property
    def input_tokens(self) -> int:
        return (
            self.in_uncached_text
            + self.in_cached_read
            + self.in_cache_write_5m
            + self.in_cache_write_1h
            + self.in_audio
            + self.in_image
            + self.in_video
            + self.in_document
        )

    @property
    def output_tokens(self) -> int:
        return self.out_text + self.out_reasoning + self.out_audio + self.out_image

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{b: getattr(self, b) + getattr(other, b) for b in BUCKETS})


BUCKETS: tuple[str, ...] = tuple(field.name for field in structs.fields(Usage))
