"""The ledger's background work: ship, sweep, roll up. One task per process, on a schedule.

Each process ships its own log. Folders of processes that are gone are adopted by whoever can lock
them; roll-ups and the sweep of other machines' requests are the leader's. Serving never waits for
any of this: while the database is away the logs grow, and the work goes on when it is back.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from telemetry.clock import Clock
from telemetry.ledger.errors import LedgerError, WalLocked, WalUnavailable, WalUnreadable
from telemetry.ledger.leader import leadership
from telemetry.ledger.record import Ledger, Rate
from telemetry.ledger.rollups import roll_up_dirty
from telemetry.ledger.shipper import Shipper
from telemetry.ledger.sweeper import Sweeper
from telemetry.ledger.wal import WriteAheadLog, folders, node_of

log = logging.getLogger(__name__)

SHIP_EVERY_S = 0.2
LEAD_EVERY_S = 2.0
ADOPT_EVERY_S = 10.0
EXPIRE_GRACE_S = 60.0
FOREIGN_GRACE_S = 24 * 3600.0
_LOG_EVERY_S = 30.0
_LONGEST_PAUSE_S = 5.0


class LedgerWorker:
    """`run()` until cancelled; `flush()` once more before the log is closed.

    Plain counters: `shipper.*`, `sweeper.swept`, `expired`, `adopted` (folders with leftover
    records), `hours_rolled`, `failures`; `is_database_reachable` for the readiness page."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        ledger: Ledger,
        rate: Rate,
        clock: Clock,
        expire_grace_s: float = EXPIRE_GRACE_S,
        foreign_grace_s: float = FOREIGN_GRACE_S,
    ) -> None:
        self.shipper = Shipper(engine, ledger.wal, clock=clock)
        self.sweeper = Sweeper(engine, rate=rate, clock=clock)
        self.expired = 0
        self.adopted = 0
        self.hours_rolled = 0
        self.failures = 0
        self.is_database_reachable = True
        self._engine = engine
        self._ledger = ledger
        self._rate = rate
        self._clock = clock
        self._expire_grace_s = expire_grace_s
        self._foreign_grace_s = foreign_grace_s
        self._dead_swept = False
        self._pass = asyncio.Lock()  # flush() and run() share one shipper

    @property
    def lag_s(self) -> float:
        """Seconds since the database last had everything; 0 when nothing is pending."""
        if self.shipper.position >= self._ledger.wal.committed:
            return 0.0
        return max(0, self._clock.now_ns() - self.shipper.caught_up_ns) / 1e9

    def residuals(self) -> dict[str, int]:
        """What must be 0 at any instant, for the conservation gauges: `requests` is opened minus
        settled minus in flight; `wal` is appended minus shipped, known when nothing is pending."""
        wal, ledger = self._ledger.wal, self._ledger
        shipped = self.shipper.records_ever
        caught_up = shipped is not None and self.shipper.position >= wal.committed
        return {
            "requests": ledger.opened - ledger.settled - ledger.in_flight,
            "wal": wal.appended - shipped if caught_up and shipped is not None else 0,
        }

    async def run(self) -> None:
        """Work until cancelled. Failures are logged at most every 30 s and retried with growing
        pauses, so that an outage costs neither the log nor the processor."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(SHIP_EVERY_S, self.ship))
            group.create_task(self._every(LEAD_EVERY_S, self.lead))
            group.create_task(self._every(ADOPT_EVERY_S, self.adopt))

    async def ship(self) -> None:
        """Own log into the database; then settle what earlier lives of this node left open, and
        what this life forgot to close."""
        async with self._pass:
            if await self.shipper.ship_all():
                self.is_database_reachable = True
            if not self._dead_swept:
                while await self.sweeper.sweep_dead(self._ledger.wal):
                    await asyncio.to_thread(self._ledger.wal.sync)
                    await self.shipper.ship_all()
                self._dead_swept = True
        self.expired += self._ledger.expire(grace_s=self._expire_grace_s)

    async def lead(self) -> None:
        """Roll up dirty hours and sweep requests of machines that did not come back, if no other
        worker is at it."""
        wal_dir = self._ledger.wal.folder.parent
        async with leadership(self._engine, wal_dir) as leads:
            if not leads:
                return
            self.hours_rolled += await roll_up_dirty(self._engine)
            self.is_database_reachable = True
            async with self._pass:
                await self.shipper.ship_all()
                await self.sweeper.sweep_overdue(
                    self._ledger.wal,
                    local_nodes=frozenset(node_of(folder) for folder in folders(wal_dir)),
                    grace_s=self._foreign_grace_s,
                )

    async def adopt(self) -> None:
        """Ship and sweep the logs of processes of this machine that are gone."""
        self.adopted += await adopt_leftovers(
            self._engine, self._ledger.wal.folder.parent, rate=self._rate, clock=self._clock
        )

    async def flush(self) -> None:
        """Everything on the log into the database and into the roll-ups, once. Raises what the
        database raises: then it stays on the log for the next start."""
        await asyncio.to_thread(self._ledger.wal.sync)
        await self.ship()
        async with leadership(self._engine, self._ledger.wal.folder.parent) as leads:
            if leads:
                self.hours_rolled += await roll_up_dirty(self._engine)

    async def _every(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        pause_s = interval_s
        logged_s = -_LOG_EVERY_S
        while True:
            try:
                await work()
                pause_s = interval_s
            except Exception as error:  # noqa: BLE001  # a background loop: logged, counted, retried
                self.failures += 1
                if isinstance(error, SQLAlchemyError | OSError):
                    self.is_database_reachable = False
                if time.monotonic() - logged_s >= _LOG_EVERY_S:
                    logged_s = time.monotonic()
                    log.warning(
                        "ledger work failed; nothing is lost, it is retried",
                        extra={"work": work.__name__, "reason": _reason(error)},
                    )
                pause_s = min(max(pause_s * 2, interval_s), max(_LONGEST_PAUSE_S, interval_s))
            await asyncio.sleep(pause_s)


async def adopt_leftovers(engine: AsyncEngine, wal_dir: Path, *, rate: Rate, clock: Clock) -> int:
    """Ship and sweep every folder below `wal_dir` that no process owns. Returns how many had
    something. Folders in use are their owner's business."""
    count = 0
    for folder in folders(wal_dir):
        try:
            count += await _adopt(engine, folder, rate=rate, clock=clock)
        except WalLocked:
            continue
        except (WalUnreadable, WalUnavailable) as error:  # its trouble is not the others'
            log.error("a leftover log cannot be adopted", extra={"reason": str(error)})
    return count


