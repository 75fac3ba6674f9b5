"""Which targets may be asked now: circuits that failures open and a successful probe closes.

There are three, because failures mean different things. `endpoint` is one server of the backend:
no connection, server errors, timeouts, answers that are none. `credential` is one of our keys: no
model of that backend will take it. `limit` is one model of it that answered 429 to one of our
keys (to one server, where there is no choice of keys), and says itself until when. The arithmetic
is pure; `Health` keeps the circuits of this process and knows nothing of routes, HTTP or who asks.
Invariants: an open circuit lets nothing through before its time; then one request at a time, until
one succeeds.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Final, Literal, Protocol, get_args

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
Hold = Literal["drained", "down"]  # by an operator; by its own word when it is asked
HELD_S: Final = 1.0  # when to ask again for what is held back: nobody knows
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
PROBE_S: Final = 60.0  # a probe that nobody reported on for so long does not hold the next one back
MAX_LIMIT_S: Final = 300.0  # a longer Retry-After is tried again before its end
_MAX_DOUBLINGS: Final = 16
_SAME_NS: Final = 100_000_000  # what two replicas know of one end may differ by so much


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

Key = tuple[Fault, str, str, str]  # fault, backend, which server or key of it, which model


_NO_HOLD: Final[frozenset[Hold]] = frozenset()


class Sharing(Protocol):
    """How replicas tell each other. None of it waits."""

    def changed(self, key: Key) -> None:
        """A circuit opened or closed here."""
        ...

    def may_probe(self, key: Key) -> bool:
        """Whether it is this replica that tries it."""
        ...

    def gave_up(self, key: Key) -> None:
        """The probe came to nothing: another one may try."""
        ...


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
        self._circuits: dict[Key, Circuit] = {}
        self._held: dict[tuple[str, str], set[Hold]] = {}  # by backend and server; "": all of it
        self._heard: set[Key] = set()  # circuits that all replicas know
        self.sharing: Sharing | None = None  # None: this process is alone

    @property
    def is_calm(self) -> bool:
        """Nothing has failed lately and nothing is held back: every target is usable."""
        return not self._circuits and not self._held

    def is_usable(self, target: Target) -> bool:
        """Whether `begin` would let a request through."""
        if self.is_calm:
            return True
        if self._held and self.held(target.backend, target.endpoint):
            return False
        now_ns = self._clock.monotonic_ns()
        return all(self._lets_through(*item, now_ns) for item in self._of(target))

    def _lets_through(self, key: Key, circuit: Circuit, now_ns: int) -> bool:
        """Of all replicas one probes: the one that the others leave it to."""
        if not lets_through(circuit, now_ns):
            return False
        if self.sharing is None or state_of(circuit, now_ns) is State.CLOSED:
            return True
        return self.sharing.may_probe(key)

    def begin(self, target: Target) -> bool:
        """Let one request through, or not. True: report `succeeded`, `failed` or `gave_up`."""
        if self.is_calm:
            return True
        if not self.is_usable(target):
            return False
        now_ns = self._clock.monotonic_ns()
        for key, circuit in self._of(target):
            if state_of(circuit, now_ns) is State.HALF_OPEN:
                self._circuits[key] = _probed(circuit, now_ns + _ns(PROBE_S))
                self._tell(target.backend, key[0], now_ns)
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
                self._share(key)
                if state is State.HALF_OPEN:
                    self._tell(target.backend, key[0], now_ns)

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
        if after.trips:
            self._share(key)
        if state_of(before, now_ns) is not State.OPEN and state_of(after, now_ns) is State.OPEN:
            self._on_change(target.backend, fault, State.OPEN)
        self.gave_up(target)

    def _tell(self, backend: str, fault: Fault, now_ns: int) -> None:
        """Of several servers, keys or models, the worst is told."""
        states = [
            state_of(circuit, now_ns)
            for key, circuit in self._circuits.items()
            if key[:2] == (fault, backend)
        ]
        self._on_change(backend, fault, max(states, default=State.CLOSED))

    def gave_up(self, target: Target) -> None:
        """It was not waited for: nothing is known, and the next request may probe."""
        for key, circuit in self._of(target):
            if circuit.probe_until_ns:
                self._circuits[key] = _probed(circuit, 0)
                if self.sharing is not None:
                    self.sharing.gave_up(key)

    def blocked(self, target: Target) -> tuple[Fault | Hold, float] | None:
        """What keeps a target out the longest, and for how many seconds still."""
        held = self.held(target.backend, target.endpoint)
        if held:
            return min(held), HELD_S
        now_ns = self._clock.monotonic_ns()
        closed = [
            ((max(circuit.until_ns, circuit.probe_until_ns) - now_ns) / 1e9, key[0])
            for key, circuit in self._of(target)
            if not self._lets_through(key, circuit, now_ns)
        ]
        if not closed:
            return None
        wait_s, fault = max(closed)
        return fault, wait_s

    def state(self, target: Target, fault: Fault) -> State:
        circuit = self._circuits.get(_key(fault, target))
        return State.CLOSED if circuit is None else state_of(circuit, self._clock.monotonic_ns())

    def endpoint_state(self, backend: str, endpoint: str) -> State:
        """Of one server, whatever model and key."""
        circuit = self._circuits.get(("endpoint", backend, endpoint, ""))
        return State.CLOSED if circuit is None else state_of(circuit, self._clock.monotonic_ns())

    def forget(self, backend: str) -> None:
        """Its settings changed: what was learned of it may not hold."""
        for key in [key for key in self._circuits if key[1] == backend]:
            del self._circuits[key]
            self._heard.discard(key)
            self._on_change(backend, key[0], State.CLOSED)
        for place in [place for place in self._held if place[0] == backend]:
            self.release(*place, "down")

    # -- what is held back --

    def held(self, backend: str, endpoint: str = "") -> AbstractSet[Hold]:
        """Why a server gets nothing, its own reasons and its backend's."""
        whole = self._held.get((backend, ""), _NO_HOLD)
        return whole | self._held.get((backend, endpoint), _NO_HOLD) if endpoint else whole

    def hold(self, backend: str, endpoint: str, why: Hold) -> None:
        """It gets nothing new until it is released. What runs there goes on."""
        self._held.setdefault((backend, endpoint), set()).add(why)

    def release(self, backend: str, endpoint: str, why: Hold) -> None:
        reasons = self._held.get((backend, endpoint))
        if reasons is not None:
            reasons.discard(why)
            if not reasons:
                del self._held[backend, endpoint]

    def holds(self, why: Hold) -> set[tuple[str, str]]:
        """The backends and servers that are held back for this reason."""
        return {place for place, reasons in self._held.items() if why in reasons}

    # -- what replicas tell each other --

    def tripped(self) -> dict[Key, Circuit]:
        """The circuits that have opened."""
        return {key: circuit for key, circuit in self._circuits.items() if circuit.trips}

    def is_probing(self, circuit: Circuit) -> bool:
        """Whether a request of ours tries it now."""
        return self._clock.monotonic_ns() < circuit.probe_until_ns

    def remaining_s(self, circuit: Circuit) -> float:
        """Seconds until it is half open; 0: it is."""
        return max(0.0, (circuit.until_ns - self._clock.monotonic_ns()) / 1e9)

    def heard(self, circuits: Mapping[Key, tuple[int, float]]) -> None:
        """What all replicas know now: trips, and seconds until half open. One that was known and
        is no more has been closed by a probe somewhere."""
        now_ns = self._clock.monotonic_ns()
        for key in self._heard - circuits.keys():
            if self._circuits.pop(key, None) is not None:
                self._tell(key[1], key[0], now_ns)
        for key, (trips, left_s) in circuits.items():
            known = self._circuits.get(key, Circuit())
            until_ns = now_ns + _ns(left_s)
            is_longer = left_s > 0 and until_ns > known.until_ns + _SAME_NS
            if known.trips < trips or (known.trips == trips and is_longer):
                self._circuits[key] = Circuit(known.failures, trips, until_ns)
                self._tell(key[1], key[0], now_ns)
        self._heard = set(circuits)

    def _share(self, key: Key) -> None:
        if self.sharing is not None:
            self.sharing.changed(key)

    def _of(self, target: Target) -> list[tuple[Key, Circuit]]:
        keys = (_key(fault, target) for fault in FAULTS)
        return [(key, circuit) for key in keys if (circuit := self._circuits.get(key)) is not None]


def _key(fault: Fault, target: Target) -> Key:
    if fault == "endpoint":
        return fault, target.backend, target.endpoint, ""
    if fault == "credential":
        return fault, target.backend, target.key, ""
    return fault, target.backend, target.key or target.endpoint, target.model


def _probed(circuit: Circuit, until_ns: int) -> Circuit:
    return Circuit(circuit.failures, circuit.trips, circuit.until_ns, until_ns)
