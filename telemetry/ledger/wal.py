"""The write-ahead log: what `append` returned for is never lost to a killed process.

One folder per node, owned by one process at a time (flock). Segments are preallocated files of
frames; a record is on its way to the disk with one `pwrite`, so a `kill -9` after `append` loses
nothing, and a background thread makes it durable within `fsync_interval_s` (policy `group`).

Room for settlements is bought before a request is admitted: an intent is refused unless the
preallocated space left holds it and a settlement (SETTLEMENT_RESERVE) of every request in flight.
So when the disk fills, new requests are refused and the admitted ones still settle. On file
systems that cannot preallocate (copy-on-write) a settlement may still be refused: it then waits in
memory, is retried until it is written, and meanwhile no intent is taken.

Segment numbers are milliseconds of creation and each process starts a new segment, so a number is
never used twice, even if the machine loses its newest file in a power failure. The newest segment
is kept after it was shipped: its header carries the count of all records before it.
Knows nothing of requests, prices or databases.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from telemetry.clock import Clock
from telemetry.ledger import frames
from telemetry.ledger.entries import FORMAT_VERSION, SegmentHeader, pack, unpack_header
from telemetry.ledger.errors import WalLocked, WalUnavailable, WalUnreadable
from telemetry.ledger.frames import Kind

log = logging.getLogger(__name__)

FsyncPolicy = Literal["always", "group", "off"]
SEGMENT_BYTES = 16 << 20
SETTLEMENT_RESERVE = 8 << 10  # a settled record with one attempt and four charges takes about 2 KB
_READ_BYTES = 1 << 20
_RETRY_S = 0.1


class Position(NamedTuple):
    """A place between two frames of one node's log. Positions of one node are ordered."""

    segment: int
    offset: int


START = Position(0, 0)


