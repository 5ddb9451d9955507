"""The blocks of one KV cache group: reference counts, and the tables of sequences."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.shared.errors import IntegrityError

from ..plan import BlockCopy
from ..sequence import Sequence
from .free_list import FreeList
from .kv_cache_groups import NO_BLOCK, KVCacheGroup, first_seen_block, most_blocks_held
from .prefix_cache import PrefixCache

__all__ = ["BlockPool"]


class BlockPool:
    """Counts references to the blocks of one pool, and extends and cuts tables of them.

    Every block is in exactly one of three states::

        used     reference count = number of block tables it stands in, at least 1
        cached   count 0, content published: a hit revives it, shortage evicts it
        free     count 0, content worthless

    Cached and free blocks share one list: free ones in front, behind them the cached ones in the
    order of their release. So taking the first block is both "use a free one" and "evict the least
    recently used", in O(1).

    Methods come in pairs: one returns how many available blocks a change takes, the other makes the
    change. The :class:`KVManager` makes it only if every pool has enough.

    Args:
        group: number of blocks, and window of the layers.
        index: of the group, and of its table among a sequence's ``block_tables``.
        block_size: tokens per block.
        prefix_cache: keep released blocks for sequences with the same prefix.
        max_span: most query tokens of one sequence in one step.

    Attributes:
        num_blocks: blocks in the pool.
        window: tokens that a token sees, itself included; None: all.
        num_evictions: cached blocks handed out because no free one was left.
    """

    def __init__(
        self,
        group: KVCacheGroup,
        index: int,
        block_size: int,
        *,
        prefix_cache: bool,
        max_span: int,
    ) -> None:
        self.num_blocks = group.num_blocks
        self.block_size = block_size
        self.window = window = group.window
        self.num_evictions = 0
        self._index = index
        self._most_held = None if window is None else most_blocks_held(window, max_span, block_size)
        self._ref_counts = [0] * group.num_blocks
        self._unused = FreeList(group.num_blocks)
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
        """Unused blocks whose content a new sequence could still hit."""
        return self._num_cached

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone; ``sys.maxsize`` if every one fits."""
        if self._most_held is not None and self._most_held <= self.num_blocks:
            return sys.maxsize
        return self.num_blocks * self.block_size

    def available_tokens(self, longest: int) -> int:
        """Tokens of new sequences that fit, if none of them is longer than ``longest`` tokens."""
        num_tokens = self.num_available * self.block_size
        if self._most_held is None:
            return num_tokens
        return max(num_tokens, self.num_available // self._most_held * longest)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at any one time until it has ``num_tokens`` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        return num_blocks if self._most_held is None else min(num_blocks, self._most_held)

    # -- prefix cache ---------------------------------------------------------------------------

    def num_hit_blocks(self, sequence: Sequence, limit: int) -> int:
        """Length in blocks of the longest cached prefix of ``sequence``, at most ``limit``."""
        return 0 if self._cache is None else self._cache.num_hit_blocks(sequence, limit)

    def hit_blocks(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The table of a cached prefix of ``num_blocks`` blocks."""
        return [] if self._cache is None else self._cache.hit_blocks(sequence, num_blocks)

    def publish(self, sequence: Sequence, num_full: int) -> None:
        """Let others hit the first ``num_full`` blocks of ``sequence``, which are computed."""
        if self._cache is not None:
            self._cache.publish(sequence, sequence.block_tables[self._index], num_full)

    # -- a table begins -------------------------------------------------------------------------

    def admission_cost(self, sequence: Sequence, prefix: list[int]) -> int:
        """Blocks that :meth:`admit` takes of those available."""
        begin, counts = self._without_unseen(sequence, prefix), self._ref_counts
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(begin)
        return num_fresh + sum(block != NO_BLOCK and counts[block] == 0 for block in begin)

    def admit(self, sequence: Sequence, prefix: list[int]) -> list[int]:
        """A table that begins with ``prefix``, hit in the cache, and goes on with fresh blocks."""
        begin = self._without_unseen(sequence, prefix)
        self._share_all(begin)  # before any fresh one is taken, which might evict them
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(begin)
        return begin + [self._take() for _ in range(num_fresh)]

    def joinable_tokens(self, sibling: Sequence, num_common: int, copies: list[BlockCopy]) -> int:
        """How many of the common tokens another sequence can share in this step.

        Copies of one step may not build on one another. Where an earlier one fills the block in
        which the common begin ends, the tokens in that block are left out.
        """
        num_full, rest = divmod(num_common, self.block_size)
        if rest:
            source = sibling.block_tables[self._index][num_full]
            if any(copy.target == source and copy.group == self._index for copy in copies):
                return num_full * self.block_size
        return num_common

    def joining_cost(self, sequence: Sequence, sibling: Sequence, num_common: int) -> int | None:
        """Blocks that :meth:`join` takes; None if the sibling has dropped one that is needed."""
        first = first_seen_block(num_common, self.window, self.block_size)
        table = sibling.block_tables[self._index]
        if NO_BLOCK in table[first : self.blocks_for(num_common)]:
            return None
        num_full = num_common // self.block_size
        return self._admitted_blocks(sequence, num_full) - num_full

    def join(
        self, sequence: Sequence, sibling: Sequence, num_common: int, copies: list[BlockCopy]
    ) -> list[int]:
        """A table that shares the full blocks of the first ``num_common`` tokens of ``sibling``.

        The begin of a block is copied, so that neither writes into a block of the other's.
        """
        num_full, rest = divmod(num_common, self.block_size)
        first = first_seen_block(num_common, self.window, self.block_size)
        known = sibling.block_tables[self._index]
        num_fresh = self._admitted_blocks(sequence, num_full) - num_full
        self._share_all(known[first:num_full])
        table = [NO_BLOCK] * first + known[first:num_full]
        table += [self._take() for _ in range(num_fresh)]
        if rest:
            copies.append(BlockCopy(known[num_full], table[num_full], self._index))
        return table

    def fork(self, parent: Sequence) -> list[int]:
        """A table that shares all blocks with computed tokens of ``parent``."""
        num_blocks = self.blocks_for(parent.num_computed_tokens)
        table = parent.block_tables[self._index][:num_blocks]
        self._share_all(table)
        return table

    # -- a table grows --------------------------------------------------------------------------

    def growth(self, sequence: Sequence, stop: int) -> int:
        """Blocks that :meth:`grow` takes."""
        table = sequence.block_tables[self._index]
        num_fresh = max(self.blocks_for(stop) - len(table), 0)
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return num_fresh + (offset != 0 and self._ref_counts[table[index]] > 1)

    def grow(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> None:
        """Make positions ``[num_computed_tokens, stop)`` writable by ``sequence`` alone."""
        table = sequence.block_tables[self._index]
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset and self._ref_counts[table[index]] > 1:
            copies.append(BlockCopy(table[index], self._take(), self._index))
            self._drop(table[index])
            table[index] = copies[-1].target
        for _ in range(self.blocks_for(stop) - len(table)):
            table.append(self._take())

    def victims_needed(
        self,
        sequence: Sequence,
        prefix: list[int],
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """See :meth:`KVManager.victims_needed`; ``prefix`` is its hit in the cache."""
        missing = self.admission_cost(sequence, prefix) - self.num_available
        tables = [victim.block_tables[self._index] for victim in victims]
        # What they hold, shared or not, is quickly summed. If even that is not enough, it is so in
        # every step for as long as the sequence waits.
        if missing + spare(len(victims)) > sum(map(len, tables)):
            return None
        growth = {other: self.growth(other, stop) for other, stop in stops().items()}
        missing += sum(growth.values())
        kept, holders = set(self._without_unseen(sequence, prefix)), Counter[int]()
        for count, (victim, table) in enumerate(zip(victims, tables, strict=True)):
            if missing + spare(count) <= 0:
                return count
            missing -= growth[victim]
            for block in table:
                if block != NO_BLOCK and block not in kept:
                    holders[block] += 1
                    missing -= holders[block] == self._ref_counts[block]
        return len(victims) if missing + spare(len(victims)) <= 0 else None

    # -- a table shrinks ------------------------------------------------------------------------

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind the tokens that ``sequence`` has."""
        table = sequence.block_tables[self._index]
        for _ in range(len(table) - self.blocks_for(len(sequence.token_ids))):
            self._drop(table.pop())

    def drop_out_of_window(self, sequence: Sequence) -> None:
        """Give up the blocks that no token of ``sequence`` still to be computed will see.

        Computed tokens alone decide, and their number never falls while a sequence has blocks. So
        a rejected draft, or a failed and repeated step, finds all that it sees.
        """
        if self.window is None:
            return
        table = sequence.block_tables[self._index]
        first = first_seen_block(sequence.num_computed_tokens, self.window, self.block_size)
        gone = first
        while gone and table[gone - 1] != NO_BLOCK:
            gone -= 1
        for index in range(gone, first):  # the first one is the first to be evicted
            self._drop(table[index])
            table[index] = NO_BLOCK

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of ``sequence``.

        Its last block becomes the first to be evicted: without its predecessors a block cannot be
        hit, so eviction shortens a prefix from its end.
        """
        for block in reversed(sequence.block_tables[self._index]):
            if block != NO_BLOCK:
                self._drop(block)

    # -- references -----------------------------------------------------------------------------

    def _take(self) -> int:
        block = self._unused.pop_front()
        if self._cache is not None and block in self._cache:
            self._cache.forget(block)
            self._num_cached -= 1
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def _share_all(self, blocks: list[int]) -> None:
        for block in blocks:
            if block == NO_BLOCK:
                continue
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

    def _without_unseen(self, sequence: Sequence, prefix: list[int]) -> list[int]:
        """``prefix``; if the host keeps more tokens, only the blocks that are still seen then."""
        first = first_seen_block(sequence.num_swapped_tokens, self.window, self.block_size)
        if first == 0 or sequence.num_swapped_tokens <= len(prefix) * self.block_size:
            return prefix
        return [NO_BLOCK] * first + prefix[first:]

    def _admitted_blocks(self, sequence: Sequence, num_hit: int) -> int:
        """Length of the table of a sequence that is admitted after hitting ``num_hit`` blocks."""
        num_blocks = self.blocks_for(sequence.num_tokens)
        if self._most_held is None:
            return num_blocks
        start = max(num_hit * self.block_size, sequence.num_swapped_tokens)
        first = first_seen_block(start, self.window, self.block_size)
        return min(num_blocks, first + self._most_held)

    # -- checks ---------------------------------------------------------------------------------

    def check_integrity(self, owners: list[Sequence]) -> None:
        """Recount everything from the block tables of all sequences that hold blocks.

        Raises:
            IntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        for sequence in owners:
            self._check_table(sequence)
        counts = Counter(block for owner in owners for block in owner.block_tables[self._index])
        for block, count in enumerate(self._ref_counts):
            _require(count == counts[block], f"block {block}: {counts[block]} owners, {count=}")
            listed = block in self._unused
            _require(
                listed == (count == 0), f"block {block}: {count} owners, in free list {listed}"
            )
        cached = [self._cache is not None and block in self._cache for block in self._unused]
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
        table, num_computed = sequence.block_tables[self._index], sequence.num_computed_tokens
        first = first_seen_block(num_computed, self.window, self.block_size)
        gone = next((i for i, block in enumerate(table) if block != NO_BLOCK), len(table))
        held = table[gone:]
        _require(gone <= first, f"{sequence}: a block in its window is gone from {table}")
        _require(NO_BLOCK not in held, f"{sequence}: a block in the middle is gone from {table}")
        # A block that a decode step pushes out of the window is dropped when the next one is full.
        filled = num_computed - num_computed % self.block_size
        late = first_seen_block(filled, self.window, self.block_size) > gone
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
