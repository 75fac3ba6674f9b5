"""Tokens of one attempt, in buckets that never overlap.

Providers report overlapping sets (OpenAI's prompt_tokens include cached_tokens, Anthropic's
input_tokens do not). Most cost bugs of the field are two conventions added together, so every
report is first cut into these twelve disjoint buckets and the sum is checked against the report.

Which convention a report follows is read from its own sums, never from a provider's name. An
explicit 0 is a value; a report without totals is no report (None), and the caller estimates.
"""

from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from telemetry.timings import DeviceTime, Timings


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

Count = int | float | None  # some servers write 12.0; null and absent are the same: not reported

# No context window is near it, and it leaves the sums of the ledger far inside 64 bits.
_ABSURD = 10**12


class Normalised(Struct, frozen=True, kw_only=True):
    """A report, cut. `usage` always sums to the provider's own totals."""

    usage: Usage
    quality: UsageQuality = UsageQuality.EXACT
    timings: Timings | None = None


class PromptDetails(Struct, frozen=True, kw_only=True):
    """`prompt_tokens_details`: subsets of prompt_tokens, which may overlap each other."""

    cached_tokens: Count = None
    cache_write_tokens: Count = None
    audio_tokens: Count = None
    image_tokens: Count = None
    video_tokens: Count = None


class CompletionDetails(Struct, frozen=True, kw_only=True):
    """`completion_tokens_details`. Accepted and rejected prediction tokens are left out on
    purpose: both are inside completion_tokens and billed as output like any other."""

    reasoning_tokens: Count = None
    audio_tokens: Count = None
    image_tokens: Count = None


class OpenAIReport(Struct, frozen=True, kw_only=True):
    """The `usage` object of OpenAI and of the many servers that speak its API."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    total_tokens: Count = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    prompt_cache_hit_tokens: Count = None  # DeepSeek: hit + miss = prompt_tokens
    prompt_cache_miss_tokens: Count = None
    cached_tokens: Count = None  # Moonshot, beside the details or instead of them


class EngineReport(OpenAIReport, frozen=True, kw_only=True):
    """Our engine's `usage`: OpenAI's, and where the time went."""

    meterline: Timings | None = None


class ResponsesInputDetails(Struct, frozen=True, kw_only=True):
    """A subset of input_tokens."""

    cached_tokens: Count = None
    cache_write_tokens: Count = None


class ResponsesOutputDetails(Struct, frozen=True, kw_only=True):
    """A subset of output_tokens."""

    reasoning_tokens: Count = None


class ResponsesReport(Struct, frozen=True, kw_only=True):
    """`usage` of OpenAI's Responses API: the counts of its chat, under other names."""

    input_tokens: Count = None
    output_tokens: Count = None
    total_tokens: Count = None
    input_tokens_details: ResponsesInputDetails | None = None
    output_tokens_details: ResponsesOutputDetails | None = None


class CacheCreation(Struct, frozen=True, kw_only=True):
    """Anthropic's split of cache_creation_input_tokens by lifetime."""

    ephemeral_5m_input_tokens: Count = None
    ephemeral_1h_input_tokens: Count = None


class AnthropicOutputDetails(Struct, frozen=True, kw_only=True):
    """A subset of Anthropic's output_tokens."""

    thinking_tokens: Count = None


class AnthropicReport(Struct, frozen=True, kw_only=True):
    """Anthropic's `usage`: input_tokens exclude what was read from and written to the cache."""

    input_tokens: Count = None
    output_tokens: Count = None
    cache_creation_input_tokens: Count = None
    cache_read_input_tokens: Count = None
    cache_creation: CacheCreation | None = None
    output_tokens_details: AnthropicOutputDetails | None = None


_NULL = Raw(b"null")


class _GroqExtension(Struct, frozen=True):
    usage: Raw = _NULL


class _Carrier(Struct, frozen=True):
    usage: Raw = _NULL
    x_groq: _GroqExtension | None = None


Report = TypeVar("Report", bound=Struct)

_openai = msgspec.json.Decoder(OpenAIReport)
_engine = msgspec.json.Decoder(EngineReport)
_anthropic = msgspec.json.Decoder(AnthropicReport)
_responses = msgspec.json.Decoder(ResponsesReport)
_carrier = msgspec.json.Decoder(_Carrier)


