"""A clock that stands still until told otherwise."""


class FakeClock:
    """Implements `telemetry.clock.Clock`; `advance` moves both readings."""

    def __init__(self, now_ns: int = 1_800_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._monotonic_ns = 5_000_000_000

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, seconds: float) -> None:
        step = round(seconds * 1_000_000_000)
        self._now_ns += step
        self._monotonic_ns += step
