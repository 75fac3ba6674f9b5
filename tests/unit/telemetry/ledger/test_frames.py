"""Framing survives every cut and every flipped bit."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.ledger import frames
from telemetry.ledger.frames import Kind

payloads = st.lists(st.binary(max_size=60), max_size=8)


def _log(items: list[bytes]) -> bytes:
    return b"".join(frames.encode(Kind.SETTLEMENT, item) for item in items)


@given(payloads, st.integers(0, 40))
def test_what_was_encoded_is_read_back(items: list[bytes], padding: int) -> None:
    """All frames come back in order, and zero padding behind them is neither data nor damage."""
    found = frames.scan(_log(items) + b"\0" * padding)
    assert [frame.payload for frame in found.frames] == items
    assert (found.damaged, found.tail) == (0, 0)
    assert found.end == len(_log(items))


@given(payloads, st.data())
def test_a_cut_loses_only_the_frames_behind_it(items: list[bytes], data: st.DataObject) -> None:
    """Whatever byte the log is cut at, the whole frames before it are all there."""
    log = _log(items)
    cut = data.draw(st.integers(0, len(log)))
    found = frames.scan(log[:cut])
    whole = [frame for frame in frames.scan(log).frames if frame.end <= cut]
    assert found.frames == whole
    assert found.end + found.tail <= cut


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8), st.data())
def test_a_flipped_bit_costs_at_most_the_frame_it_is_in(
    items: list[bytes], data: st.DataObject
) -> None:
    """Every frame but the damaged one is read, and nothing is read that was not written."""
    log = bytearray(_log(items))
    bit = data.draw(st.integers(0, len(log) * 8 - 1))
    log[bit // 8] ^= 1 << bit % 8
    ends = [frame.end for frame in frames.scan(_log(items)).frames]
    hit = next(n for n, end in enumerate(ends) if bit // 8 < end)
    found = frames.scan(bytes(log))
    assert [frame.payload for frame in found.frames] == items[:hit] + items[hit + 1 :]
    assert found.damaged + found.tail > 0


@given(st.binary(max_size=400))
def test_noise_is_never_a_frame(noise: bytes) -> None:
    """Bytes that were not written by us yield frames only if their check sum holds."""
    for frame in frames.scan(noise).frames:
        assert frames.encode(Kind(frame.kind), frame.payload) in noise


def test_a_limit_stops_early_and_the_rest_is_no_damage() -> None:
    """Reading in batches sees each frame once."""
    log = _log([b"a", b"b", b"c"])
    first = frames.scan(log, limit=2)
    rest = frames.scan(log[first.end :])
    assert [frame.payload for frame in first.frames + rest.frames] == [b"a", b"b", b"c"]
    assert first.tail == 0
