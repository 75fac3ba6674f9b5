"""Who owns which block of the KV pool. No torch: blocks are numbers.

A block holds the keys and values of `BLOCK_TOKENS` tokens of every layer. Each block is free or
held by `references` owners; free + held = total, always. Blocks of one sequence are placed next
to each other when they can be, because attention reads such a run without copying it.
"""

from collections.abc import Sequence
from itertools import pairwise

BLOCK_TOKENS = 64


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a pool needs a block")
        self.total = total
        self._references = [0] * total
        self._free = total

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.total - self._free

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """`count` blocks, or None and no change. `after` is the block they should follow."""
        if count > self._free:
            return None
        blocks: list[int] = []
        at = self._start_of_room(count) if after is None else (after + 1) % self.total
        while len(blocks) < count:
            if self._references[at] == 0:
                self._references[at] = 1
                blocks.append(at)
            at = (at + 1) % self.total
        self._free -= count
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less for each, and the caller's list is emptied: it owns nothing any more, so
        releasing it twice does nothing."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            self._free += self._references[block] == 0
        blocks.clear()

    def references(self, block: int) -> int:
        return self._references[block]

    def check(self) -> None:
        """The invariant, for tests and for the idle engine."""
        assert all(count >= 0 for count in self._references)
        assert self._free == self._references.count(0), "free blocks were miscounted"

    def _start_of_room(self, count: int) -> int:
        """Where a newcomer disturbs least: the middle of the longest free run, so that both it
        and the neighbour before it can grow in place; further left if it would not fit twice."""
        best_start, best_size, start = 0, 0, -1
        for at, references in enumerate([*self._references, 1]):
            if references == 0 and start < 0:
                start = at
            elif references and start >= 0:
                if at - start > best_size:
                    best_start, best_size = start, at - start
                start = -1
        if best_start == 0:
            return 0  # nobody before it
        return best_start + max(0, min(best_size // 2, best_size - 2 * count))


def is_run(blocks: Sequence[int]) -> bool:
    """Whether the blocks lie next to each other, in order."""
    return all(left + 1 == right for left, right in pairwise(blocks))
