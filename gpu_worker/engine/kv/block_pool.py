"""The books of one KV pool: which block is used, cached or free, and by how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.shared.errors import IntegrityError

from ..sequence import Sequence
from .free_list import FreeList
from .kv_cache_groups import NO_BLOCK, first_seen_block
from .prefix_cache import PrefixCache

__all__ = ["BlockBooks"]


class BlockBooks:
    """Counts who holds which block; the block manager decides who gets one.

    Every block is in exactly one of three states::

        used     reference count = number of block tables it stands in, at least 1
        cached   count 0, content published: a hit revives it, shortage evicts it
        free     count 0, content worthless

    Cached and free blocks share one list: free ones in front, behind them the cached ones in the
    order in which they were released. So taking the first block is both "use a free one" and
    "evict the least recently used", in O(1).

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        prefix_cache: keep released blocks for sequences with the same prefix.
        window: tokens a token sees, itself included; None: all.
        kind: index of the pool among those of a model whose layers differ in their windows.

    Attributes:
        num_evictions: cached blocks that were given away because free ones ran out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        window: int | None,
        kind: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.num_evictions = 0
        self._kind = kind
        self._ref_counts = [0] * num_blocks
        self._unused = FreeList(num_blocks)
        self._num_cached = 0
        self._cache = PrefixCache(block_size, window) if prefix_cache else None

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free or cached."""
        return len(self._unused)

    @property
    def num_used(self) -> int:
        """Blocks that stand in at least one block table."""
        return self.num_blocks - len(self._unused)

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content could still be hit."""
        return self._num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def _table(self, sequence: Sequence) -> list[int]:
        kind = self._kind
        return sequence.block_table if kind == 0 else sequence.more_tables[kind - 1]

    def _take(self) -> int:
        block = self._unused.pop_front()
        if self._cache is not None and block in self._cache:
            self._cache.forget(block)
            self._num_cached -= 1
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            self._unused.remove(block)
            self._num_cached -= 1
        self._ref_counts[block] += 1

    def _drop(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if self._cache is not None and block in self._cache:
            self._unused.push_back(block)
            self._num_cached += 1
        else:
            self._unused.push_front(block)

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Recount everything from the block tables of all sequences that hold blocks.

        Raises:
            IntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        owners = list(owners)
        for sequence in owners:
            self._check_table(sequence)
        counts = Counter(block for sequence in owners for block in self._table(sequence))
        for block, count in enumerate(self._ref_counts):
            _require(count == counts[block], f"block {block}: {counts[block]} owners, {count=}")
            listed = block in self._unused
            _require(
                listed == (count == 0), f"block {block}: {count} owners, in free list {listed}"
            )
        cache = self._cache if self._cache is not None else PrefixCache(self.block_size)
        cached = [block in cache for block in self._unused]
        _require(cached == sorted(cached), "a cached block is handed out before a free one")
        _require(sum(cached) == self._num_cached, f"{sum(cached)} cached, not {self._num_cached}")
        num_free = len(cached) - sum(cached)
        total = num_free + self.num_cached + self.num_used
        _require(
            len(cached) == len(self._unused) and total == self.num_blocks,
            f"{num_free} free + {self.num_cached} cached + {self.num_used} used blocks, "
            f"not {self.num_blocks}",
        )

    def _check_table(self, sequence: Sequence) -> None:
        table, num_computed = self._table(sequence), sequence.num_computed_tokens
        first = first_seen_block(num_computed, self.window, self.block_size)
        gone = next((i for i, block in enumerate(table) if block != NO_BLOCK), len(table))
        held = table[gone:]
        _require(gone <= first, f"{sequence}: a block in its window is gone from {table}")
        _require(NO_BLOCK not in held, f"{sequence}: a block in the middle is gone from {table}")
        # What a decode puts out of the window is given up when it has filled its block.
        settled = num_computed - num_computed % self.block_size
        late = first_seen_block(settled, self.window, self.block_size) > gone
        _require(not late, f"{sequence}: blocks that left its window are still in {table}")
        _require(len(set(held)) == len(held), f"{sequence}: a block stands twice in {table}")
        _require(num_computed <= sequence.num_tokens, f"{sequence}: computed more than it has")
        _require(len(table) >= self.blocks_for(num_computed), f"{sequence}: {table} is too short")
        num_full = num_computed // self.block_size
        writable = sequence.num_writable_tokens
        _require(writable <= len(table) * self.block_size, f"{sequence}: {writable=}")
        if writable > num_computed:
            own = table[num_full : self.blocks_for(writable)]
            shared = [block for block in own if self._ref_counts[block] > 1]
            _require(not shared, f"{sequence} may write up to {writable}, but shares {shared}")
        _require(sequence.num_published_blocks <= num_full, f"{sequence}: published too early")
        for block in table[num_full:]:
            hit = self._cache is not None and block in self._cache
            _require(not hit, f"{sequence}: block {block} is cached and not fully computed")
        for block in table[self.blocks_for(num_computed) :]:
            _require(self._ref_counts[block] == 1, f"{sequence}: unwritten block {block} is shared")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
