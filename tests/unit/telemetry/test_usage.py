"""The normaliser: recorded reports, quirks, and properties that no report may break."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.timings import DeviceTime
from telemetry.usage import (
    AnthropicReport,
    EngineReport,
    Normalised,
    OpenAIReport,
    Usage,
    UsageQuality,
    from_anthropic,
    from_engine,
    from_openai,
    latest,
    usage_in,
)

CORPUS = sorted((Path(__file__).parents[2] / "data" / "usage").glob("*.json"))
TYPES = {"openai": OpenAIReport, "engine": EngineReport, "anthropic": AnthropicReport}
CUT: dict[str, Any] = {"openai": from_openai, "engine": from_engine, "anthropic": from_anthropic}

counts = st.integers(0, 10**7)
maybe = st.none() | counts | st.integers(-5, -1) | counts.map(float)


def normalise(case: dict[str, Any]) -> Normalised | None:
    """Fold the reports of a corpus file as a stream would deliver them, and cut the result."""
    report = None
    for item in case["reports"]:
        if item is not None:
            report = latest(report, msgspec.convert(item, TYPES[case["shape"]]))
    return CUT[case["shape"]](report)  # type: ignore[no-any-return]  # a table of functions


def test_the_corpus_is_there() -> None:
    """At least twelve recorded shapes, each with its source."""
    assert len(CORPUS) >= 12
    assert all(json.loads(path.read_text())["source"].startswith("https://") for path in CORPUS)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_recorded_reports_are_cut_into_the_expected_buckets(path: Path) -> None:
    """Each recorded report gives exactly the buckets and the quality written beside it."""
    case = json.loads(path.read_text())
    found = normalise(case)
    assert found is not None
    assert found.usage == Usage(**case["buckets"])
    assert found.quality == case["quality"]


@pytest.mark.parametrize(
    "report",
    [
        b"null",
        b"{}",
        b'{"prompt_tokens": null, "completion_tokens": null}',
        b'{"completion_tokens": 5}',
        b'{"prompt_tokens": 5}',
        b'{"prompt_tokens": "5", "completion_tokens": 1}',
        b"[1]",
        b"{",
        b'"\xff"',
        b'{"prompt_tokens": 1e300, "completion_tokens": 1}',
    ],
)
def test_a_report_without_readable_totals_is_no_report(report: bytes) -> None:
    """Missing, broken or absurd totals give None, so that the caller estimates; never zeros."""
    assert from_openai(report) is None
    assert from_engine(report) is None
    assert from_anthropic(report) is None


def test_an_explicit_zero_is_a_value() -> None:
    """A provider that says it cached nothing and generated nothing is believed."""
    found = from_openai(b'{"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}')
    assert found == Normalised(usage=Usage(in_uncached_text=7))
    zero = from_openai(b'{"prompt_tokens": 0, "completion_tokens": 0}')
    assert zero == Normalised(usage=Usage())


@pytest.mark.parametrize(
    ("report", "usage"),
    [
        pytest.param(
            {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4},
            Usage(in_uncached_text=6, in_cached_read=4, out_text=2),
            id="cached-at-top-level",
        ),
        pytest.param(
            {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 512,
                "prompt_tokens_details": {"cached_tokens": 500},
            },
            Usage(in_uncached_text=10, in_cached_read=500, out_text=2),
            id="cache-outside-of-prompt",
        ),
        pytest.param(
            {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 615,
                "prompt_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 100},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(
                in_uncached_text=10,
                in_cached_read=500,
                in_cache_write_5m=100,
                out_text=2,
                out_reasoning=3,
            ),
            id="both-outside",
        ),
        pytest.param(
            {
                "prompt_tokens": 100,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 100, "audio_tokens": 60},
            },
            Usage(in_cached_read=100, out_text=2),
            id="all-cached-leaves-no-audio",
        ),
        pytest.param(
            {
                "prompt_tokens": 100,
                "completion_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 30, "audio_tokens": 100},
                "completion_tokens_details": {"image_tokens": 9},
            },
            Usage(in_cached_read=30, in_audio=70, out_image=9),
            id="all-audio-so-the-cache-is-audio",
        ),
    ],
)
def test_the_sums_tell_the_convention(report: dict[str, Any], usage: Usage) -> None:
    """Where only one reading fits the totals, it is taken and the report is exact."""
    assert from_openai(json.dumps(report).encode()) == Normalised(usage=usage)


@pytest.mark.parametrize(
    "report",
    [
        {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 12},
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 11},
        },
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "completion_tokens_details": {"audio_tokens": 6},
        },
        {"prompt_tokens": 10.5, "completion_tokens": 5},
        {"prompt_tokens": -1, "completion_tokens": 5},
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "prompt_cache_hit_tokens": 5,
            "prompt_cache_miss_tokens": 6,
        },
    ],
)
def test_a_contradictory_report_is_ambiguous_and_keeps_its_totals(report: dict[str, Any]) -> None:
    """Parts that do not add up are capped; the provider's totals stand."""
    found = from_openai(json.dumps(report).encode())
    assert found is not None
    assert found.quality is UsageQuality.AMBIGUOUS
    assert found.usage.input_tokens == max(int(report["prompt_tokens"]), 0)
    assert found.usage.output_tokens == 5


