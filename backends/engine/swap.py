"""Where the blocks of a preempted sequence go: host memory first, then a file, both bounded.

Moving blocks costs time, and so does computing their tokens again; both are measured as they
happen, and a preemption takes what is cheaper now. The file has no name, so nothing is left of it
however the process ends; each block in it carries a digest, and one that does not come back as it
went is reported, never computed with: the sequence is then computed again. No torch, no policy.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct

from telemetry.clock import Clock

log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_MEMORY = 0.7  # of the measured speed that is kept when a new measurement comes


class Blocks(Protocol):
    """The KV pool of a device, block by block."""

    def read_block(self, block: int) -> memoryview:
        """A copy of its keys and values."""
        ...

    def write_block(self, block: int, data: memoryview) -> None: ...


class Place(Struct, frozen=True):
    """Of one block: its bytes, or where they are in the file and what they were."""

    held: memoryview | None
    slot: int = -1
    digest: bytes = b""


class Saved(Struct, frozen=True):
    """The blocks of one sequence, in order."""

    places: list[Place]


class Rate:
    """Seconds per thing, as measured lately."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def saw(self, seconds: float, count: int) -> None:
        self.seconds = _MEMORY * self.seconds + (1 - _MEMORY) * seconds / count


class SwapSpace:
    """Used by the engine thread alone. `open_file` makes the file when it is first needed."""

    def __init__(
        self,
        device: Blocks,
        *,
        clock: Clock,
        block_bytes: int,
        memory_blocks: int,
        file_blocks: int = 0,
        open_file: Callable[[], BinaryIO] = tempfile.TemporaryFile,
    ) -> None:
        self._device = device
        self._clock = clock
        self._block_bytes = block_bytes
        self._memory_left = memory_blocks
        self._file_blocks = file_blocks
        self._free_slots = list(range(file_blocks - 1, -1, -1))
        self._open_file = open_file
        self._file: BinaryIO | None = None
        # There and back, per block; guesses (1 GB/s and 0.3 GB/s) until something was moved.
        self._memory_rate = Rate(2 * block_bytes / 1e9)
        self._file_rate = Rate(2 * block_bytes / 3e8)
        self.used = 0  # blocks
        self.saved = 0  # blocks, ever
        self.loaded = 0
        self.lost = 0  # sequences whose blocks did not come back

    def price_s(self, count: int) -> float | None:
        """What it takes to save and load so many blocks; None: there is no room."""
        in_file = max(0, count - self._memory_left)
        if in_file > len(self._free_slots):
            return None
        return (count - in_file) * self._memory_rate.seconds + in_file * self._file_rate.seconds

    def measure(self, block: int) -> None:
        """Move one block there and back, as long as nobody waits for it."""
        for _ in range(2):  # the first time takes the memory
            if self.price_s(1) is not None and (saved := self.save([block])) is not None:
                self.load(saved, [block])

    def save(self, blocks: Sequence[int]) -> Saved | None:
        """None, and no change, when there is no room or the file cannot be written."""
        if self.price_s(len(blocks)) is None:
            return None
        saved = Saved([])
        in_file = max(0, len(blocks) - self._memory_left)
        try:
            # The end goes to the file: a beginning may still be known when it comes back.
            at = len(blocks) - in_file
            started_ns = self._clock.monotonic_ns()
            for block in blocks[:at]:
                self._memory_left -= 1
                saved.places.append(Place(self._device.read_block(block)))
            between_ns = self._clock.monotonic_ns()
            for block in blocks[at:]:
                saved.places.append(self._written(self._device.read_block(block)))
        except (OSError, ValueError) as error:  # ValueError: a closed file
            log.warning("swapping out failed, it is computed again: %s", error)
            self._put_back(saved)
            return None
        # Out and back take about the same; each move measures one half of the round trip.
        if at:
            self._memory_rate.saw(2 * (between_ns - started_ns) / 1e9, at)
        if in_file:
            self._file_rate.saw(2 * (self._clock.monotonic_ns() - between_ns) / 1e9, in_file)
        self.used += len(blocks)
        self.saved += len(blocks)
        return saved

    def load(self, saved: Saved, blocks: Sequence[int], *, skip: int = 0) -> bool:
        """Fill `blocks` with what was saved, less the first `skip`, and forget it. False: some of
        it is damaged or gone, and the blocks hold nothing of use."""
        is_whole = True
        started_ns = self._clock.monotonic_ns()
        wanted = saved.places[skip : skip + len(blocks)]
        try:
            for block, place in zip(blocks, wanted, strict=True):
                self._device.write_block(block, self._read(place))
        except (OSError, ValueError) as error:
            log.warning("swapping in failed, it is computed again: %s", error)
            self.lost += 1
            is_whole = False
        if is_whole and wanted:
            took_s = 2 * (self._clock.monotonic_ns() - started_ns) / 1e9
            if all(place.held is not None for place in wanted):
                self._memory_rate.saw(took_s, len(wanted))
            elif all(place.held is None for place in wanted):
                self._file_rate.saw(took_s, len(wanted))
        self.loaded += len(wanted) if is_whole else 0
        self.drop(saved)
        return is_whole

    def drop(self, saved: Saved) -> None:
        """Not needed any more. Doing it twice does nothing."""
        self.used -= len(saved.places)
        self._put_back(saved)

    def close(self) -> None:
        """The file is gone with this."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put_back(self, saved: Saved) -> None:
        for place in saved.places:
            if place.held is None:
                self._free_slots.append(place.slot)
            else:
                self._memory_left += 1
        saved.places.clear()

    def _written(self, data: memoryview) -> Place:
        if self._file is None:
            self._file = self._open_file()
        slot = self._free_slots.pop()
        at = slot * self._block_bytes
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], at + done)
        except (OSError, ValueError):
            self._free_slots.append(slot)
            raise
        return Place(None, slot, _digest(data))

    def _read(self, place: Place) -> memoryview:
        """Raises ValueError for what is not what was written."""
        if place.held is not None:
            return place.held
        assert self._file is not None, "something was written to it"
        data = os.pread(self._file.fileno(), self._block_bytes, place.slot * self._block_bytes)
        if len(data) != self._block_bytes or _digest(data) != place.digest:
            raise ValueError("a block of the swap file is damaged")
        return memoryview(data)


def _digest(data: memoryview | bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def file_in(folder: Path | None) -> Callable[[], BinaryIO]:
    """Files without a name in this folder, or where the system keeps its temporary ones."""
    return lambda: tempfile.TemporaryFile(dir=folder)
