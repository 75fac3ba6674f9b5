"""The plan: first by weight, then the others in the order of the file."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import Route, Target, capable, plan


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


def test_what_is_not_usable_gets_no_share_and_is_last() -> None:
    """The weights hold among the others; a fallback serves when all with a weight are out."""
    targets = _route(1, 1, 0).targets
    for dice in (0.0, 0.4, 0.9):
        order = plan(targets, dice, lambda target: target.backend != "b0")
        assert [t.backend for t in order] == ["b1", "b2", "b0"]
    order = plan(targets, 0.5, lambda target: target.backend == "b2")
    assert [t.backend for t in order] == ["b2", "b0", "b1"]


def test_a_target_that_lacks_something_is_left_out() -> None:
    """Only for requests that need it."""
    able, unable = Target("b0", "m", 1), Target("b1", "m", 1, frozenset({"tools", "n"}))
    assert capable((able, unable), frozenset()) == (able, unable)
    assert capable((able, unable), {"logprobs"}) == (able, unable)
    assert capable((able, unable), {"tools", "logprobs"}) == (able,)
    assert capable((unable,), {"n"}) == ()
