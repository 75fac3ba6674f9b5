"""What a backend reports of its own time. A leaf: usage reports and records both carry it."""

from msgspec import Struct


class DeviceTime(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The engine's step time charged to one request, integer microseconds by phase."""

    prefill: int = 0
    decode: int = 0
    sampling: int = 0
    recompute: int = 0
    spec_rejected: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.sampling + self.recompute + self.spec_rejected


class Timings(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What a backend reports of its own time: the `meterline` object of the engine's final usage.

    Wall seconds per phase of this request, and the device time it is charged with.
    Absent stays None: it is never guessed for backends that do not report it.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    sampling_s: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    device_us: DeviceTime | None = None
