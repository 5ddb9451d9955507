"""A doubly linked list over block numbers, in which every operation takes constant time."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FreeList"]


class FreeList:
    """The blocks no sequence holds, in the order in which they will be handed out.

    The links are two arrays indexed by block number ("intrusive": no node objects). So a block can
    leave from anywhere in O(1), as a prefix-cache hit needs. Index ``num_blocks`` is a sentinel
    that closes the ring. Starts with all blocks in ascending order.
    """

    _ABSENT = -1

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._len = num_blocks

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: int) -> bool:
        return self._next[block] != self._ABSENT

    def __iter__(self) -> Iterator[int]:
        """From the block handed out first to the one handed out last."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def pop_front(self) -> int:
        """Take the first block.

        Raises:
            IndexError: the list is empty.
        """
        block = self._next[self._sentinel]
        if block == self._sentinel:
            raise IndexError("the free list is empty")
        self.remove(block)
        return block

    def push_front(self, block: int) -> None:
        """Put a block, which is not in the list, before all others."""
        self._link(self._sentinel, block)

    def push_back(self, block: int) -> None:
        """Put a block, which is not in the list, behind all others."""
        self._link(self._prev[self._sentinel], block)

    def remove(self, block: int) -> None:
        """Take out a block from wherever it stands.

        Raises:
            ValueError: it is not in the list.
        """
        before, after = self._prev[block], self._next[block]
        if after == self._ABSENT:
            raise ValueError(f"block {block} is not in the free list")
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._ABSENT
        self._len -= 1

    def _link(self, before: int, block: int) -> None:
        if block in self:
            raise ValueError(f"block {block} is in the free list already")
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self._len += 1
