"""Decide where a call may go. Pure: the same route and the same dice give the same plan."""

from collections.abc import Sequence

from msgspec import Struct


class Target(Struct, frozen=True):
    """One place, as the route knows it."""

    backend: str
    model: str
    weight: int


class Route(Struct, frozen=True):
    """A model that clients can ask for."""

    model: str
    targets: tuple[Target, ...]


def plan(route: Route, dice: float) -> Sequence[Target]:
    """The targets in the order of trying: the first by weight, the others as written.

    `dice` is uniform in [0, 1). A target of weight 0 is never first."""
    targets = route.targets
    if len(targets) == 1:
        return targets
    total = sum(target.weight for target in targets)
    rest = dice * total
    for target in targets:
        rest -= target.weight
        if rest < 0:
            return (target, *(other for other in targets if other is not target))
    return targets
