"""Circuits: what opens them, what lets one request through, what closes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import (
    BackendAuth,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTimeout,
    BackendTooLate,
    BackendTruncated,
    BackendUnavailable,
)
from gateway.config import HealthSettings
from gateway.health import (
    MAX_LIMIT_S,
    PROBE_S,
    Circuit,
    Fault,
    Health,
    State,
    after_failure,
    fault_of,
    lets_through,
    state_of,
)
from gateway.routing import Target
from tests.fakes.clock import FakeClock

S = 1_000_000_000
SETTINGS = HealthSettings(failures=3, open_s=1.0, open_max_s=5.0, credential_s=30.0, limit_s=2.0)
A = Target("a", "m", 1)
OTHER_MODEL = Target("a", "n", 1)
OTHER_BACKEND = Target("b", "m", 1)
DOWN = BackendUnavailable("down", backend="a")


class Watched:
    """A Health, its clock, and what it told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.told: list[tuple[str, Fault, State]] = []
        self.health = Health(
            self.clock, SETTINGS, on_change=lambda *change: self.told.append(change)
        )

    def fail(self, error: BackendError, times: int = 1, target: Target = A) -> None:
        for _ in range(times):
            assert self.health.begin(target)
            self.health.failed(target, error)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (DOWN, "endpoint"),
        (BackendFailed("x", backend="a", status=500), "endpoint"),
        (BackendTimeout("x", backend="a", phase="first_token"), "endpoint"),
        (BackendProtocol("x", backend="a"), "endpoint"),
        (BackendTruncated("x", backend="a"), "endpoint"),
        (BackendAuth("x", backend="a", status=402), "credential"),
        (BackendRateLimited("x", backend="a", status=429), "limit"),
        (BackendRefused("x", backend="a", status=400), None),
        (BackendTooLate("x", backend="a", status=429), None),
    ],
)
def test_what_an_error_says_about_its_target(error: BackendError, fault: Fault | None) -> None:
    """Each class of error has its circuit; a refusal of the request has none."""
    assert fault_of(error) == fault


def test_failures_in_a_row_open_the_endpoint() -> None:
    """For all models of the backend, and for no other backend."""
    watched = Watched()
    watched.fail(DOWN, 2)
    assert watched.health.is_usable(A)
    watched.fail(DOWN)
    assert not watched.health.begin(A)
    assert not watched.health.is_usable(OTHER_MODEL)
    assert watched.health.is_usable(OTHER_BACKEND)
    assert watched.health.blocked(A) == ("endpoint", 1.0)
    assert watched.told == [("a", "endpoint", State.OPEN)]


def test_a_success_between_starts_the_count_anew() -> None:
    """Only failures in a row count; a refused request is a sign of life."""
    watched = Watched()
    watched.fail(DOWN, 2)
    watched.health.succeeded(A)
    watched.fail(DOWN, 2)
    watched.fail(BackendRefused("bad", backend="a", status=400))
    watched.fail(DOWN, 2)
    assert watched.health.is_usable(A)


def test_one_probe_at_a_time() -> None:
    """After its time one request goes through; its success closes, its failure doubles the time."""
    watched = Watched()
    watched.fail(DOWN, 3)
    watched.clock.advance(1.0)
    assert watched.health.begin(A)
    assert not watched.health.begin(A)
    watched.health.failed(A, DOWN)
    assert watched.health.blocked(A) == ("endpoint", 2.0)
    watched.clock.advance(2.0)
    assert watched.health.begin(A)
    watched.health.succeeded(A)
    assert watched.health.begin(A) and watched.health.begin(A)
    assert [state for _, _, state in watched.told] == [
        *(State.OPEN, State.HALF_OPEN, State.OPEN, State.HALF_OPEN, State.CLOSED)
    ]


def test_the_time_has_an_end() -> None:
    """However often it failed, a backend is tried again."""
    circuit = Circuit()
    now_ns = 0
    for _ in range(50):
        circuit = after_failure(circuit, "endpoint", now_ns, SETTINGS)
        now_ns = max(now_ns, circuit.until_ns)
        assert circuit.until_ns - now_ns <= 5 * S
    assert state_of(circuit, now_ns) is State.HALF_OPEN


def test_a_probe_that_was_given_up_is_nobodys() -> None:
    """A client that leaves, or a defect of ours, does not keep a backend out."""
    watched = Watched()
    watched.fail(DOWN, 3)
    watched.clock.advance(1.0)
    assert watched.health.begin(A)
    watched.health.gave_up(A)
    assert watched.health.begin(A)
    watched.clock.advance(PROBE_S)
    assert watched.health.begin(A)  # nobody reported on it at all


def test_one_refused_credential_is_enough() -> None:
    """The same key will not be taken for another model; a probe finds a mended one."""
    watched = Watched()
    watched.fail(BackendAuth("no", backend="a", status=401))
    assert watched.health.blocked(OTHER_MODEL) == ("credential", 30.0)
    watched.clock.advance(30.0)
    assert watched.health.begin(A)
    watched.health.succeeded(A)
    assert watched.health.is_usable(OTHER_MODEL)


@pytest.mark.parametrize(
    ("retry_after_s", "wait_s"), [(None, 2.0), (7.5, 7.5), (86_400.0, MAX_LIMIT_S)]
)
def test_a_limit_holds_as_long_as_it_says(retry_after_s: float | None, wait_s: float) -> None:
    """For that model alone, within reason."""
    watched = Watched()
    watched.fail(
        BackendRateLimited("slow down", backend="a", status=429, retry_after_s=retry_after_s)
    )
    assert watched.health.blocked(A) == ("limit", wait_s)
    assert watched.health.is_usable(OTHER_MODEL)
    watched.health.succeeded(A)  # a request from before: it says nothing about the limit
    assert not watched.health.is_usable(A)


def test_changed_settings_are_a_new_backend() -> None:
    """A reload that mends it does not have to wait."""
    watched = Watched()
    watched.fail(DOWN, 3)
    watched.health.forget("a")
    assert watched.health.is_usable(A)
    assert watched.told[-1] == ("a", "endpoint", State.CLOSED)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "succeed", "fail", "limit", "auth", "give up", "wait"]),
            st.floats(0, 40),
        ),
        max_size=60,
    )
)
def test_at_most_one_probe_and_never_before_its_time(steps: list[tuple[str, float]]) -> None:
    """Whatever happens in whatever order, an open circuit lets nothing through, a half open one
    a single request, and enough time always brings the next try."""
    watched = Watched()
    health = watched.health
    running = probes = 0
    for action, seconds in steps:
        if action == "begin":
            circuits = list(health._circuits.values())
            now_ns = watched.clock.monotonic_ns()
            states = [state_of(circuit, now_ns) for circuit in circuits]
            through = health.begin(A)
            assert through == all(lets_through(circuit, now_ns) for circuit in circuits)
            assert not (through and State.OPEN in states)
            running += through
            probes += through and State.HALF_OPEN in states
        elif action == "wait":
            watched.clock.advance(seconds)
        elif running:
            running -= 1
            if action == "succeed":
                health.succeeded(A)
            elif action == "give up":
                health.gave_up(A)
            elif action == "fail":
                health.failed(A, DOWN)
            elif action == "auth":
                health.failed(A, BackendAuth("no", backend="a", status=401))
            else:
                health.failed(A, BackendRateLimited("no", backend="a", retry_after_s=seconds))
    watched.clock.advance(MAX_LIMIT_S + PROBE_S)
    assert health.begin(A)
