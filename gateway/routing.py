"""Decide where a call may go. Pure: the same route, dice and health give the same plan."""

from collections.abc import Callable, Sequence, Set

from msgspec import Struct


class Target(Struct, frozen=True):
    """One place, as the route knows it."""

    backend: str
    model: str
    weight: int
    lacks: frozenset[str] = frozenset()  # what it cannot do


class Route(Struct, frozen=True):
    """A model that clients can ask for."""

    model: str
    targets: tuple[Target, ...]
    attempts: int | None = None  # None: each target once
    cheaper: str | None = None  # the route that a spent budget goes on with


def _always(_: Target) -> bool:
    return True


def capable(targets: Sequence[Target], needs: Set[str]) -> Sequence[Target]:
    """Those that lack nothing of what a request needs."""
    if not needs:
        return targets
    return tuple(target for target in targets if not needs & target.lacks)


def plan(
    targets: Sequence[Target], dice: float, is_usable: Callable[[Target], bool] = _always
) -> Sequence[Target]:
    """The targets in the order of trying: the first by weight, the others as written, and those
    that are not usable now behind all others, for whoever asks why nothing was tried.

    `dice` is uniform in [0, 1). A target of weight 0 is never first while another is usable."""
    if len(targets) == 1:
        return targets
    usable = [target for target in targets if is_usable(target)]
    rest = [target for target in targets if target not in usable]
    total = sum(target.weight for target in usable)
    point = dice * total
    for target in usable:
        point -= target.weight
        if point < 0:
            return (target, *(other for other in usable if other is not target), *rest)
    return (*usable, *rest)
