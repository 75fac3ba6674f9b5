"""The gateway as it is served, with one stage taken out, so that its price is known. For the bench
alone: nothing here is a setting. `python -m tests.bench.stage_off STAGE ARGUMENTS-OF-serve`"""

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from gateway.app import Service
from gateway.commands import serve as command
from telemetry import logs
from telemetry.ledger import OpenRecord

STAGES = ("keys", "limits", "ledger", "metrics", "spans", "log line", "all of these")


def strip(service: Service, stage: str) -> None:
    """Take the stage out of what was just opened."""
    gateway, ledger = service.gateway, service.gateway.ledger
    is_all = stage == "all of these"
    if stage == "keys" or is_all:
        identify, known = gateway.auth.identify, {}

        async def once(credential: Any) -> Any:
            if not known:
                known[0] = await identify(credential)
            return known[0]

        gateway.auth.identify = once  # type: ignore[method-assign]
    if stage == "limits" or is_all:

        async def admit(*_: Any) -> None:
            return None

        gateway.limits.admit = admit  # type: ignore[method-assign]
        ledger.observers.remove(gateway.limits.settle)
    if stage == "ledger" or is_all:
        wal = ledger.wal
        wal.append_intent = lambda payload: None  # type: ignore[method-assign]
        wal.append_attempts = lambda payload: True  # type: ignore[method-assign]
        wal.append_settlement = _settled  # type: ignore[method-assign]
        OpenRecord.saw_chunk = lambda *_: None  # type: ignore[method-assign, assignment]
    for name, observer in (
        ("metrics", service.metrics.observe),
        ("log line", logs.log_request),
    ):
        if stage == name or is_all:
            ledger.observers.remove(observer)
    if stage == "spans" or is_all:
        ledger.observers[:] = [
            observer
            for observer in ledger.observers
            if "SpanExport" not in repr(getattr(observer, "__self__", observer))
        ]


def _settled(payload: bytes, *, admitted: bool, on_written: Any = lambda: None) -> bool:
    on_written()
    return True


def main() -> None:
    """Serve without the stage."""
    stage = sys.argv.pop(1)
    opened = command.open_service

    @contextlib.asynccontextmanager
    async def stripped(*arguments: Any, **named: Any) -> AsyncIterator[Service]:
        async with opened(*arguments, **named) as service:
            strip(service, stage)
            yield service

    command.open_service = stripped
    command.serve(prog_name="meterline serve")


if __name__ == "__main__":
    main()
