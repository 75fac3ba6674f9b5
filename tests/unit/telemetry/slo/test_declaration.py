"""Declarations: what is accepted, and how each mistake is named."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.slo import burn
from telemetry.slo.declaration import Matcher, Selector, SloInvalid, parse, selector

STOCK = Path(__file__).parents[4] / "deploy" / "slo.yaml"

GOOD = """
version: meterline/slo/v1
slos:
- name: chat
  sli:
    availability:
      metric: meterline_requests_total
      match: {route: chat}
      bad: {outcome: [timeout]}
  objective: "99.5"
"""


def problems(text: str) -> str:
    """What is wrong with a declaration, as one text."""
    with pytest.raises(SloInvalid) as refused:
        parse(text)
    return "\n".join(refused.value.problems)


def changed(old: str, new: str) -> str:
    """The good declaration with one thing replaced."""
    assert old in GOOD
    return GOOD.replace(old, new)


def test_the_stock_declaration_is_right() -> None:
    """What we ship compiles."""
    assert {slo.name for slo in parse(STOCK.read_text()).slos} >= {"chat-availability"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("meterline_requests_total", "meterline_request_total", "nothing emits"),
        ("meterline_requests_total", "meterline_overhead_seconds", "this needs a counter"),
        ("{route: chat}", "{rout: chat}", "has no such label; it has route"),
        ("{route: chat}", "{route: chats}", "'chats' cannot occur; the values are chat"),
        ("[timeout]", "[]", "the list is empty"),
        ("bad: {outcome: [timeout]}", "bad: {}", "name the label values that are bad"),
        ('"99.5"', '"100"', "not a percentage"),
        ('"99.5"', '"abc"', "not a percentage"),
        ('"99.5"', "99.5", "Expected `str`"),
        ('"99.5"', '"90"', "can never fire"),
        ('"99.5"', '"99.5"\n  window: 1d', "not a period from 7d"),
        ('"99.5"', '"99.5"\n  group_by: [tenant]', "no label 'tenant'"),
        ('"99.5"', '"99.5"\n  low_traffic: {min_bad: 0}', "1 or more"),
        (
            '"99.5"',
            '"99.5"\n  low_traffic: {min_bad: 9, expected_events_per_hour: "4"}',
            "can never hold 9 bad ones",
        ),
        ("name: chat", "name: Chat!", "small letters"),
        ("slo/v1", "slo/v2", "write meterline/slo/v1"),
        ("slos:", "scrape_interval: 2m\nslos:", "scrape at least each 75s"),
        ("slos:", "extra: 1\nslos:", "unknown field `extra`"),
    ],
)
def test_a_mistake_is_named_with_its_field(old: str, new: str, said: str) -> None:
    """Each mistake gives one line that says where it is and what would be right."""
    assert said in problems(changed(old, new))


def test_all_mistakes_are_named_at_once() -> None:
    """A second mistake is not hidden by the first."""
    both = changed("{route: chat}", "{route: x}").replace('"99.5"', '"0"')
    found = problems(both)
    assert "slos[0] (chat).sli.availability.match.route" in found
    assert "slos[0] (chat).objective" in found


def test_a_name_may_be_used_once() -> None:
    """Two objectives of one name would record over each other."""
    twice = GOOD + GOOD.partition("slos:\n")[2]
    assert "'chat' is declared twice" in problems(twice)


def test_a_latency_threshold_is_a_bucket_bound() -> None:
    """Between two bounds nobody can count; the nearest ones are offered."""
    text = """
version: meterline/slo/v1
slos:
- name: ttft
  sli: {latency: {metric: meterline_time_to_first_token_seconds, threshold: 1.7s}}
  objective: "95"
"""
    assert "1.7s is no bucket bound" in problems(text)
    assert "take 1.5s or 2s" in problems(text)
    assert parse(text.replace("1.7s", "1500ms")).slos[0].sli.latency is not None


def test_a_percentile_above_the_last_bucket_is_refused() -> None:
    """No percentile is ever above the last bucket: such an alert is dead."""
    text = """
version: meterline/slo/v1
percentiles:
- name: p
  metric: meterline_time_to_first_token_seconds
  quantile: "0.95"
  threshold: 120s
  by: [model]
"""
    assert "no percentile is ever above it" in problems(text)


@pytest.mark.parametrize(
    "text", ["rate(meterline_requests_total[5m])", "a{b=c}", "a{b='c'}", 'a{b="c"', "{}"]
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    """Only plain selectors can be checked against the registry."""
    with pytest.raises(ValueError, match=r"selector|matchers"):
        selector(text)


@given(
    st.lists(
        st.builds(
            Matcher,
            st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
            st.sampled_from(["=", "!=", "=~", "!~"]),
            st.text(max_size=20),
        ),
        max_size=4,
    )
)
def test_a_selector_survives_writing_and_reading(found: list[Matcher]) -> None:
    """Any label value, quotes and line ends included, reads back as it was."""
    wanted = Selector("metric_total", tuple(found))
    assert selector(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("period", "factors"),
    [("30d", ["14.4", "6", "3", "1"]), ("28d", ["13.44", "5.6", "2.8", "0.933333333"])],
)
def test_burn_rate_factors_are_the_workbooks(period: str, factors: list[str]) -> None:
    """14.4, 6, 3 and 1 for 30 days, scaled exactly for other periods."""
    found = burn.windows(burn.seconds(period))
    assert [window.factor for window in found] == [Decimal(factor) for factor in factors]


def test_thresholds_are_exact_decimals() -> None:
    """14.4 times 0.5 % is 0.072, not 0.07200000000000006."""
    fast = burn.windows(30 * burn.DAY)[0]
    assert burn.literal(burn.threshold(fast, Decimal("99.5"))) == "0.072"
