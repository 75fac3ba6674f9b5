"""How far each open request got, in memory that outlives the process.

A write-ahead record per token would cost more than the token. Instead each admitted request owns a
64-byte slot of a memory-mapped file: plain stores, about a microsecond per chunk, kept by the page
cache when the process is killed (a power failure may lose the last seconds: then the estimate is
lower). Files are allocated in full before they are mapped, so a full disk is an error at admission
and never a SIGBUS in a stream. On start the sweeper reads the slots of dead processes.

Eight native 64-bit words per slot: request id (two), attempt, chunks, content bytes, first and
last chunk's time, and one spare. Each store is one aligned word, so none is ever half written.
"""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from msgspec import Struct

SLOT_BYTES = 64
_WORDS = SLOT_BYTES // 8
_MASK = 2**64 - 1
_MAGIC = int.from_bytes(b"MLSLOTS1", "little")


class Progress(Struct, frozen=True, gc=False):
    """What one dead request had read from its upstream."""

    request_id: str
    attempt_no: int
    chunks: int
    content_bytes: int
    first_ns: int
    last_ns: int


class Slot:
    """The words of one open request. Released when its settlement is on the log."""

    __slots__ = ("_base", "_free", "_words")

    def __init__(self, words: "memoryview[int]", base: int, free: Callable[["Slot"], None]) -> None:
        self._words = words
        self._base = base
        self._free = free

    def claim(self, request_id: str) -> None:
        words, base = self._words, self._base
        number = int(request_id.replace("-", ""), 16)
        for word in range(2, _WORDS):
            words[base + word] = 0
        words[base + 1] = number & _MASK
        words[base] = number >> 64  # last: a slot without it is free

    def saw(
        self, attempt_no: int, chunks: int, content_bytes: int, first_ns: int, last_ns: int
    ) -> None:
        words, base = self._words, self._base
        words[base + 2] = attempt_no
        words[base + 5] = first_ns
        words[base + 6] = last_ns
        words[base + 4] = content_bytes
        words[base + 3] = chunks  # last: a counted chunk is complete

    def release(self) -> None:
        self._words[self._base] = 0
        self._free(self)


class ProgressSlots:
    """The slots of one process life. Grows by a file when all slots are taken.

    `claim` may raise OSError (disk full). Thread-safe, because a delayed settlement is written, and
    its slot released, by the log's own thread."""

    def __init__(
        self,
        folder: Path,
        boot: str,
        *,
        slots_per_file: int = 2048,
        allocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        self._folder = folder
        self._boot = boot
        self._slots_per_file = slots_per_file
        self._allocate = allocate
        self._maps: list[tuple[mmap.mmap, memoryview, memoryview[int], Path]] = []
        self._idle: list[Slot] = []
        self._lock = threading.Lock()

    def claim(self, request_id: str) -> Slot:
        with self._lock:
            if not self._idle:
                self._grow()
            slot = self._idle.pop()
        slot.claim(request_id)
        return slot

    def close(self, *, keep: bool) -> None:
        """Unmap. `keep`: requests are still open, so the files stay for the sweeper."""
        with self._lock:
            self._idle.clear()
            for mapping, view, words, path in self._maps:
                words.release()
                view.release()
                mapping.close()
                if not keep:
                    path.unlink(missing_ok=True)
            self._maps.clear()

    def _free(self, slot: Slot) -> None:
        with self._lock:
            self._idle.append(slot)

    def _grow(self) -> None:
        path = self._folder / f"progress-{self._boot}-{len(self._maps):04d}.slots"
        size = (self._slots_per_file + 1) * SLOT_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._allocate(fd, 0, size)
            mapping = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        view = memoryview(mapping)
        words = view.cast("Q")
        words[0] = _MAGIC
        self._maps.append((mapping, view, words, path))
        self._idle.extend(
            Slot(words, base, self._free)
            for base in range(self._slots_per_file * _WORDS, 0, -_WORDS)
        )


def slot_files(folder: Path) -> dict[str, list[Path]]:
    """The slot files of a node's folder by the process life that wrote them."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("progress-*.slots")):
        found.setdefault(path.stem.split("-")[1], []).append(path)
    return found


def read_slots(path: Path) -> dict[str, Progress]:
    """The slots in use in one file of a dead process, by request id."""
    data = path.read_bytes()
    words = memoryview(data[: len(data) // SLOT_BYTES * SLOT_BYTES]).cast("Q")
    found: dict[str, Progress] = {}
    if len(words) < _WORDS or words[0] != _MAGIC:
        return found
    for base in range(_WORDS, len(words), _WORDS):
        if words[base] == 0:
            continue
        request_id = str(UUID(int=words[base] << 64 | words[base + 1]))
        found[request_id] = Progress(request_id, *(words[base + n] for n in range(2, 7)))
    return found
