"""The pause before those that failed are asked again."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch import FIRST_PAUSE_S, MAX_PAUSE_S, pause_s


@given(st.integers(0, 30), st.floats(0, 3600), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_never_shorter_than_what_was_asked_for(
    turns: int, wait_s: float, dice: float
) -> None:
    """Jitter adds and never takes away; it adds half at most."""
    least = max(wait_s, min(FIRST_PAUSE_S * 2**turns, MAX_PAUSE_S))
    assert least < pause_s(turns, wait_s, dice) < 1.5 * least + 0.01


def test_pauses_double_and_differ() -> None:
    """So that many who failed at once do not come back at once."""
    assert pause_s(1, 0, 0) > 1.9 * pause_s(0, 0, 0)
    assert pause_s(0, 0, 0.9) > pause_s(0, 0, 0.1)
