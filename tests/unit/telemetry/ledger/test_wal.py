"""The write-ahead log: recovery, rotation, locks, and disks that fill or fail."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telemetry.ledger import WalLocked, WalUnavailable, WalUnreadable, frames
from telemetry.ledger.entries import SegmentHeader, pack
from telemetry.ledger.frames import Kind
from telemetry.ledger.wal import START, Position, WriteAheadLog, folders, node_of
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import FillingDisk, open_log


def _payloads(wal: WriteAheadLog, start: Position = START) -> list[bytes]:
    wal.sync()
    return [frame.payload for frame in wal.records_from(start)]


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_records_survive_reopening_in_order(tmp_path: Path) -> None:
    """What was appended is read back after a restart, and the count goes on."""
    first = open_log(tmp_path, FakeClock())
    first.append_intent(b"i")
    first.append_settlement(b"s", admitted=True)
    first.close()
    second = open_log(tmp_path, FakeClock())
    second.append_settlement(b"t", admitted=False)
    assert _payloads(second) == [b"i", b"s", b"t"]
    assert second.appended == 3
    second.close()


def test_the_node_id_is_kept_and_the_boot_is_new(tmp_path: Path) -> None:
    """A restarted process is the same node in another life."""
    first = open_log(tmp_path, FakeClock())
    first.close()
    second = open_log(tmp_path, FakeClock())
    second.close()
    assert first.node == second.node == node_of(tmp_path / "gateway-0")
    assert first.boot != second.boot
    assert list(folders(tmp_path)) == [tmp_path / "gateway-0"]


def test_a_second_process_gets_a_clear_error(tmp_path: Path) -> None:
    """The folder has one owner, and the error says who."""
    wal = open_log(tmp_path, FakeClock())
    with pytest.raises(WalLocked, match=f"in use by another process .*{os.getpid()}"):
        open_log(tmp_path, FakeClock())
    wal.close()
    open_log(tmp_path, FakeClock()).close()


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    """Where a file stands in the way, opening says which folder cannot be written."""
    (tmp_path / "wal").write_text("")
    with pytest.raises(WalUnavailable, match="cannot write to"):
        open_log(tmp_path / "wal", FakeClock())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(cut=st.integers(1, 400), noise=st.binary(max_size=40))
def test_a_torn_tail_is_cut_at_the_last_whole_record(
    tmp_path: Path, cut: int, noise: bytes
) -> None:
    """Whatever a crash left of the last write, the records before it remain and new ones follow."""
    clock = FakeClock(1_800_000_000_000_000_000 + cut * 10**9)
    wal_dir = tmp_path / os.urandom(8).hex()
    wal = open_log(wal_dir, clock)
    for number in range(5):
        wal.append_settlement(b"%d" % number * 30, admitted=False)
    wal.close()
    (path,) = wal.folder.glob("*.wal")
    data = path.read_bytes()
    whole = [f for f in frames.scan(data[:-cut]).frames if f.kind == Kind.SETTLEMENT]
    path.write_bytes(data[:-cut] + noise)
    again = open_log(wal_dir, clock)
    again.append_settlement(b"new", admitted=False)
    assert _payloads(again) == [frame.payload for frame in whole] + [b"new"]
    assert again.appended == len(whole) + 1
    again.close()


def test_segments_rotate_and_shipped_ones_are_deleted(tmp_path: Path) -> None:
    """Records go on over segment borders; behind the cursor only the newest segment stays."""
    wal = open_log(tmp_path, FakeClock(), segment_bytes=4096)
    sent = [b"%03d" % number * 100 for number in range(60)]
    for payload in sent:
        wal.append_settlement(payload, admitted=False)
    assert len(wal.segments()) > 3
    assert _payloads(wal) == sent
    wal.forget(wal.end)
    assert len(wal.segments()) == 1
    assert wal.pending_bytes() == 0
    wal.close()
    again = open_log(tmp_path, FakeClock(), segment_bytes=4096)
    assert again.appended == 60
    again.close()


def test_reading_in_batches_sees_each_record_once(tmp_path: Path) -> None:
    """The position behind a batch is where the next one starts, also over segment borders."""
    wal = open_log(tmp_path, FakeClock(), segment_bytes=4096)
    sent = [b"%03d" % number * 50 for number in range(50)]
    for payload in sent:
        wal.append_settlement(payload, admitted=False)
    wal.sync()
    position, seen = START, []
    while (batch := wal.read(position, 7)).records:
        seen += [frame.payload for frame in batch.records]
        position = batch.next
    assert seen == sent
    wal.close()


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    """Size never loses a settlement."""
    wal = open_log(tmp_path, FakeClock(), segment_bytes=4096)
    wal.append_settlement(b"x" * 50_000, admitted=False)
    wal.append_settlement(b"y", admitted=False)
    assert [len(payload) for payload in _payloads(wal)] == [50_000, 1]
    wal.close()


def test_only_durable_records_are_offered_for_shipping(tmp_path: Path) -> None:
    """A record that a power failure could still take is not shipped under policy `group`."""
    disk = FillingDisk()
    wal = open_log(tmp_path, FakeClock(), disk=disk)
    disk.may_sync = False
    wal.append_settlement(b"s", admitted=False)
    _eventually(lambda: wal.fsync_errors > 0)
    assert wal.read(START, 10).records == []
    with pytest.raises(WalUnavailable, match="durable"):
        wal.append_intent(b"i")
    disk.may_sync = True
    _eventually(lambda: wal.trouble is None)
    assert [frame.payload for frame in wal.read(START, 10).records] == [b"s"]
    wal.close()


def test_a_full_disk_refuses_intents_and_still_takes_every_settlement(tmp_path: Path) -> None:
    """Room for the settlements of admitted requests was bought at admission."""
    disk = FillingDisk()
    wal = open_log(tmp_path, FakeClock(), segment_bytes=64 << 10, disk=disk)
    wal.append_intent(b"first")
    disk.may_allocate = False
    admitted = 1
    with pytest.raises(WalUnavailable, match="cannot grow"):
        while admitted < 1000:
            wal.append_intent(b"i" * 100)
            admitted += 1
    assert 1 < admitted < 1000
    for _ in range(admitted):
        assert wal.append_settlement(b"s" * 2000, admitted=True)
    assert wal.outstanding == 0
    disk.may_allocate = True
    wal.append_intent(b"again")
    wal.close()


def test_a_settlement_the_disk_refuses_is_kept_until_it_is_written(tmp_path: Path) -> None:
    """Without preallocation a settlement may be refused: it waits, intents do not pass it, and
    nothing is lost or doubled."""
    disk = FillingDisk()
    wal = open_log(tmp_path, FakeClock(), disk=disk)
    wal.append_intent(b"i")
    disk.may_write = False
    done: list[str] = []
    assert not wal.append_settlement(b"s", admitted=True, on_written=lambda: done.append("s"))
    assert wal.waiting == 1
    assert done == []
    with pytest.raises(WalUnavailable, match="wait for room"):
        wal.append_intent(b"j")
    disk.may_write = True
    _eventually(lambda: wal.waiting == 0)
    assert done == ["s"]
    assert _payloads(wal) == [b"i", b"s"]
    wal.append_intent(b"j")
    wal.close()


def test_closing_writes_what_waited(tmp_path: Path) -> None:
    """A settlement that waits for the disk at shutdown is tried once more."""
    disk = FillingDisk()
    wal = open_log(tmp_path, FakeClock(), disk=disk)
    disk.may_write = False
    wal.append_settlement(b"s", admitted=False)
    disk.may_write = True
    wal.close()
    again = open_log(tmp_path, FakeClock())
    assert _payloads(again) == [b"s"]
    again.close()


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """A downgrade does not guess at a log it does not know."""
    folder = tmp_path / "gateway-0"
    folder.mkdir()
    header = frames.encode(Kind.SEGMENT, pack(SegmentHeader(99, "n", 1, 0, 0)))
    (folder / f"{1:020d}.wal").write_bytes(header)
    with pytest.raises(WalUnreadable, match="format 99"):
        open_log(tmp_path, FakeClock())


def test_a_segment_that_never_reached_the_disk_is_set_aside(tmp_path: Path) -> None:
    """After a power failure the newest file may be all zeros: it costs nothing older."""
    wal = open_log(tmp_path, FakeClock())
    wal.append_settlement(b"s", admitted=False)
    wal.close()
    (wal.folder / f"{9 * 10**15:020d}.wal").write_bytes(b"\0" * 4096)
    again = open_log(tmp_path, FakeClock())
    assert _payloads(again) == [b"s"]
    assert again.appended == 1
    again.close()


def test_always_is_durable_before_append_returns(tmp_path: Path) -> None:
    """Policy `always` offers the record for shipping at once."""
    wal = open_log(tmp_path, FakeClock(), fsync="always")
    wal.append_settlement(b"s", admitted=False)
    assert [frame.payload for frame in wal.read(START, 1).records] == [b"s"]
    assert wal.end == wal.committed
    wal.close()


def test_damage_inside_a_segment_costs_one_record(tmp_path: Path) -> None:
    """A flipped byte is skipped, counted and logged; the records behind it are read."""
    wal = open_log(tmp_path, FakeClock())
    for payload in (b"a" * 50, b"b" * 50, b"c" * 50):
        wal.append_settlement(payload, admitted=False)
    wal.sync()
    (path,) = wal.folder.glob("0*.wal")
    data = bytearray(path.read_bytes())
    data[data.index(b"b" * 50)] ^= 1
    path.write_bytes(data)
    assert [payload[:1] for payload in _payloads(wal)] == [b"a", b"c"]
    assert wal.damaged_bytes > 0
    wal.close()
