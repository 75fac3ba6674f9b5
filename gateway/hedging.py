"""When a second backend is asked beside a slow first one, and how much that may cost.

For each route that wants it: the live distribution of times to first content, and a ledger of what
hedges may take. It decides and counts; it sends nothing and knows no backend. Invariants: hedges of
a route never hold more than `share` of the tokens that its streams asked for, both fading alike;
nothing is hedged before enough streams were seen.
"""

import bisect
from collections.abc import Callable
from typing import Final, Literal

from gateway.config import HedgeSettings
from telemetry.clock import Clock

HALF_LIFE_S: Final = 300.0  # what was seen counts half after so long
ENOUGH: Final = 20.0  # streams seen, faded, before their quantile means something
_FASTEST_S: Final = 0.001
_STEP: Final = 1.1  # of the histogram: a quantile is true to within so much
_BOUNDS: Final = tuple(_FASTEST_S * _STEP**place for place in range(145))  # to about 900 s
_RENORMALISED_AT: Final = 1e9

Result = Literal["won", "lost", "failed", "no_budget"]


class FadingHistogram:
    """Quantiles of a stream of durations, in which the old ones fade. Adding is one search; the
    weight of new ones grows instead of all others being shrunk."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._counts = [0.0] * (len(_BOUNDS) + 1)
        self._total = 0.0
        self._since_s: float | None = None

    def _weight(self, now_s: float) -> float:
        if self._since_s is None:
            self._since_s = now_s
        weight: float = 2.0 ** ((now_s - self._since_s) / self._half_life_s)
        if weight > _RENORMALISED_AT:
            self._counts = [count / weight for count in self._counts]
            self._total /= weight
            self._since_s, weight = now_s, 1.0
        return weight

    def add(self, seconds: float, now_s: float) -> None:
        weight = self._weight(now_s)
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += weight
        self._total += weight

    def seen(self, now_s: float) -> float:
        """How many there are, faded."""
        return self._total / self._weight(now_s)

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket in which the quantile lies."""
        wanted = share * self._total
        passed = 0.0
        for bound, count in zip(_BOUNDS, self._counts, strict=False):
            passed += count
            if passed >= wanted:
                return bound
        return _BOUNDS[-1]


class Hedge:
    """One route's. Counters: `results`."""

    def __init__(self, clock: Clock, tell: Callable[[Result], None] = lambda _: None) -> None:
        self.settings = HedgeSettings()
        self._clock = clock
        self._tell = tell
        self._times = FadingHistogram()
        self._all = self._hedged = 0.0  # tokens, faded up to `_at_s`
        self._at_s: float | None = None

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def asked(self, tokens: int) -> None:
        """A stream that may be hedged begins, and takes so many tokens."""
        self._fade()
        self._all += tokens

    def observe(self, seconds: float) -> None:
        """Content came after so long; or was not there yet when nobody waited any longer."""
        self._times.add(seconds, self._now_s())

    def delay_s(self) -> float | None:
        """After how long without content a second one may be asked. None: not enough is known."""
        if self._times.seen(self._now_s()) < ENOUGH:
            return None
        return max(self.settings.least_s, self._times.quantile(self.settings.percentile))

    def may_spend(self, tokens: int) -> bool:
        """Take so many tokens of what hedges may hold, or nothing."""
        self._fade()
        if self._hedged + tokens > self.settings.share * self._all:
            self._tell("no_budget")
            return False
        self._hedged += tokens
        return True

    def ended(self, result: Result) -> None:
        """How a hedge that was sent came out."""
        self._tell(result)

    def _fade(self) -> None:
        now_s = self._now_s()
        if self._at_s is not None:
            left = 2.0 ** ((self._at_s - now_s) / HALF_LIFE_S)
            self._all *= left
            self._hedged *= left
        self._at_s = now_s


class Hedges:
    """Those of all routes, by the model that clients name; they outlive reloads."""

    def __init__(self, clock: Clock, tell: Callable[[Result], None] = lambda _: None) -> None:
        self._clock = clock
        self._tell = tell
        self._routes: dict[str, Hedge] = {}

    def of(self, model: str, settings: HedgeSettings) -> Hedge:
        found = self._routes.get(model)
        if found is None:
            found = self._routes[model] = Hedge(self._clock, self._tell)
        found.settings = settings
        return found
