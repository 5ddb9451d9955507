"""Who owns which block of the KV pool: reference counts, sharing, copy-on-write, eviction."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from penstock.shared.errors import IntegrityError

from .free_list import FreeList
from .kinds import NO_BLOCK, first_seen_block, most_blocks_held
from .plan import BlockCopy
from .prefix_cache import PrefixCache
from .sequence import Sequence

__all__ = ["BlockManager"]


class BlockManager:
    """Hands the blocks of one KV pool to sequences and takes them back.

    After PagedAttention (Kwon et al., 2023). Knows block numbers, never tensors.

    Every block is in exactly one of three states::

        used     reference count = number of block tables it stands in, at least 1
        cached   count 0, content published: a hit revives it, shortage evicts it
        free     count 0, content worthless

    Cached and free blocks share one list: free ones in front, behind them the cached ones in the
    order in which they were released. So taking the first block is both "use a free one" and
    "evict the least recently used", in O(1).

    Who may write: positions from ``num_computed_tokens`` on are written by their sequence alone,
    so only the block they begin in can be both partly computed and shared, and only that one is
    ever copied (:meth:`try_reserve`). All blocks behind it belong to one sequence.

    Where no layer sees further back than a window, blocks that lie wholly before it are given up
    as the sequence goes on (:meth:`slide`), and ``NO_BLOCK`` takes their place in its table.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        prefix_cache: keep released blocks for sequences with the same prefix.
        window: tokens a token sees, itself included; None: all.
        max_span: most query tokens of one sequence in one step; of interest with a window only.
        kind: index of the pool among those of a model whose layers differ in their windows.

    Attributes:
        num_evictions: cached blocks that were given away because free ones ran out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        window: int | None = None,
        max_span: int = 1,
        kind: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.num_evictions = 0
        self._kind = kind
        self._most_held = None if window is None else most_blocks_held(window, max_span, block_size)
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

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone; ``sys.maxsize`` if any does."""
        if self._most_held is not None and self._most_held <= self.num_blocks:
            return sys.maxsize
        return self.num_blocks * self.block_size

    @property
    def kinds(self) -> tuple[BlockManager]:
        """Itself: all layers of the model share their blocks."""
        return (self,)

    def available_tokens(self, longest: int) -> int:
        """Tokens of new sequences for which there is room, none of them over ``longest``."""
        num_tokens = self.num_available * self.block_size
        if self._most_held is None:
            return num_tokens
        return max(num_tokens, self.num_available // self._most_held * longest)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at the same time until it has ``num_tokens`` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        return num_blocks if self._most_held is None else min(num_blocks, self._most_held)

    def try_admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence without blocks room for all tokens it has, prefix hits included.

        With a window, for as many as it can hold at the same time. All or nothing: False leaves
        everything as it was. On success the tokens found in the prefix cache count as computed.

        Args:
            sequence: holds no block.
            spare: blocks that must still be available afterwards.
        """
        if self.num_available <= spare:  # the last token always needs a block of its own
            return False
        prefix = self._cache.match(sequence) if self._cache is not None else []
        if self.admission_cost(sequence, prefix) + spare > self.num_available:
            return False
        self.admit(sequence, prefix)
        return True

    def victims_needed(
        self, sequence: Sequence, spare: int, victims: Iterable[Sequence]
    ) -> int | None:
        """How many of ``victims``, in their order, must lose their blocks to admit ``sequence``.

        None if all of them together would not do. Blocks that victims share with others are counted
        though they may not become available.
        """
        prefix = self._cache.match(sequence) if self._cache is not None else []
        missing = self.admission_cost(sequence, prefix) + spare - self.num_available
        return self.victims_holding(missing, victims)

    def victims_holding(self, num_blocks: int, victims: Iterable[Sequence]) -> int | None:
        """How many of ``victims``, in their order, hold ``num_blocks``; None if all hold less."""
        count = 0
        for victim in victims:
            if num_blocks <= 0:
                break
            table = self._table(victim)
            num_blocks -= len(table) - (table.count(NO_BLOCK) if self.window is not None else 0)
            count += 1
        return count if num_blocks <= 0 else None

    def admission_cost(self, sequence: Sequence, prefix: list[int]) -> int:
        """Blocks that :meth:`admit` takes of those available."""
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(prefix)
        counts = self._ref_counts
        return num_fresh + sum(block != NO_BLOCK and counts[block] == 0 for block in prefix)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let the table of ``sequence`` begin with ``prefix``, and add fresh blocks.

        Args:
            sequence: holds no block.
            prefix: as the prefix cache gave it.
        """
        for block in prefix:  # before any fresh one is taken, which might evict them
            if block != NO_BLOCK:
                self._share(block)
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(prefix)
        table = self._table(sequence)
        table.extend(prefix)
        table.extend([self._take() for _ in range(num_fresh)])
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_writable_tokens = len(table) * self.block_size
        sequence.num_published_blocks = len(prefix)

    def try_reserve(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> bool:
        """Make positions ``[num_computed_tokens, stop)`` writable by ``sequence`` alone.

        All or nothing: False leaves everything as it was.

        Args:
            sequence: holds the blocks of its computed tokens.
            stop: one past the last position that will be written.
            copies: gets the copy that must run before the writing, if the first of these positions
                lies in a block that is shared with another sequence.
        """
        table = self._table(sequence)
        num_fresh = self.blocks_for(stop) - len(table)
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        unshare = offset != 0 and self._ref_counts[table[index]] > 1
        if num_fresh <= 0 and not unshare:
            sequence.num_writable_tokens = len(table) * self.block_size
            return True
        if max(num_fresh, 0) + unshare > len(self._unused):
            return False
        if unshare:
            copies.append(BlockCopy(table[index], self._take(), self._kind))
            self._drop(table[index])
            table[index] = copies[-1].target
        table.extend([self._take() for _ in range(num_fresh)])
        sequence.num_writable_tokens = len(table) * self.block_size
        return True

    def can_reserve(self, sequence: Sequence, stop: int) -> bool:
        """Whether :meth:`try_reserve` would succeed."""
        table = self._table(sequence)
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        unshare = offset != 0 and self._ref_counts[table[index]] > 1
        return max(self.blocks_for(stop) - len(table), 0) + unshare <= len(self._unused)

    def settle(self, sequence: Sequence) -> None:
        """Take note that tokens of ``sequence`` were computed.

        Others can hit the blocks that are full now, and those that left the window are given up.
        Called only after the step that computed the tokens has succeeded.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full > sequence.num_published_blocks:
            self.publish(sequence, num_full)
            sequence.num_published_blocks = num_full
        if self.window is not None:
            self.slide(sequence)

    def publish(self, sequence: Sequence, num_full: int) -> None:
        """Let others hit the first ``num_full`` blocks of ``sequence``, which are computed."""
        if self._cache is not None:
            self._cache.publish(sequence, self._table(sequence), num_full)

    def slide(self, sequence: Sequence) -> None:
        """Give up the blocks that no token of ``sequence`` still to be computed will see.

        Decided by computed tokens alone, whose number never falls while a sequence has blocks; so
        a draft that is rejected, or a step that fails and is repeated, finds all it sees.
        """
        table = self._table(sequence)
        first = first_seen_block(sequence.num_computed_tokens, self.window, self.block_size)
        gone = first
        while gone and table[gone - 1] != NO_BLOCK:
            gone -= 1
        for index in range(gone, first):  # the first one is the first to be evicted
            self._drop(table[index])
            table[index] = NO_BLOCK

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which holds no block, share everything computed for ``parent``.

        The child's tokens begin with the parent's computed ones. Blocks are copied later, when one
        of the two writes into the last, partly filled one.
        """
        shared = self._table(parent)[: self.blocks_for(parent.num_computed_tokens)]
        for block in shared:
            if block != NO_BLOCK:
                self._share(block)
        self._table(child).extend(shared)
        child.num_computed_tokens = parent.num_computed_tokens
        parent.num_writable_tokens = child.num_writable_tokens = 0
        child.num_published_blocks = parent.num_published_blocks
        child.block_digests = parent.block_digests[: parent.num_published_blocks]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from ``sequence``; nothing of it counts as computed any more.

        Its last block becomes the first to be evicted: without its predecessors a block cannot be
        hit, so a prefix is best eaten from its end.
        """
        table = self._table(sequence)
        for block in reversed(table):
            if block != NO_BLOCK:
                self._drop(block)
        table.clear()
        sequence.num_computed_tokens = 0
        sequence.num_writable_tokens = 0
        sequence.num_published_blocks = 0

    def covered(self, sequence: Sequence, limit: int) -> int:
        """Blocks of the longest prefix, of at most ``limit``, that :meth:`prefix` can give."""
        return 0 if self._cache is None else self._cache.covered(sequence, limit)

    def prefix(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The begin of a table for ``sequence`` after hitting ``num_blocks`` :meth:`covered`."""
        return [] if self._cache is None else self._cache.table(sequence, num_blocks)

    def writable_tokens(self, sequence: Sequence) -> int:
        """Tokens for which ``sequence`` has blocks."""
        return len(self._table(sequence)) * self.block_size

    def _table(self, sequence: Sequence) -> list[int]:
        kind = self._kind
        return sequence.block_table if kind == 0 else sequence.more_tables[kind - 1]

    def _admitted_blocks(self, sequence: Sequence, num_hit: int) -> int:
        """Length of the table of a sequence that is admitted after hitting ``num_hit`` blocks."""
        num_blocks = self.blocks_for(sequence.num_tokens)
        if self._most_held is None:
            return num_blocks
        first = first_seen_block(num_hit * self.block_size, self.window, self.block_size)
        return min(num_blocks, first + self._most_held)

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
