"""The block pool under any interleaving."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from backends.engine.kv import (
    BLOCK_TOKENS,
    BlockPool,
    blocks_for,
    chain_root,
    extend_chain,
    is_run,
)

ROOTS = [chain_root(model="m", epoch=0, salt=salt) for salt in ("ada", "bob")]


def text_of(*blocks: int) -> list[int]:
    """A text whose i-th block is that number, 64 times."""
    return [block for block in blocks for _ in range(BLOCK_TOKENS)]


def keys_of(root: bytes, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(keys, root, tokens, len(tokens) // BLOCK_TOKENS)
    return keys


class PoolMachine(RuleBasedStateMachine):
    """Owners take, grow, share, publish, find and give back blocks in any order; a plain count
    and the texts that were written are the model."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[int]] = []
        self.written: dict[int, tuple[int, tuple[int, ...]]] = {}  # by block: tenant, its text

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

    @rule(owner=owners, tenant=st.integers(0, 1), names=st.lists(st.integers(0, 1), max_size=4))
    def publish(self, owner: list[int], tenant: int, names: list[int]) -> None:
        """The owner's blocks hold this text from now on; blocks are written once only."""
        if any(block in self.written for block in owner[: len(names)]):
            return
        keys = keys_of(ROOTS[tenant], text_of(*names))
        for number, (block, key) in enumerate(zip(owner, keys, strict=False)):
            self.pool.publish(block, key, text_of(names[number]))
            self.written[block] = (tenant, tuple(names[: number + 1]))

    @rule(
        target=owners, tenant=st.integers(0, 1),
        names=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    )  # fmt: skip
    def find(self, tenant: int, names: list[int]) -> list[int]:
        """What is found was written by the same tenant after the same text."""
        tokens = text_of(*names)
        found = self.pool.match(keys_of(ROOTS[tenant], tokens), tokens)
        for number, block in enumerate(found):
            assert self.written[block] == (tenant, tuple(names[: number + 1]))
        self.held.append(found)
        return found

    @rule(owner=consumes(owners))
    def release(self, owner: list[int]) -> None:
        self.pool.release(owner)
        self.pool.release(owner)
        assert owner == []

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        taken_away = [b for b in self.written if self.pool.is_blank(b)]
        for block in taken_away:
            del self.written[block]
        alive = [block for blocks in self.held for block in blocks]
        assert self.pool.used == len(set(alive))
        assert self.pool.used + self.pool.free == self.pool.total
        assert all(self.pool.references(b) == alive.count(b) for b in range(self.pool.total))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_pool_never_leaks_nor_frees_twice = PoolMachine.TestCase


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    """A full pool takes cached blocks: of the text released first, from its last block on."""
    pool = BlockPool(4)
    old, new = text_of(1, 2), text_of(3, 4)
    for tokens in (old, new):
        blocks = pool.allocate(2)
        assert blocks is not None
        for number, key in enumerate(keys_of(ROOTS[0], tokens)):
            pool.publish(blocks[number], key, tokens[number * 64 : number * 64 + 64])
        pool.release(blocks)
    assert (pool.free, pool.used, pool.cached) == (4, 0, 4)
    assert pool.allocate(1) is not None
    found = pool.match(keys_of(ROOTS[0], old), old)
    assert len(found) == 1
    pool.release(found)
    assert len(pool.match(keys_of(ROOTS[0], new), new)) == 2


def test_a_hit_compares_the_text() -> None:
    """Were two texts to share a key, the other's block would still not be taken."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    key = keys_of(ROOTS[0], text_of(1))[0]
    pool.publish(blocks[0], key, text_of(1))
    assert pool.match([key], text_of(2)) == []
    assert pool.match([key], text_of(1)) == blocks


@pytest.mark.parametrize(
    "other",
    [
        chain_root(model="m", epoch=1, salt="ada"),
        chain_root(model="n", epoch=0, salt="ada"),
        chain_root(model="m", epoch=0, salt=None),
    ],
)
def test_roots_differ(other: bytes) -> None:
    """Another version of the weights, another model and another tenant find nothing."""
    assert other not in ROOTS
    assert other != chain_root(model="m", epoch=0, salt="ada")


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
