"""From two readings of an engine's step clock to the hours between them. Pure, in integers.

The engine's own clock is the truth about how much time there was: a life starts when its clock
stood at zero, and every later instant is that start plus the wall time that the clock shows. So the
hours of a life add up to its wall time exactly, whatever the clocks of gateways do, and a heartbeat
that is lost or late costs nothing but freshness.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal

from msgspec import Struct, structs

from telemetry.money import split

HOUR = timedelta(hours=1)
_US = timedelta(microseconds=1)


class StepTimes(Struct, frozen=True, kw_only=True):
    """An engine's wall time by what it was doing, integer microseconds. Loading and warm-up are
    over before the first request, and together they tell one life of an engine from another."""

    load_us: int = 0
    warmup_us: int = 0
    step_us: int = 0  # all steps: prefill, decode and mixed
    idle_us: int = 0

    @property
    def wall_us(self) -> int:
        return self.load_us + self.warmup_us + self.step_us + self.idle_us

    def minus(self, other: "StepTimes") -> "StepTimes":
        mine, theirs = structs.astuple(self), structs.astuple(other)
        return StepTimes(
            **{name: a - b for name, a, b in zip(self.__struct_fields__, mine, theirs, strict=True)}
        )

    def continues(self, earlier: "StepTimes") -> bool:
        """Whether both can be readings of one life."""
        return (self.load_us, self.warmup_us) == (earlier.load_us, earlier.warmup_us) and (
            self.step_us >= earlier.step_us and self.idle_us >= earlier.idle_us
        )


class Heartbeat(Struct, frozen=True, kw_only=True):
    """What one engine's clock showed at `at`, and what its hardware costs now."""

    backend: str
    at: datetime
    times: StepTimes
    rate_per_hour: Decimal  # US dollars for one device
    devices: int


class LeaseHour(Struct, frozen=True, kw_only=True):
    """The part of one life of an engine in one hour, at one rate."""

    backend: str
    hour: datetime
    lease_id: str
    rate_per_hour: Decimal
    devices: int
    times: StepTimes


def cut(start: datetime, times: StepTimes) -> Iterator[tuple[datetime, StepTimes]]:
    """Spread the time from `start` on over the hours that it lies in. Each hour gets its wall time
    exactly, of each phase in proportion; over all hours each phase sums to what it was."""
    rest = times
    at = start
    while rest.wall_us:
        hour = at.replace(minute=0, second=0, microsecond=0)
        room_us = (hour + HOUR - at) // _US
        if rest.wall_us <= room_us:
            yield hour, rest
            return
        parts = split(room_us, structs.astuple(rest))
        here = StepTimes(**dict(zip(StepTimes.__struct_fields__, parts, strict=True)))
        yield hour, here
        rest = rest.minus(here)
        at = hour + HOUR
