"""The block pool under any interleaving."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from backends.engine.kv import BlockPool, blocks_for, is_run


class PoolMachine(RuleBasedStateMachine):
    """Owners take, grow, share and give back blocks in any order; a plain count is the model."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[int]] = []

    @rule(target=owners, count=st.integers(1, 8))
    def allocate(self, count: int) -> list[int]:
        before = self.pool.free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is None:
            assert self.pool.free == before
            return []
        assert len(set(blocks)) == count
        self.held.append(blocks)
        return blocks

    @rule(owner=owners)
    def grow(self, owner: list[int]) -> None:
        if owner:
            more = self.pool.allocate(1, after=owner[-1])
            owner += more or []

    @rule(target=owners, owner=owners)
    def share(self, owner: list[int]) -> list[int]:
        self.pool.share(owner)
        copy = list(owner)
        self.held.append(copy)
        return copy

    @rule(owner=consumes(owners))
    def release(self, owner: list[int]) -> None:
        self.pool.release(owner)
        self.pool.release(owner)
        assert owner == []

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        alive = [block for blocks in self.held for block in blocks]
        assert self.pool.used == len(set(alive))
        assert self.pool.used + self.pool.free == self.pool.total
        assert all(self.pool.references(b) == alive.count(b) for b in range(self.pool.total))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_pool_never_leaks_nor_frees_twice = PoolMachine.TestCase


def test_freeing_a_free_block_is_an_error() -> None:
    """A double free by two owners of one list copy is caught, not counted."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    copy = list(blocks)
    pool.release(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.release(copy)


def test_a_sequence_grows_in_place() -> None:
    """Two sequences that grow in turn both stay one run, so that attention need not copy."""
    pool = BlockPool(32)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    for blocks in [first, second] * 5:
        blocks += pool.allocate(1, after=blocks[-1]) or []
    assert is_run(first)
    assert is_run(second)
    assert len(first) == len(second) == 7


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    """A block holds 64 tokens."""
    assert blocks_for(tokens) == blocks
