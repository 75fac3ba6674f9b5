"""A process to be killed: interleaves requests on one log and keeps its own books on stdout.

Each line is written after the call that it reports returned, so the books are what the process knew
to have happened. `python -m tests.fakes.ledger_writer WAL_DIR SEED`
"""

import os
import random
import sys
from pathlib import Path

from telemetry.clock import SystemClock
from telemetry.ledger import Ledger, OpenRecord
from telemetry.record import Outcome
from telemetry.usage import Usage, UsageSource
from tests.fakes.ledger import admit, open_log, rate, refuse


def main(wal_dir: Path, seed: int) -> None:
    """Write until killed."""
    clock = SystemClock()
    wal = open_log(wal_dir, clock, segment_bytes=32 << 10)
    ledger = Ledger(wal=wal, rate=rate, clock=clock)
    chance = random.Random(seed)
    live: list[OpenRecord] = []
    _tell("ready", "-", 0)
    while True:
        roll = chance.random()
        if roll < 0.04:
            _tell("refused", refuse(ledger).data.request_id, 0)
        elif len(live) < 20 or roll < 0.1:
            record = admit(ledger, tokens_in=5)
            live.append(record)
            _tell("admitted", record.data.request_id, 0)
        elif roll < 0.9:
            record = chance.choice(live)
            record.saw_chunk(4)
            _tell("chunk", record.data.request_id, record.data.chunks)
        else:
            record = live.pop(chance.randrange(len(live)))
            attempt = record.data.attempts[0]
            attempt.usage = Usage(in_uncached_text=5, out_text=record.data.chunks)
            attempt.usage_source = UsageSource.REPORTED
            record.close(outcome=Outcome.OK, status=200)
            _tell("settled", record.data.request_id, record.data.chunks)


def _tell(what: str, request_id: str, chunks: int) -> None:
    os.write(1, f"{what} {request_id} {chunks}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
