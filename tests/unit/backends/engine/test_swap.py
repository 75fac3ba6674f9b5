"""Swap space: bounded, exact, and honest about what did not come back. No torch."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.swap import Saved, SwapSpace, file_in
from tests.fakes.clock import FakeClock

SIZE = 96
FILES: list[BinaryIO] = []  # made by the test that runs


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for file in FILES:
        file.close()
    FILES.clear()


class Device:
    """A pool of blocks of `SIZE` bytes; each move takes `took_s` of the clock."""

    def __init__(self, clock: FakeClock, *, took_s: float = 0.0) -> None:
        self.blocks: dict[int, bytes] = {}
        self._clock = clock
        self._took_s = took_s

    def read_block(self, block: int) -> memoryview:
        self._clock.advance(self._took_s)
        return memoryview(self.blocks[block])

    def write_block(self, block: int, data: memoryview) -> None:
        self._clock.advance(self._took_s)
        self.blocks[block] = bytes(data)


class Rig:
    """A device with eight blocks of random bytes, and swap space beside it."""

    def __init__(self, *, memory: int, file: int, took_s: float = 0.0) -> None:
        rng = random.Random(1)
        clock = FakeClock()
        self.device = Device(clock, took_s=took_s)
        self.device.blocks = {block: rng.randbytes(SIZE) for block in range(8)}
        self.files: list[BinaryIO] = []
        self.space = SwapSpace(
            self.device, clock=clock, block_bytes=SIZE, memory_blocks=memory, file_blocks=file,
            open_file=self._open,
        )  # fmt: skip

    def _open(self) -> BinaryIO:
        self.files.append(file_in(None)())
        FILES.append(self.files[-1])
        return self.files[-1]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def saved(self, blocks: list[int]) -> Saved:
        saved = self.space.save(blocks)
        assert saved is not None
        return saved


def test_blocks_come_back_as_they_went() -> None:
    """Memory first, the rest in the file; they may come back to other blocks, less those that are
    known by then."""
    rig = Rig(memory=2, file=2)
    before = dict(rig.device.blocks)
    saved = rig.saved([4, 5, 6, 7])
    assert len(rig.files) == 1
    assert rig.space.used == 4
    assert rig.space.load(saved, [0, 1, 2], skip=1)
    assert [rig.device.blocks[b] for b in (0, 1, 2)] == [before[b] for b in (5, 6, 7)]
    assert rig.space.used == 0
    rig.space.close()
    assert rig.files[0].closed


def test_it_is_bounded() -> None:
    """What does not fit whole is not taken at all, and space given back can be used again."""
    rig = Rig(memory=2, file=1)
    assert rig.space.save([0, 1, 2, 3]) is None
    first = rig.saved([0, 1, 2])
    assert rig.space.price_s(1) is None
    assert rig.space.save([3]) is None
    rig.space.drop(first)
    rig.space.drop(first)
    assert rig.space.used == 0
    assert rig.space.price_s(3) is not None


@pytest.mark.parametrize("damage", ["truncated", "one bit"])
def test_a_damaged_file_is_noticed(damage: str) -> None:
    """A block that is not what was written is not given out, and its place can be used again."""
    rig = Rig(memory=0, file=2)
    saved = rig.saved([3, 4])
    number = rig.files[0].fileno()
    if damage == "truncated":
        os.ftruncate(number, SIZE)
    else:
        byte = os.pread(number, 1, SIZE + 7)
        os.pwrite(number, bytes([byte[0] ^ 4]), SIZE + 7)
    assert not rig.space.load(saved, [0, 1])
    assert (rig.space.used, rig.space.lost) == (0, 1)
    again = rig.saved([5, 6])
    assert rig.space.load(again, [0, 1])


def test_a_file_that_is_gone_is_noticed() -> None:
    """Its descriptor is of no use any more: neither loading nor saving raises."""
    rig = Rig(memory=0, file=2)
    saved = rig.saved([3])
    rig.files[0].close()
    assert not rig.space.load(saved, [0])
    assert rig.space.save([3]) is None
    assert rig.space.used == 0


def test_a_file_that_cannot_be_made_leaves_memory_alone() -> None:
    """Nothing is saved, nothing is taken."""
    rig = Rig(memory=1, file=1)

    def fail() -> BinaryIO:
        raise OSError("no space left")

    space = SwapSpace(
        rig.device, clock=FakeClock(), block_bytes=SIZE, memory_blocks=1, file_blocks=1,
        open_file=fail,
    )  # fmt: skip
    assert space.save([0, 1]) is None
    assert space.used == 0
    assert space.save([0]) is not None


def test_the_price_is_what_moving_took() -> None:
    """After some moves of 10 ms a block, there and back is expected to take 20 ms a block."""
    rig = Rig(memory=4, file=0, took_s=0.01)
    for _ in range(20):
        rig.space.measure(0)
    price_s = rig.space.price_s(3)
    assert price_s is not None
    assert price_s == pytest.approx(0.06, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), memory=st.integers(0, 4), file=st.integers(0, 5))
def test_whatever_order_nothing_is_mixed_up(data: st.DataObject, memory: int, file: int) -> None:
    """Random saves, loads and drops: what comes back is what went, and space adds up."""
    with closing(Rig(memory=memory, file=file)) as rig:
        play(rig, data, memory + file)


def play(rig: Rig, data: st.DataObject, limit: int) -> None:
    held: list[tuple[Saved, list[bytes]]] = []
    for _ in range(30):
        if held and data.draw(st.booleans()):
            saved, texts = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if data.draw(st.booleans()):
                rig.space.drop(saved)
                continue
            blocks = data.draw(st.permutations(range(8)))[: len(texts)]
            assert rig.space.load(saved, blocks)
            assert [rig.device.blocks[b] for b in blocks] == texts
        else:
            blocks = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True))
            texts = [rig.device.blocks[b] for b in blocks]
            has_room = rig.space.used + len(blocks) <= limit
            taken = rig.space.save(blocks)
            assert (taken is not None) == has_room
            if taken is not None:
                held.append((taken, texts))
        assert rig.space.used == sum(len(texts) for _, texts in held) <= limit