def usage_in(message: bytes) -> Raw | None:
    """The `usage` object of a whole answer or a streamed event, undecoded; also where Groq puts
    it in streams. None if there is none, or if it is null."""
    try:
        carrier = _carrier.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    found = carrier.usage
    if found == _NULL and carrier.x_groq is not None:
        found = carrier.x_groq.usage
    return None if found == _NULL else found


def from_openai(report: OpenAIReport | bytes | Raw) -> Normalised | None:
    """Cut an OpenAI-shaped report. None if it has no totals, or cannot be read."""
    decoded = _read(report, _openai)
    return None if decoded is None else _cut_openai(decoded, None)


def from_engine(report: EngineReport | bytes | Raw) -> Normalised | None:
    """Cut our engine's report, and pass its timings on. Timings that cannot be read, or that are
    negative, are dropped; the token counts stand."""
    decoded = _read(report, _engine)
    if decoded is None:
        return None if isinstance(report, EngineReport) else from_openai(report)
    timings = decoded.meterline
    if timings is not None and _is_nonsense(timings):
        timings = None
    return _cut_openai(decoded, timings)


def from_responses(report: ResponsesReport | bytes | Raw) -> Normalised | None:
    """Cut a report of the Responses API. None if it has no totals, or cannot be read."""
    decoded = _read(report, _responses)
    if decoded is None:
        return None
    inside = decoded.input_tokens_details or ResponsesInputDetails()
    outside = decoded.output_tokens_details or ResponsesOutputDetails()
    return from_openai(
        OpenAIReport(
            prompt_tokens=decoded.input_tokens,
            completion_tokens=decoded.output_tokens,
            total_tokens=decoded.total_tokens,
            prompt_tokens_details=PromptDetails(
                cached_tokens=inside.cached_tokens, cache_write_tokens=inside.cache_write_tokens
            ),
            completion_tokens_details=CompletionDetails(reasoning_tokens=outside.reasoning_tokens),
        )
    )


def from_anthropic(report: AnthropicReport | bytes | Raw) -> Normalised | None:
    """Cut an Anthropic report. None if it has no totals, or cannot be read."""
    decoded = _read(report, _anthropic)
    if decoded is None or decoded.input_tokens is None or decoded.output_tokens is None:
        return None
    split = decoded.cache_creation or CacheCreation()
    details = decoded.output_tokens_details or AnthropicOutputDetails()
    counts = _Counts()
    uncached = counts.of(decoded.input_tokens)
    output = counts.of(decoded.output_tokens)
    read = counts.of(decoded.cache_read_input_tokens)
    short = counts.of(split.ephemeral_5m_input_tokens)
    long = counts.of(split.ephemeral_1h_input_tokens)
    if decoded.cache_creation_input_tokens is not None:
        written = counts.of(decoded.cache_creation_input_tokens)
        if decoded.cache_creation is not None and short + long != written:
            counts.exact = False
        long = min(long, written)
        short = written - long
    reasoning = counts.capped(counts.of(details.thinking_tokens), output)
    if counts.absurd:
        return None
    return Normalised(
        usage=Usage(
            in_uncached_text=uncached,
            in_cached_read=read,
            in_cache_write_5m=short,
            in_cache_write_1h=long,
            out_text=output - reasoning,
            out_reasoning=reasoning,
        ),
        quality=counts.quality,
    )


def latest(previous: Report | None, report: Report | None) -> Report | None:
    """Fold the next report of a stream into what is known. Counts in a stream are cumulative
    (message_delta, continuous usage), and some servers end with zeros: the largest value of each
    field stands, and nothing is ever added up."""
    if previous is None:
        return report
    if report is None:
        return previous
    merged = {}
    for name in type(report).__struct_fields__:
        old, new = getattr(previous, name, None), getattr(report, name)
        if old is None or new is None:
            merged[name] = new if old is None else old
        elif isinstance(new, Struct):
            merged[name] = latest(old, new)
        else:
            merged[name] = max(old, new)
    return type(report)(**merged)


class _Counts:
    """Reads counts and remembers whether any of them had to be mended."""

    __slots__ = ("absurd", "exact")

    def __init__(self) -> None:
        self.exact = True
        self.absurd = False

    def of(self, value: Count) -> int:
        if value is None:
            return 0
        count = int(value)
        if count < 0 or count != value:
            self.exact = False
            count = max(count, 0)
        if count > _ABSURD:
            self.absurd = True
        return count

    def capped(self, part: int, whole: int) -> int:
        if part > whole:
            self.exact = False
            return whole
        return part

    @property
    def quality(self) -> UsageQuality:
        return UsageQuality.EXACT if self.exact else UsageQuality.AMBIGUOUS