def test_anthropic_split_that_disagrees_keeps_the_total() -> None:
    """A split that exceeds its own total is ambiguous, and the total wins."""
    found = from_anthropic(
        b'{"input_tokens": 2048, "cache_read_input_tokens": 1800, "output_tokens": 503,'
        b'"cache_creation_input_tokens": 248, "cache_creation":'
        b'{"ephemeral_5m_input_tokens": 456, "ephemeral_1h_input_tokens": 100}}'
    )
    assert found is not None
    assert found.quality is UsageQuality.AMBIGUOUS
    assert found.usage.input_tokens == 2048 + 1800 + 248
    assert (found.usage.in_cache_write_5m, found.usage.in_cache_write_1h) == (148, 100)


def test_anthropic_thinking_is_inside_output() -> None:
    """Thinking tokens are a part of output_tokens, never added to them."""
    found = from_anthropic(
        b'{"input_tokens": 1, "output_tokens": 50, "output_tokens_details":{"thinking_tokens":40}}'
    )
    assert found == Normalised(usage=Usage(in_uncached_text=1, out_text=10, out_reasoning=40))


def test_engine_timings_are_passed_on() -> None:
    """Phases in seconds and device microseconds arrive as the engine sent them."""
    case = json.loads(next(p for p in CORPUS if p.stem == "meterline_engine").read_text())
    found = normalise(case)
    assert found is not None and found.timings is not None
    assert found.timings.device_us == DeviceTime(prefill=12000, decode=240000, sampling=4000)
    assert (found.timings.queue_s, found.timings.preemptions) == (0.001, 0)


@pytest.mark.parametrize(
    "timings", ['{"device_us": {"decode": -5}}', '{"queue_s": -1}', '{"queue_s": "soon"}', "7"]
)
def test_nonsense_timings_are_dropped_and_the_tokens_stand(timings: str) -> None:
    """Negative or unreadable times must not become negative cost."""
    found = from_engine(
        f'{{"prompt_tokens": 3, "completion_tokens": 4, "meterline": {timings}}}'.encode()
    )
    assert found == Normalised(usage=Usage(in_uncached_text=3, out_text=4))


@pytest.mark.parametrize(
    ("event", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}', Usage),
        (b'{"usage":null,"x_groq":{"usage":{"prompt_tokens":1,"completion_tokens":2}}}', Usage),
        (b'{"x_groq":{"id":"r","usage":{"prompt_tokens":1,"completion_tokens":2}}}', Usage),
        (b'{"usage":null}', None),
        (b'{"choices":[]}', None),
        (b"[DONE]", None),
        (b"\xff", None),
    ],
)
def test_usage_is_found_where_servers_put_it(event: bytes, usage: type | None) -> None:
    """In `usage` of any event, in Groq's own place, or nowhere."""
    raw = usage_in(event)
    if usage is None:
        assert raw is None
    else:
        assert raw is not None
        assert from_openai(raw) == Normalised(usage=Usage(in_uncached_text=1, out_text=2))


