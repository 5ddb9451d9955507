"""Who owns which block of the KV pool: reference counts, sharing, copy-on-write, eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.shared.errors import IntegrityError

from .free_list import FreeList
from .plan import BlockCopy
from .prefix_cache import PrefixCache
from .sequence import Sequence

__all__ = ["BlockManager"]


class BlockManager:
    """Hands the blocks of the KV pool to sequences and takes them back.

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

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        prefix_cache: keep released blocks for sequences with the same prefix.

    Attributes:
        num_evictions: cached blocks that were given away because free ones ran out.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._unused = FreeList(num_blocks)
        self._num_cached = 0
        self._cache = PrefixCache(block_size) if prefix_cache else None

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

    def can_admit(self, sequence: Sequence, spare: int, gained: int = 0) -> bool:
        """Whether :meth:`try_admit` would succeed if ``gained`` more blocks were available."""
        num_available = self.num_available + gained
        if num_available <= spare:  # the last token always needs a block of its own
            return False
        prefix = self._cache.match(sequence) if self._cache is not None else []
        num_fresh = self.blocks_for(sequence.num_tokens) - len(prefix)
        num_revived = sum(self._ref_counts[block] == 0 for block in prefix)
        return num_fresh + num_revived + spare <= num_available

    def try_admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence without blocks room for all tokens it has, prefix hits included.

        All or nothing: False leaves everything as it was. On success the tokens found in the prefix
        cache count as computed.

        Args:
            sequence: holds no block.
            spare: blocks that must still be available afterwards.
        """
        if self.num_available <= spare:  # the last token always needs a block of its own
            return False
        prefix = self._cache.match(sequence) if self._cache is not None else []
        num_fresh = self.blocks_for(sequence.num_tokens) - len(prefix)
        num_revived = sum(self._ref_counts[block] == 0 for block in prefix)
        if num_fresh + num_revived + spare > self.num_available:
            return False
        for block in prefix:  # before any fresh one is taken, which might evict them
            self._share(block)
        sequence.block_table.extend(prefix)
        sequence.block_table.extend([self._take() for _ in range(num_fresh)])
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_writable_tokens = len(sequence.block_table) * self.block_size
        sequence.num_published_blocks = len(prefix)
        return True

    def try_reserve(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> bool:
        """Make positions ``[num_computed_tokens, stop)`` writable by ``sequence`` alone.

        All or nothing: False leaves everything as it was.

        Args:
            sequence: holds the blocks of its computed tokens.
            stop: one past the last position that will be written.
            copies: gets the copy that must run before the writing, if the first of these positions
                lies in a block that is shared with another sequence.
        """
        table = sequence.block_table
        num_fresh = self.blocks_for(stop) - len(table)
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        unshare = offset != 0 and self._ref_counts[table[index]] > 1
        if num_fresh <= 0 and not unshare:
            sequence.num_writable_tokens = len(table) * self.block_size
            return True
        if max(num_fresh, 0) + unshare > len(self._unused):
            return False
        if unshare:
            copies.append(BlockCopy(source=table[index], target=self._take()))
            self._drop(table[index])
            table[index] = copies[-1].target
        table.extend([self._take() for _ in range(num_fresh)])
        sequence.num_writable_tokens = len(table) * self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others hit the blocks of ``sequence`` that are full of computed tokens.

        Called only after the step that computed them has succeeded.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if self._cache is not None and num_full > sequence.num_published_blocks:
            self._cache.publish(sequence, num_full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which holds no block, share everything computed for ``parent``.

        The child's tokens begin with the parent's computed ones. Blocks are copied later, when one
        of the two writes into the last, partly filled one.
        """
        num_shared = self.blocks_for(parent.num_computed_tokens)
        for block in parent.block_table[:num_shared]:
            self._share(block)
        child.block_table = parent.block_table[:num_shared]
        child.num_computed_tokens = parent.num_computed_tokens
        parent.num_writable_tokens = child.num_writable_tokens = 0
        child.num_published_blocks = parent.num_published_blocks
        child.block_digests = parent.block_digests[: parent.num_published_blocks]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from ``sequence``; nothing of it counts as computed any more.

        Its last block becomes the first to be evicted: without its predecessors a block cannot be
        hit, so a prefix is best eaten from its end.
        """
        for block in reversed(sequence.block_table):
            self._drop(block)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0
        sequence.num_writable_tokens = 0
        sequence.num_published_blocks = 0

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
        counts = Counter(block for sequence in owners for block in sequence.block_table)
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
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        _require(len(set(table)) == len(table), f"{sequence}: a block stands twice in {table}")
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