def _read(report: Report | bytes | Raw, decoder: "msgspec.json.Decoder[Report]") -> Report | None:
    if not isinstance(report, bytes | Raw):
        return report
    try:
        return decoder.decode(report)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _is_nonsense(timings: Timings) -> bool:
    device = timings.device_us or DeviceTime()
    parts = structs.astuple(device)
    seconds = (timings.queue_s, timings.prefill_s, timings.decode_s, timings.sampling_s)
    return (
        min(parts) < 0
        or max(parts) > _ABSURD
        or any(value is not None and value < 0 for value in seconds)
    )


def _cut_openai(report: OpenAIReport, timings: Timings | None) -> Normalised | None:
    inside = report.prompt_tokens_details or PromptDetails()
    outside = report.completion_tokens_details or CompletionDetails()
    counts = _Counts()
    totals = _totals(report, counts)
    if totals is None:
        return None
    prompt, completion = totals
    cached = counts.of(
        _first(
            inside.cached_tokens,
            report.prompt_cache_hit_tokens,
            report.cached_tokens,
            timings.cached_tokens if timings is not None else None,
        )
    )
    written = counts.of(inside.cache_write_tokens)
    reasoning = counts.of(outside.reasoning_tokens)

    # What the total has beyond prompt + completion says which subset was reported beside them.
    surplus = 0
    if report.total_tokens is not None:
        surplus = counts.of(report.total_tokens) - prompt - completion
    elif reasoning > completion:
        surplus = reasoning
        counts.exact = False
    if surplus < 0:
        counts.exact = False
    elif surplus > 0:
        if surplus == reasoning:  # xAI: reasoning is not in completion_tokens
            completion += surplus
        elif surplus == cached + written:  # the cache is not in prompt_tokens
            prompt += surplus
        elif surplus == reasoning + cached + written:
            completion += reasoning
            prompt += cached + written
        else:  # tokens nobody explains; where seen, hidden thinking billed as output
            counts.exact = False
            completion += surplus
            reasoning += surplus

    cached = counts.capped(cached, prompt)
    written = counts.capped(written, prompt - cached)
    rest = fresh = prompt - cached - written
    audio, image, video = (
        counts.of(inside.audio_tokens),
        counts.of(inside.image_tokens),
        counts.of(inside.video_tokens),
    )
    media = audio + image + video
    if media:
        # Whether the cache covered text or media is not reported, unless only one answer fits.
        if media > prompt or (0 < fresh < prompt and media < prompt):
            counts.exact = False
        audio = min(audio, rest)
        rest -= audio
        image = min(image, rest)
        rest -= image
        video = min(video, rest)
        rest -= video

    reasoning = counts.capped(reasoning, completion)
    text = completion - reasoning
    audio_out = counts.capped(counts.of(outside.audio_tokens), text)
    text -= audio_out
    image_out = counts.capped(counts.of(outside.image_tokens), text)
    text -= image_out
    if counts.absurd:
        return None
    usage = Usage(
        in_uncached_text=rest,
        in_cached_read=cached,
        in_cache_write_5m=written,
        in_audio=audio,
        in_image=image,
        in_video=video,
        out_text=text,
        out_reasoning=reasoning,
        out_audio=audio_out,
        out_image=image_out,
    )
    assert usage.input_tokens == prompt and usage.output_tokens == completion
    return Normalised(usage=usage, quality=counts.quality, timings=timings)


def _totals(report: OpenAIReport, counts: _Counts) -> tuple[int, int] | None:
    """Tokens in and out as reported. One of the two may follow from the total (embeddings report
    no completion_tokens); two unknowns are no report."""
    prompt, completion, total = report.prompt_tokens, report.completion_tokens, report.total_tokens
    hit, miss = report.prompt_cache_hit_tokens, report.prompt_cache_miss_tokens
    if hit is not None and miss is not None:
        if prompt is None:
            prompt = hit + miss
        elif hit + miss != prompt:
            counts.exact = False
    if prompt is None and completion is not None and total is not None and total >= completion:
        prompt = total - completion
    if completion is None and prompt is not None and total is not None and total >= prompt:
        completion = total - prompt
    if prompt is None or completion is None:
        return None
    return counts.of(prompt), counts.of(completion)


def _first(*values: Count) -> Count:
    for value in values:
        if value is not None:
            return value
    return None