class Disk:
    """The system calls that can fail for want of space or of hardware."""

    def write(self, fd: int, data: bytes, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        os.posix_fallocate(fd, offset, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


class Batch(Struct, frozen=True):
    """Frames in order, and where the next batch starts. `damaged`: bytes that had to be skipped."""

    records: list[frames.Frame]
    next: Position
    damaged: int


class _Spare(NamedTuple):
    fd: int
    path: Path


class _Segment:
    __slots__ = ("fd", "number", "offset")

    def __init__(self, fd: int, number: int, offset: int) -> None:
        self.fd = fd
        self.number = number
        self.offset = offset


class WriteAheadLog:
    """One node's log. `append_*` from any thread; `read` and `forget` by its one shipper.

    Plain counters for the metrics: `appended` (records ever, over restarts), `shipped_records`,
    `damaged_bytes`, `fsyncs`, `fsync_total_s`, `fsync_errors`, `waiting`, `pending_bytes()`."""

    def __init__(
        self,
        folder: Path,
        lock_fd: int,
        *,
        clock: Clock,
        fsync: FsyncPolicy,
        segment_bytes: int,
        fsync_interval_s: float,
        disk: Disk,
        on_fsync: Callable[[float], None] | None,
    ) -> None:
        self.folder = folder
        self.node = _node_id(folder)
        self.boot = uuid.uuid4().hex
        self.fsync_policy = fsync
        self.appended = 0
        self.damaged_bytes = 0
        self.fsyncs = 0
        self.fsync_errors = 0
        self.fsync_total_s = 0.0
        self.outstanding = 0  # intents of this process whose settlement is not on the log yet
        self.disk = disk
        self._lock_fd = lock_fd
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._interval_s = fsync_interval_s
        self.on_fsync = on_fsync
        self._lock = threading.Lock()
        self._syncing = threading.Lock()  # taken before _lock, never inside it
        self._waiting: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._active: _Segment | None = None
        self._retired: list[_Segment] = []
        self._spares: list[_Spare] = []
        self._spare_count = 0
        self._trouble: str | None = None
        self._lengths: dict[int, int] = {}
        self._newest = 0
        self._synced = START
        self._committed = START
        self._shipped = START
        self._recover()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"wal {folder.name}", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        wal_dir: Path,
        name: str = "gateway-0",
        *,
        clock: Clock,
        fsync: FsyncPolicy = "group",
        segment_bytes: int = SEGMENT_BYTES,
        fsync_interval_s: float = 0.005,
        disk: Disk | None = None,
        on_fsync: Callable[[float], None] | None = None,
        purpose: Literal["serving", "adopting"] = "serving",
    ) -> "WriteAheadLog":
        """Open `wal_dir/name`, making it if needed; recover what a dead process left.

        Raises WalLocked if a process serves from it (one that only ships a leftover log is waited
        for), WalUnavailable if the folder cannot be written, WalUnreadable for a foreign format.
        """
        folder = wal_dir / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = _lock(folder, purpose)
        except OSError as error:
            raise WalUnavailable(f"cannot write to {folder}: {error.strerror}") from None
        try:
            return cls(
                folder,
                lock_fd,
                clock=clock,
                fsync=fsync,
                segment_bytes=segment_bytes,
                fsync_interval_s=fsync_interval_s,
                disk=disk or Disk(),
                on_fsync=on_fsync,
            )
        except OSError as error:
            os.close(lock_fd)
            raise WalUnavailable(f"cannot open the log in {folder}: {error.strerror}") from None
        except BaseException:
            os.close(lock_fd)
            raise

    # -- writing ---------------------------------------------------------------------------------

    def append_intent(self, payload: bytes) -> None:
        """Log an intent, or raise WalUnavailable and log nothing."""
        frame = frames.encode(Kind.INTENT, payload)
        with self._lock:
            self._refuse_in_trouble()
            reserve = min(SETTLEMENT_RESERVE, self._segment_bytes // 4)
            try:
                while self._room() < len(frame) + (self.outstanding + 1) * reserve:
                    self._spares.append(self._make_spare())
                self._write(frame)
            except OSError as error:
                raise WalUnavailable(f"the log cannot grow: {error.strerror}") from None
            self.outstanding += 1
        if self.fsync_policy == "always":
            self._sync_once()
            if self._trouble is not None:
                raise WalUnavailable(self._trouble, logged=True)

    def append_attempts(self, payload: bytes) -> bool:
        """Log started attempts. False if there was no room: only a crash would miss it."""
        frame = frames.encode(Kind.ATTEMPTS, payload)
        with self._lock:
            try:
                self._write(frame)
            except OSError:
                return False
        return True

    def append_settlement(
        self, payload: bytes, *, admitted: bool, on_written: Callable[[], None] = lambda: None
    ) -> bool:
        """Log a settlement. If the disk refuses it, it waits in memory (False) and is retried until
        it is written. `on_written` runs once it is, here or in the log's own thread."""
        frame = frames.encode(Kind.SETTLEMENT, payload)

        def written() -> None:
            if admitted:
                self.outstanding -= 1
            on_written()

        with self._lock:
            try:
                if self._waiting:
                    raise OSError(errno.ENOSPC, "earlier settlements wait")
                self._write(frame)
            except OSError as error:
                self._waiting.append((frame, written))
                self._work.set()
                log.error("a settlement waits for the disk", extra={"reason": error.strerror})
                return False
            written()
        if self.fsync_policy == "always":
            self._sync_once()
        return True

    @property
    def waiting(self) -> int:
        """Settlements that the disk refused and that wait in memory."""
        return len(self._waiting)

    @property
    def trouble(self) -> str | None:
        """Why intents are refused now; None when all is well."""
        if self._waiting:
            return f"{len(self._waiting)} settlements wait for room on the disk"
        return self._trouble

    def sync(self) -> None:
        """Make everything appended so far durable. Blocks; for shutdown and tests."""
        self._sync_once()

    def close(self) -> None:
        """Write what waits, make all durable, leave the folder to the next owner. Idempotent."""
        if self._lock_fd < 0:
            return
        self._stopping = True
        self._work.set()
        self._thread.join()
        self._retry_waiting()
        if self._waiting:
            log.critical("settlements lost at shutdown", extra={"count": len(self._waiting)})
        with self._lock:
            if self._active is not None:
                self._retire()
        self._sync_once()
        for segment in self._retired:  # only if the last sync failed
            os.close(segment.fd)
        self._retired.clear()
        for spare in self._spares:
            os.close(spare.fd)
        for path in self.folder.glob("spare-*"):
            path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    # -- reading ---------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """Up to where records may be shipped: durable ones, so that the database never knows a
        record that a power failure could take from the log. With policy `off`, all of them."""
        return self._committed if self.fsync_policy == "off" else self._synced

    @property
    def committed(self) -> Position:
        """Behind the last record appended."""
        return self._committed

    def read(self, start: Position, limit: int) -> Batch:
        """At most `limit` records from `start` on, never beyond `end`."""
        end = self.end
        for segment in self.segments():
            if segment < start.segment or segment > end.segment:
                continue
            offset = start.offset if segment == start.segment else 0
            stop = end.offset if segment == end.segment else self._length(segment)
            while offset < stop:  # more than once only to pass the header or damage
                batch = self._read_from(segment, offset, stop, limit)
                if batch.records:
                    return batch
                start = batch.next
                offset = start.offset
        return Batch([], max(start, START), 0)

    def _read_from(self, segment: int, offset: int, stop: int, limit: int) -> Batch:
        found, consumed = _read_segment(self._path(segment), offset, stop, limit)
        damaged = found.damaged + (0 if found.frames else found.tail)
        if damaged:
            self.damaged_bytes += damaged
            log.error("damaged records in the log", extra={"segment": segment, "bytes": damaged})
        records = [frame for frame in found.frames if frame.kind in frames.RECORDS]
        return Batch(records, Position(segment, consumed), damaged)

    def records_from(self, start: Position) -> list[frames.Frame]:
        """All records behind `start`. For reconciliation of a backlog, not for the hot path."""
        found: list[frames.Frame] = []
        batch = self.read(start, 1000)
        while batch.records:
            found.extend(batch.records)
            batch = self.read(batch.next, 1000)
        return found

    def forget(self, position: Position) -> None:
        """Everything before `position` is in the database: delete whole segments before it."""
        self._shipped = position
        for segment in self.segments():
            if segment < position.segment and segment != self._newest:
                self._path(segment).unlink(missing_ok=True)
                with self._lock:
                    self._lengths.pop(segment, None)

    def pending_bytes(self) -> int:
        """Bytes appended and not yet shipped."""
        total = 0
        for segment in self.segments():
            if segment < self._shipped.segment:
                continue
            skip = self._shipped.offset if segment == self._shipped.segment else 0
            total += max(0, self._length(segment) - skip)
        return total

    def segments(self) -> list[int]:
        """Numbers of the segments that exist, in order."""
        with self._lock:
            return sorted(self._lengths)

    # -- inside ----------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:020d}.wal"

    def _length(self, segment: int) -> int:
        return self._lengths.get(segment, 0)

    def _refuse_in_trouble(self) -> None:
        if (trouble := self.trouble) is not None:
            raise WalUnavailable(trouble)

    def _room(self) -> int:
        left = 0 if self._active is None else self._segment_bytes - self._active.offset
        return left + len(self._spares) * (self._segment_bytes - 512)  # 512: a segment's header

    def _write(self, frame: bytes) -> None:
        """Lock held. Nothing counts as written if this raises OSError."""
        segment = self._active
        if segment is None or segment.offset + len(frame) > self._segment_bytes:
            segment = self._rotate(len(frame))
        written = self.disk.write(segment.fd, frame, segment.offset)
        while written < len(frame):
            rest = self.disk.write(segment.fd, frame[written:], segment.offset + written)
            if rest <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += rest
        segment.offset += len(frame)
        self.appended += 1
        self._lengths[segment.number] = segment.offset
        self._committed = Position(segment.number, segment.offset)
        if not self._work.is_set():
            self._work.set()

    def _rotate(self, needed: int) -> _Segment:
        number = max(self._newest + 1, self._clock.now_ns() // 1_000_000)
        header = frames.encode(
            Kind.SEGMENT,
            pack(
                SegmentHeader(
                    FORMAT_VERSION, self.node, number, self.appended, self._clock.now_ns()
                )
            ),
        )
        oversized = needed + len(header) > self._segment_bytes
        if self._spares and not oversized:
            spare = self._spares.pop()
        else:
            spare = self._make_spare(max(self._segment_bytes, needed + len(header)))
        try:
            if self.disk.write(spare.fd, header, 0) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            spare.path.rename(self._path(number))
        except OSError:
            self._spares.append(spare)
            raise
        if self._active is not None:
            self._retire()
        self._active = _Segment(spare.fd, number, len(header))
        self._newest = number
        self._lengths[number] = len(header)
        return self._active

    def _make_spare(self, size: int | None = None) -> _Spare:
        self._spare_count += 1
        path = self.folder / f"spare-{self.boot}-{self._spare_count}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.disk.allocate(fd, 0, size or self._segment_bytes)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return _Spare(fd, path)

    def _retire(self) -> None:
        assert self._active is not None
        self._retired.append(self._active)
        self._active = None

    def _run(self) -> None:
        while not self._stopping:
            self._work.wait(_RETRY_S if self._waiting or self._trouble else None)
            if self._stopping:
                return
            self._work.clear()
            if self._waiting:
                self._retry_waiting()
            self._sync_once()
            self._keep_a_spare()
            if not self._stopping:
                time.sleep(self._interval_s)

    def _retry_waiting(self) -> None:
        with self._lock:
            while self._waiting:
                frame, written = self._waiting[0]
                try:
                    self._write(frame)
                except OSError:
                    return
                self._waiting.popleft()
                written()

    def _keep_a_spare(self) -> None:
        with self._lock:
            if self._spares or self._stopping:
                return
        with contextlib.suppress(OSError):  # the next intent will say so
            spare = self._make_spare()
            with self._lock:
                self._spares.append(spare)

    def _sync_once(self) -> None:
        with self._syncing:
            with self._lock:
                retired, self._retired = self._retired, []
                active, committed = self._active, self._committed
            self._sync_segments(retired, active, committed)

    def _sync_segments(
        self, retired: list[_Segment], active: _Segment | None, committed: Position
    ) -> None:
        if committed == self._synced and not retired:
            return
        durable = self.fsync_policy != "off"
        started = time.perf_counter()
        try:
            for segment in list(retired):
                os.ftruncate(segment.fd, segment.offset)
                if durable:
                    self.disk.sync(segment.fd)
                os.close(segment.fd)
                retired.remove(segment)
            if active is not None and durable:
                self.disk.sync(active.fd)
            if durable and (active is None or active.number != self._synced.segment):
                _sync_folder(self.folder)
        except OSError as error:
            # What the kernel could not write may be gone after a power failure, but not after a
            # kill: the shipper still reads it. No new promise is made until a sync succeeds.
            with self._lock:
                self._retired = retired + self._retired
            self.fsync_errors += 1
            self._trouble = f"the log cannot be made durable: {error.strerror}"
            log.error("fsync failed", extra={"reason": error.strerror})
            return
        self._trouble = None
        self._synced = committed
        if durable:
            took = time.perf_counter() - started
            self.fsyncs += 1
            self.fsync_total_s += took
            if self.on_fsync is not None:
                self.on_fsync(took)

    def _recover(self) -> None:
        """Cut the torn tail of the newest segment and learn how many records there are."""
        for path in self.folder.glob("spare-*"):
            path.unlink(missing_ok=True)
        paths = sorted(self.folder.glob("*.wal"))
        for path in reversed(paths):
            if self._newest and not _ends_in_padding(path):
                self._lengths[int(path.stem)] = path.stat().st_size
                continue
            found = frames.scan(path.read_bytes())
            if not found.frames:  # its first bytes never reached the disk: power failed
                path.rename(path.with_suffix(".damaged"))
                log.error("segment without records set aside", extra={"segment": path.name})
                continue
            if found.tail:
                log.warning("torn tail cut", extra={"segment": path.name, "bytes": found.tail})
            os.truncate(path, found.end)
            number = int(path.stem)
            self._lengths[number] = found.end
            if not self._newest:
                self._newest = number
                self._committed = self._synced = Position(number, found.end)
                counted = sum(frame.kind in frames.RECORDS for frame in found.frames)
                self.appended = counted + _header(found, path).records_before


def folders(wal_dir: Path) -> Iterator[Path]:
    """The folders of all nodes that ever wrote below `wal_dir`."""
    if wal_dir.is_dir():
        yield from sorted(path.parent for path in wal_dir.glob("*/node"))


def node_of(folder: Path) -> str:
    """The node id kept in a folder."""
    return (folder / "node").read_text().strip()


def _header(found: frames.Scan, path: Path) -> SegmentHeader:
    if not found.frames or found.frames[0].kind != Kind.SEGMENT:
        raise WalUnreadable(f"{path} does not start with a segment header")
    header = unpack_header(found.frames[0].payload)
    if header.version != FORMAT_VERSION:
        raise WalUnreadable(
            f"{path} has format {header.version}; this version reads {FORMAT_VERSION}"
        )
    return header


def _ends_in_padding(path: Path) -> bool:
    """Preallocated and never cut to size: its writer died soon after leaving it."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return not file.read().strip(b"\0")


def _read_segment(path: Path, offset: int, stop: int, limit: int) -> tuple[frames.Scan, int]:
    """Frames of one segment, and the offset behind them. Reads a window; a frame or a damaged
    stretch that does not fit makes it grow."""
    window = _READ_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            wanted = min(window, stop - offset)
            data = file.read(wanted)
            found = frames.scan(data, limit=limit)
            if found.frames:
                return found, offset + found.end
            if len(data) < wanted or offset + len(data) >= stop:
                return found, stop
            window *= 4


def _node_id(folder: Path) -> str:
    """The id in the folder's `node` file, made on first use: the folder's name for people and a
    random part, so that replicas with equal names do not share a cursor."""
    path = folder / "node"
    if not path.exists():
        fresh = folder / "node.new"
        fresh.write_text(f"{folder.name[:60]}.{uuid.uuid4().hex[:12]}\n")
        fresh.replace(path)
    return node_of(folder)


def _lock(folder: Path, purpose: str) -> int:
    """Take the folder, or raise WalLocked. An adopter holds it for a moment only: wait for it."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
            may_wait = purpose == "serving" and owner.startswith("adopting")
            if not may_wait or time.monotonic() > deadline:
                os.close(fd)
                raise WalLocked(f"{folder} is in use by another process ({owner})") from None
            time.sleep(0.02)
        except OSError:
            os.close(fd)
            raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{purpose} pid {os.getpid()}\n".encode(), 0)
    return fd


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
