"""Print what the ledger costs on this machine: append, settle, per chunk, ship, roll up.

`python -m tests.bench.ledger_throughput [--requests 5000] [--database URL] [--dir FOLDER]`
Nothing is asserted: the numbers depend on the disk and on what else runs.
"""

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from telemetry.clock import SystemClock
from telemetry.database import open_engine
from telemetry.ledger import Ledger, WriteAheadLog
from telemetry.ledger.rollups import roll_up_dirty
from telemetry.ledger.shipper import Shipper
from telemetry.tables import LedgerBase
from tests.fakes.ledger import admit, rate, serve

CLOCK = SystemClock()


async def measure(requests: int, database: str, folder: Path) -> None:
    """One run, printed."""
    _say(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {database}")
    wal = WriteAheadLog.open(folder / "wal", clock=CLOCK)
    ledger = Ledger(wal=wal, rate=rate, clock=CLOCK)
    serve(ledger)
    await _chunks(ledger)
    await _appends(wal, requests)
    await _settlements(ledger, requests)
    await _ship(wal, database)
    ledger.close()
    wal.close()


async def _chunks(ledger: Ledger) -> None:
    record = admit(ledger)
    count = 100_000
    started = time.perf_counter()
    for _ in range(count):
        record.saw_chunk(4)
    took = time.perf_counter() - started
    _say(f"saw_chunk            {took / count * 1e6:8.2f} µs")


async def _appends(wal: WriteAheadLog, count: int) -> None:
    payload = b"x" * 900
    times = []
    for number in range(count):
        started = time.perf_counter()
        wal.append_attempts(payload)
        times.append(time.perf_counter() - started)
        if number % 50 == 0:
            await asyncio.sleep(0)
    _report("append", times)


async def _settlements(ledger: Ledger, requests: int) -> None:
    times = []
    for number in range(requests):
        started = time.perf_counter()
        serve(ledger, tokens_out=3, tenant=f"t{number % 20}")
        times.append(time.perf_counter() - started)
        if number % 50 == 0:
            await asyncio.sleep(0)
    _report("request (3 appends)", times)


async def _ship(wal: WriteAheadLog, database: str) -> None:
    engine = open_engine(database)
    async with engine.begin() as db:
        await db.run_sync(LedgerBase.metadata.create_all)
    wal.sync()
    shipper = Shipper(engine, wal, clock=CLOCK)
    started = time.perf_counter()
    records = await shipper.ship_all()
    took = time.perf_counter() - started
    _say(
        f"ship                 {records / took:8.0f} records/s, {shipper.requests / took:.0f} "
        f"requests/s ({shipper.requests * 4 / took:.0f} rows/s)"
    )
    started = time.perf_counter()
    hours = await roll_up_dirty(engine)
    took = time.perf_counter() - started
    _say(f"roll up              {took * 1000:8.0f} ms for {hours} hours")
    _say(
        f"fsync                {wal.fsync_total_s / max(1, wal.fsyncs) * 1e3:8.2f} ms mean "
        f"of {wal.fsyncs}"
    )
    await engine.dispose()


def _report(name: str, times: list[float]) -> None:
    times.sort()
    total = sum(times)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    _say(
        f"{name:20} {len(times) / total:8.0f} /s   p50 {p50 * 1e6:.0f} µs   "
        f"p99 {p99 * 1e6:.0f} µs   max {times[-1] * 1e3:.1f} ms"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--database")
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        database = options.database or f"sqlite:///{folder}/bench.db"
        asyncio.run(measure(options.requests, database, Path(folder)))


if __name__ == "__main__":
    main()