async def _adopt(engine: AsyncEngine, folder: Path, *, rate: Rate, clock: Clock) -> bool:
    wal = await asyncio.to_thread(
        WriteAheadLog.open, folder.parent, folder.name, clock=clock, purpose="adopting"
    )
    try:
        shipper = Shipper(engine, wal, clock=clock)
        sweeper = Sweeper(engine, rate=rate, clock=clock)
        count = await shipper.ship_all()
        while await sweeper.sweep_dead(wal):
            await asyncio.to_thread(wal.sync)
            count += await shipper.ship_all()
        return count > 0
    finally:
        await asyncio.to_thread(wal.close)


async def catch_up(engine: AsyncEngine, wal_dir: Path, *, rate: Rate, clock: Clock) -> None:
    """Make the database current before a report or a reconciliation: leftover logs are shipped and
    swept, dirty hours rolled up. What a running server owns it keeps current itself."""
    await adopt_leftovers(engine, wal_dir, rate=rate, clock=clock)
    async with leadership(engine, wal_dir) as leads:
        if leads:
            await roll_up_dirty(engine)


def _reason(error: Exception) -> str:
    """The kind of failure, without addresses or credentials that driver messages may hold."""
    if isinstance(error, LedgerError):
        return str(error)
    cause = getattr(error, "orig", None) or error
    return type(cause).__name__
