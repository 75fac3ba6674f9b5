"""Which targets may be asked now: circuits that failures open and a successful probe closes.

There are three, because failures mean different things. `endpoint` is the backend as a whole: no
connection, server errors, timeouts, answers that are none. `credential` is our key there: no model
of that backend will take it. `limit` is one model of it that answered 429, and says itself until
when. The arithmetic is pure; `Health` keeps the circuits of this process and knows nothing of
routes, HTTP or who asks. Invariants: an open circuit lets nothing through before its time; then one
request at a time, until one succeeds.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Final, Literal, get_args

from msgspec import Struct

from backends.base import (
    BackendAuth,
    BackendError,
    BackendRateLimited,
    BackendRefused,
    BackendTooLate,
)
from gateway.config import HealthSettings
from gateway.routing import Target
from telemetry.clock import Clock

Fault = Literal["endpoint", "credential", "limit"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
PROBE_S: Final = 60.0  # a probe that nobody reported on for so long does not hold the next one back
MAX_LIMIT_S: Final = 300.0  # a longer Retry-After is tried again before its end
_MAX_DOUBLINGS: Final = 16


class State(IntEnum):
    """As the metric shows it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


# --- one circuit ------------------------------------------------------------------------------


class Circuit(Struct, frozen=True):
    """What is known of one fault. `trips`: times it opened without a success between."""

    failures: int = 0
    trips: int = 0
    until_ns: int = 0
    probe_until_ns: int = 0


def fault_of(error: BackendError) -> Fault | None:
    """What an error says about its target; None: nothing, it is about the request."""
    match error:
        case BackendRefused() | BackendTooLate():
            return None
        case BackendAuth():
            return "credential"
        case BackendRateLimited():
            return "limit"
        case _:
            return "endpoint"


def state_of(circuit: Circuit, now_ns: int) -> State:
    if circuit.trips == 0:
        return State.CLOSED
    return State.OPEN if now_ns < circuit.until_ns else State.HALF_OPEN


def lets_through(circuit: Circuit, now_ns: int) -> bool:
    """Closed; or half open, and no probe is under way."""
    match state_of(circuit, now_ns):
        case State.CLOSED:
            return True
        case State.HALF_OPEN:
            return now_ns >= circuit.probe_until_ns
        case _:
            return False


def after_failure(
    circuit: Circuit,
    fault: Fault,
    now_ns: int,
    settings: HealthSettings,
    *,
    retry_after_s: float | None = None,
) -> Circuit:
    """The circuit once another request has failed."""
    state = state_of(circuit, now_ns)
    failures = circuit.failures + 1
    if fault == "limit":
        wait_s = settings.limit_s if retry_after_s is None else min(retry_after_s, MAX_LIMIT_S)
        return Circuit(failures, 1, max(circuit.until_ns, now_ns + _ns(wait_s)))
    if state is State.OPEN:
        return circuit  # a request from before it opened: nothing new
    if fault == "credential":
        return Circuit(failures, circuit.trips + 1, now_ns + _ns(settings.credential_s))
    if state is State.CLOSED and failures < settings.failures:
        return Circuit(failures)
    open_s = settings.open_s * 2 ** min(circuit.trips, _MAX_DOUBLINGS)
    return Circuit(failures, circuit.trips + 1, now_ns + _ns(min(open_s, settings.open_max_s)))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# --- all of them ------------------------------------------------------------------------------

_Key = tuple[Fault, str, str]  # fault, backend, model; the model matters for `limit` alone


class Health:
    """The circuits of this process. `on_change` hears of each change of state."""

    def __init__(
        self,
        clock: Clock,
        settings: HealthSettings,
        *,
        on_change: Callable[[str, Fault, State], None] = lambda *_: None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._on_change = on_change
        self._circuits: dict[_Key, Circuit] = {}

    def is_usable(self, target: Target) -> bool:
        """Whether `begin` would let a request through."""
        if not self._circuits:
            return True
        now_ns = self._clock.monotonic_ns()
        return all(lets_through(circuit, now_ns) for _, circuit in self._of(target))

    def begin(self, target: Target) -> bool:
        """Let one request through, or not. True: report `succeeded`, `failed` or `gave_up`."""
        if not self._circuits:
            return True
        if not self.is_usable(target):
            return False
        now_ns = self._clock.monotonic_ns()
        for key, circuit in self._of(target):
            if state_of(circuit, now_ns) is State.HALF_OPEN:
                self._circuits[key] = _probed(circuit, now_ns + _ns(PROBE_S))
                self._on_change(target.backend, key[0], State.HALF_OPEN)
        return True

    def succeeded(self, target: Target) -> None:
        """It generated something. Closes what is half open; an open circuit waits for its probe."""
        if not self._circuits:
            return
        now_ns = self._clock.monotonic_ns()
        for key, circuit in self._of(target):
            state = state_of(circuit, now_ns)
            if state is not State.OPEN:
                del self._circuits[key]
                if state is State.HALF_OPEN:
                    self._on_change(target.backend, key[0], State.CLOSED)

    def failed(self, target: Target, error: BackendError) -> None:
        """It failed. What the request itself is to blame for shows that the backend works."""
        fault = fault_of(error)
        if fault is None:
            self.succeeded(target)
            return
        now_ns = self._clock.monotonic_ns()
        key = _key(fault, target)
        before = self._circuits.get(key, Circuit())
        after = after_failure(
            before, fault, now_ns, self.settings, retry_after_s=error.retry_after_s
        )
        self._circuits[key] = after
        if state_of(before, now_ns) is not State.OPEN and state_of(after, now_ns) is State.OPEN:
            self._on_change(target.backend, fault, State.OPEN)
        self.gave_up(target)

    def gave_up(self, target: Target) -> None:
        """It was not waited for: nothing is known, and the next request may probe."""
        for key, circuit in self._of(target):
            if circuit.probe_until_ns:
                self._circuits[key] = _probed(circuit, 0)

    def blocked(self, target: Target) -> tuple[Fault, float] | None:
        """The fault that keeps a target out the longest, and for how many seconds still."""
        now_ns = self._clock.monotonic_ns()
        closed = [
            ((max(circuit.until_ns, circuit.probe_until_ns) - now_ns) / 1e9, key[0])
            for key, circuit in self._of(target)
            if not lets_through(circuit, now_ns)
        ]
        if not closed:
            return None
        wait_s, fault = max(closed)
        return fault, wait_s

    def state(self, target: Target, fault: Fault) -> State:
        circuit = self._circuits.get(_key(fault, target))
        return State.CLOSED if circuit is None else state_of(circuit, self._clock.monotonic_ns())

    def forget(self, backend: str) -> None:
        """Its settings changed: what was learned of it may not hold."""
        for key in [key for key in self._circuits if key[1] == backend]:
            del self._circuits[key]
            self._on_change(backend, key[0], State.CLOSED)

    def _of(self, target: Target) -> list[tuple[_Key, Circuit]]:
        keys = (_key(fault, target) for fault in FAULTS)
        return [(key, circuit) for key in keys if (circuit := self._circuits.get(key)) is not None]


def _key(fault: Fault, target: Target) -> _Key:
    return fault, target.backend, target.model if fault == "limit" else ""


def _probed(circuit: Circuit, until_ns: int) -> Circuit:
    return Circuit(circuit.failures, circuit.trips, circuit.until_ns, until_ns)
