"""Time enters through one door, so that tests can hold it still."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: what the calendar says and how much time has passed. Both in nanoseconds."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC. May step when the system clock is set."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that never steps; only differences mean anything."""
        ...


class SystemClock:
    """The machine's own clocks."""

    now_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.perf_counter_ns)
