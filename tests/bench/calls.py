"""What each stage costs in Python calls: the price that no noise of the machine touches. As in the
test that holds the sum (`tests/integration/test_gateway_calls.py`), with one stage taken out."""

import asyncio
import contextlib
import functools
import sys
import tempfile
from pathlib import Path

import uvloop

from gateway.app import Service
from telemetry.ledger import OpenRecord, worker
from tests.bench.gateway import OURS, start
from tests.bench.report import Table
from tests.bench.stage_off import STAGES, strip
from tests.integration.test_gateway_calls import logged, measured
from tests.services import free_port

_SAW_CHUNK = OpenRecord.saw_chunk


def run() -> Table:
    """One row per stage."""
    worker.SHIP_EVERY_S = worker.LEAD_EVERY_S = 3600.0  # they come by time, not by request
    table = Table("gateway-calls", ["target", "calls/request", "calls/streamed event"])
    with contextlib.ExitStack() as stack:
        mock = free_port()
        start(stack, [sys.executable, "-m", "tests.bench.upstream", str(mock)], mock)
        for stage in (None, *STAGES):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepare = functools.partial(_strip, stage=stage)
            with (
                logged(folder / "log"),
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                whole, chunk = runner.run(measured(folder, mock, prepare))
            name = OURS if stage is None else f"without {stage}"
            table.add(name, round(whole), round(chunk, 1))
    return table


def _strip(service: Service, *, stage: str | None) -> None:
    OpenRecord.saw_chunk = _SAW_CHUNK  # type: ignore[method-assign]  # the last one took it out
    if stage is not None:
        strip(service, stage)
