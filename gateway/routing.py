"""Decide where a call may go. Pure: the same route, dice and health give the same plan."""

from collections.abc import Callable, Sequence, Set

from msgspec import Struct

from gateway.config import HedgeSettings


class Target(Struct, frozen=True):
    """One place, as the route knows it. `endpoint` and `key` say which server of the backend and
    which of our keys there, where it has several: the route leaves that open, dispatch chooses."""

    backend: str
    model: str
    weight: int
    lacks: frozenset[str] = frozenset()  # what it cannot do
    endpoint: str = ""
    key: str = ""


class Route(Struct, frozen=True):
    """A model that clients can ask for."""

    model: str
    targets: tuple[Target, ...]
    attempts: int | None = None  # None: each target once
    cheaper: str | None = None  # the route that a spent budget goes on with
    hedge: HedgeSettings | None = None  # None: never


def always(_: Target) -> bool:
    return True


def capable(targets: Sequence[Target], needs: Set[str]) -> Sequence[Target]:
    """Those that lack nothing of what a request needs."""
    if not needs:
        return targets
    return tuple(target for target in targets if not needs & target.lacks)


def plan(
    targets: Sequence[Target], dice: float, is_usable: Callable[[Target], bool] = always
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


class Candidate(Struct, frozen=True, gc=False):
    """A server that may be asked now: how much it has to do, and what share of its due it gets
    while it warms up (0, 1]."""

    load: float
    warmth: float = 1.0


def least_loaded(candidates: Sequence[Candidate], dice: float) -> int:
    """The index of the one with the least to do for its warmth; among equals, by the dice, so that
    replicas that know nothing of each other do not all choose the same."""
    scores = [(one.load + 1.0) / one.warmth for one in candidates]
    least = min(scores)
    best = [index for index, score in enumerate(scores) if score <= least]
    return best[min(int(dice * len(best)), len(best) - 1)]