def test_a_stream_that_ends_with_zeros_keeps_its_count() -> None:
    """The largest value of each field stands, whatever comes last."""
    first = OpenAIReport(prompt_tokens=10, completion_tokens=7, total_tokens=17)
    folded = latest(first, OpenAIReport(prompt_tokens=0, completion_tokens=0, total_tokens=0))
    assert folded == first
    assert latest(None, first) is first
    assert latest(first, None) is first


@given(st.builds(OpenAIReport, prompt_tokens=maybe, completion_tokens=maybe, total_tokens=maybe))
def test_the_same_report_twice_counts_once(report: OpenAIReport) -> None:
    """Folding a report into itself changes nothing: a repeated usage event is never added."""
    assert latest(report, report) == report


@given(
    st.fixed_dictionaries(
        {
            "prompt_tokens": maybe,
            "completion_tokens": maybe,
            "total_tokens": maybe,
            "prompt_cache_hit_tokens": maybe,
            "prompt_cache_miss_tokens": maybe,
            "cached_tokens": maybe,
            "prompt_tokens_details": st.none()
            | st.fixed_dictionaries(
                {
                    "cached_tokens": maybe,
                    "cache_write_tokens": maybe,
                    "audio_tokens": maybe,
                    "image_tokens": maybe,
                }
            ),
            "completion_tokens_details": st.none()
            | st.fixed_dictionaries(
                {"reasoning_tokens": maybe, "audio_tokens": maybe, "image_tokens": maybe}
            ),
        }
    )
)
def test_any_report_is_partitioned(report: dict[str, Any]) -> None:
    """Whatever a server sends: buckets are never negative, and an exact cut that has a total
    sums to it."""
    found = from_openai(json.dumps(report).encode())
    if found is None:
        return
    buckets = msgspec.structs.astuple(found.usage)
    assert min(buckets) >= 0
    assert sum(buckets) == found.usage.total_tokens
    if found.quality is UsageQuality.EXACT and report["total_tokens"] is not None:
        assert found.usage.total_tokens == report["total_tokens"]


@given(
    st.builds(
        Usage,
        in_uncached_text=counts,
        in_cached_read=counts,
        in_cache_write_5m=counts,
        out_text=counts,
        out_reasoning=counts,
        out_audio=counts,
    ),
    st.booleans(),
)
def test_known_buckets_survive_the_round_trip(usage: Usage, is_outside: bool) -> None:
    """Buckets reported in OpenAI's way, or with reasoning outside, come back as they were."""
    hidden = usage.out_reasoning if is_outside else 0
    found = from_openai(
        msgspec.json.encode(
            {
                "prompt_tokens": usage.input_tokens,
                "completion_tokens": usage.output_tokens - hidden,
                "total_tokens": usage.total_tokens,
                "prompt_tokens_details": {
                    "cached_tokens": usage.in_cached_read,
                    "cache_write_tokens": usage.in_cache_write_5m,
                },
                "completion_tokens_details": {
                    "reasoning_tokens": usage.out_reasoning,
                    "audio_tokens": usage.out_audio,
                },
            }
        )
    )
    assert found == Normalised(usage=usage)


@given(
    st.builds(
        Usage,
        in_uncached_text=counts,
        in_cached_read=counts,
        in_cache_write_5m=counts,
        in_cache_write_1h=counts,
        out_text=counts,
    )
)
def test_anthropic_buckets_survive_the_round_trip(usage: Usage) -> None:
    """Buckets reported in Anthropic's way come back as they were."""
    found = from_anthropic(
        msgspec.json.encode(
            {
                "input_tokens": usage.in_uncached_text,
                "cache_read_input_tokens": usage.in_cached_read,
                "cache_creation_input_tokens": usage.in_cache_write_5m + usage.in_cache_write_1h,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": usage.in_cache_write_5m,
                    "ephemeral_1h_input_tokens": usage.in_cache_write_1h,
                },
                "output_tokens": usage.out_text,
            }
        )
    )
    assert found == Normalised(usage=usage)
