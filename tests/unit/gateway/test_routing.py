"""The plan: first by weight, then the others in the order of the file."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import Route, Target, plan


def _route(*weights: int) -> Route:
    return Route("m", tuple(Target(f"b{i}", "m", weight) for i, weight in enumerate(weights)))


def test_shares_follow_the_weights() -> None:
    """Dice spread evenly give first places in exact proportion."""
    route = _route(3, 1, 0)
    firsts = Counter(plan(route.targets, i / 400)[0].backend for i in range(400))
    assert firsts == {"b0": 300, "b1": 100}


def test_the_rest_keep_their_order() -> None:
    """Whoever is first, the others follow as written."""
    assert [t.backend for t in plan(_route(1, 1, 1).targets, 0.5)] == ["b1", "b0", "b2"]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.floats(0, 1, exclude_max=True),
)
def test_a_plan_is_a_permutation_that_never_starts_with_weight_zero(
    weights: list[int], dice: float
) -> None:
    """Every target appears once; a fallback-only target is never first."""
    targets = plan(_route(*weights).targets, dice)
    assert sorted(t.backend for t in targets) == sorted(f"b{i}" for i in range(len(weights)))
    assert targets[0].weight > 0
