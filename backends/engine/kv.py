"""Who owns which block of the KV pool, and which blocks are worth keeping. No torch: blocks are
numbers.

A block holds the keys and values of `BLOCK_TOKENS` tokens of every layer. It is free, held by
`references` owners, or cached: nobody holds it, but what it was computed from is known, so that a
later sequence with the same beginning takes it instead of computing it. free + held + cached =
total, always. Cached blocks are given away when nothing else is free, the least recently used
first.

A block is known by a chain of hashes: `key = sha256(key of the block before, its tokens)`, from a
root over everything else that the numbers depend on and over the tenant's salt. Two tenants have
different roots, so neither can find out by timing what the other asked. On a hit the tokens are
compared too. A block is published only after the step that filled it, so a hit is never unwritten.
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise

BLOCK_TOKENS = 64


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def chain_root(*, model: str, epoch: int, salt: str | None) -> bytes:
    """Where the chains of one tenant begin. `model` names the weights and the number formats;
    without a salt all share (an engine of one's own). Lengths are hashed too: no two sets of parts
    run into the same bytes."""
    parts = (b"meterline-kv-1", model.encode(), b"%d" % epoch, (salt or "").encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()


def extend_chain(keys: list[bytes], root: bytes, tokens: Sequence[int], blocks: int) -> None:
    """Append the keys of the next full blocks, until there are `blocks`."""
    while len(keys) < blocks:
        begin = len(keys) * BLOCK_TOKENS
        text = array("i", tokens[begin : begin + BLOCK_TOKENS]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else root) + text).digest())


class BlockPool:
    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a pool needs a block")
        self.total = total
        self._references = [0] * total
        self._held = 0
        self._keys: list[bytes | None] = [None] * total
        self._texts: dict[int, tuple[int, ...]] = {}  # tokens of the published blocks
        self._published: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # published and not held, least recently used first

    @property
    def free(self) -> int:
        """What can be allocated: cached blocks too."""
        return self.total - self._held

    @property
    def used(self) -> int:
        return self._held

    @property
    def cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """`count` blocks, or None and no change. `after` is the block they should follow."""
        if count > self.free:
            return None
        blank = self.total - self._held - len(self._cached)
        while blank < count:
            self._forget(next(iter(self._cached)))
            blank += 1
        blocks: list[int] = []
        at = self._start_of_room(count) if after is None else (after + 1) % self.total
        while len(blocks) < count:
            if self.is_blank(at):
                self._references[at] = 1
                blocks.append(at)
            at = (at + 1) % self.total
        self._held += count
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less for each, and the caller's list is emptied: it owns nothing any more, so
        releasing it twice does nothing. The last block is the first to be forgotten: a beginning
        is of use to more sequences than an end."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._held -= 1
                if self._keys[block] is not None:
                    self._cached[block] = None
        blocks.clear()

    def publish(self, block: int, key: bytes, tokens: Sequence[int]) -> None:
        """A held block is complete and may be found from now on. Where the same text is already
        published, that block stays the one to be found."""
        assert self._references[block] > 0, "only a held block is being filled"
        if key not in self._published and self._keys[block] is None:
            self._published[key] = block
            self._keys[block] = key
            self._texts[block] = tuple(tokens)

    def match(self, keys: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest published beginning of this chain, with the caller as one
        more owner."""
        blocks: list[int] = []
        for number, key in enumerate(keys):
            block = self._published.get(key)
            begin = number * BLOCK_TOKENS
            if block is None or self._texts[block] != tuple(tokens[begin : begin + BLOCK_TOKENS]):
                break
            if self._references[block] == 0:
                del self._cached[block]
                self._held += 1
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def distrust(self, blocks: Sequence[int]) -> None:
        """Nobody may find these any more: what is in them is in doubt."""
        for block in blocks:
            self._forget(block)

    def references(self, block: int) -> int:
        return self._references[block]

    def share_of(self, blocks: Sequence[int]) -> float:
        """How many blocks they are, one that n owners hold counted as 1/n. Sharing begins at the
        first block and ends with the first that is not shared."""
        shared = 0.0
        for number, block in enumerate(blocks):
            owners = self._references[block]
            if owners == 1:
                return shared + len(blocks) - number
            shared += 1 / owners
        return shared

    def is_blank(self, block: int) -> bool:
        """Neither held nor cached."""
        return self._references[block] == 0 and block not in self._cached

    def check(self) -> None:
        """The invariant, for tests and for the idle engine."""
        assert all(count >= 0 for count in self._references)
        assert self._held == self.total - self._references.count(0), "blocks were miscounted"
        known = {block for block, key in enumerate(self._keys) if key is not None}
        assert known == set(self._published.values()) == set(self._texts), "a block is misfiled"
        idle = {block for block in known if self._references[block] == 0}
        assert idle == set(self._cached), "a cached block is held, or one is lost"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._published[key], self._texts[block]
            self._cached.pop(block, None)

    def _start_of_room(self, count: int) -> int:
        """Where a newcomer disturbs least: the middle of the longest free run, so that both it
        and the neighbour before it can grow in place; further left if it would not fit twice."""
        best_start, best_size, start = 0, 0, -1
        for at in range(self.total + 1):
            is_blank = at < self.total and self.is_blank(at)
            if is_blank and start < 0:
                start = at
            elif not is_blank and start >= 0:
                if at - start > best_size:
                    best_start, best_size = start, at - start
                start = -1
        if best_start == 0:
            return 0  # nobody before it
        return best_start + max(0, min(best_size // 2, best_size - 2 * count))


def is_run(blocks: Sequence[int]) -> bool:
    """Whether the blocks lie next to each other, in order."""
    return all(left + 1 == right for left, right in pairwise(blocks))
