"""When a hedge is due, and what it may cost: the arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import HedgeSettings
from gateway.hedging import ENOUGH, FadingHistogram, Hedge
from tests.fakes.clock import FakeClock


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 600)), max_size=60))
def test_hedges_keep_within_their_share(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever the order and the pauses, what hedges hold never exceeds the share of all."""
    clock = FakeClock()
    hedge = Hedge(clock)
    hedge.settings = HedgeSettings(share=0.1)
    total = taken = 0.0
    for asks, tokens, pause_s in steps:
        clock.advance(pause_s)
        left = 0.5 ** (pause_s / 300)
        total, taken = total * left, taken * left
        if asks:
            hedge.asked(tokens)
            total += tokens
        elif hedge.may_spend(tokens):
            taken += tokens
        assert taken <= 0.1 * total * (1 + 1e-9)


def test_quantiles_follow_what_is_recent() -> None:
    """True to a tenth, and the past fades: an hour later only the new times count."""
    clock = FakeClock()
    times = FadingHistogram()
    for place in range(1000):
        times.add(0.1 + place / 1000, clock.monotonic_ns() / 1e9)
    assert 0.95 * 1.05 <= times.quantile(0.95) <= 1.05 * 1.11
    later_s = clock.monotonic_ns() / 1e9 + 36_000
    for _ in range(100):
        times.add(5.0, later_s)
    assert 5.0 <= times.quantile(0.05) <= 5.5
    assert times.seen(later_s) == pytest.approx(100, rel=0.01)


def test_nothing_is_hedged_before_enough_is_known() -> None:
    """The quantile of a few streams is noise; and a hedge never comes before its least time."""
    hedge = Hedge(FakeClock())
    for _ in range(int(ENOUGH) - 1):
        hedge.observe(0.001)
    assert hedge.delay_s() is None
    hedge.observe(0.001)
    assert hedge.delay_s() == 0.05
