"""Whether this replica should get requests, and if not, what it waits for."""

from collections.abc import Mapping

from msgspec import Struct

from backends.supervisor import Supervised
from gateway.health import Health
from gateway.pipeline import Gateway
from gateway.upstreams import Upstream
from telemetry.ledger.worker import LedgerWorker


class ReadinessState(Struct, frozen=True, kw_only=True):
    """The body of `/readyz`."""

    ready: bool
    draining: bool
    ledger: str  # "ok", or why nothing is admitted
    database: str  # "ok", or "unreachable": known keys go on, admin writes do not
    limits: str  # "ok", or how limits are kept while Redis is away
    backends: dict[str, str]  # name → "ready", or what it is doing


class Readiness:
    """Read on each probe; keeps nothing."""

    def __init__(
        self, *, gateway: Gateway, engines: Mapping[str, Supervised], worker: LedgerWorker
    ) -> None:
        self._gateway = gateway
        self._engines = engines
        self._worker = worker

    def state(self) -> ReadinessState:
        """Ready: not draining, the log takes intents, and every route has a backend that is not
        known to be down. The database may be away: requests of known keys are still served."""
        runtimes = self._gateway.runtimes
        runtime = runtimes.current
        down = {
            name: _phase(engine)
            for name, engine in self._engines.items()
            if not engine.process.is_ready
        }
        for name, upstream in runtime.upstreams.items():
            if name not in down and (why := _out(runtimes.health, name, upstream)) is not None:
                down[name] = why
        routes_up = all(
            any(target.backend not in down for target in route.targets)
            for route in runtime.routes.values()
        )
        trouble = self._gateway.ledger.wal.trouble
        return ReadinessState(
            ready=not self._gateway.draining and trouble is None and routes_up,
            draining=self._gateway.draining,
            ledger=trouble or "ok",
            database="ok" if self._worker.is_database_reachable else "unreachable",
            limits=self._gateway.limits.mode,
            backends={name: down.get(name, "ready") for name in runtime.upstreams},
        )


def _out(health: Health, name: str, upstream: Upstream) -> str | None:
    """Why all of a backend's servers are held back; None: at least one is not."""
    if not upstream.members:
        return "no server found"
    reasons = [health.held(name, member.server.name) for member in upstream.members]
    if not all(reasons):
        return None
    return "drained" if all("drained" in held for held in reasons) else "down"


def _phase(engine: Supervised) -> str:
    state = engine.process.state
    return f"{state.phase}: {state.reason}" if state.reason else state.phase
