"""Who owns which block of the KV pool: reference counts, sharing, copy-on-write, eviction."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ..plan import BlockCopy
from ..sequence import Sequence
from .block_pool import BlockBooks
from .kv_cache_groups import NO_BLOCK, first_seen_block, most_blocks_held

__all__ = ["BlockManager"]


class BlockManager(BlockBooks):
    """Hands the blocks of one KV pool to sequences and takes them back.

    After PagedAttention (Kwon et al., 2023). Knows block numbers, never tensors.

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
        super().__init__(
            num_blocks, block_size, prefix_cache=prefix_cache, window=window, kind=kind
        )
        self._most_held = None if window is None else most_blocks_held(window, max_span, block_size)

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
        self,
        sequence: Sequence,
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """How many of ``victims``, in their order, must lose their blocks to admit ``sequence``.

        After that :meth:`try_admit` succeeds, and then :meth:`try_reserve` for all others. Before
        it they would not all; but where several share the block they write next, the last of them
        is counted with a copy that it need not make. None if all victims would not do.

        Args:
            sequence: holds no block.
            victims: some of those that run.
            spare: blocks that must be left over when so many of the victims are gone.
            stops: gives, for all that run, one past the last position that they are about to write;
                asked only if that decides.
        """
        prefix = self._cache.match(sequence) if self._cache is not None else []
        return self.victims_freeing(sequence, prefix, victims, spare, stops)

    def victims_freeing(
        self,
        sequence: Sequence,
        prefix: list[int],
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """:meth:`victims_needed`, with ``prefix`` from the cache as the begin of the table."""
        missing = self.admission_cost(sequence, prefix) - self.num_available
        # What they hold, shared or not, is quickly summed. If even that is not enough, it is so in
        # every step for as long as the sequence waits.
        if missing + spare(len(victims)) > sum(len(self._table(victim)) for victim in victims):
            return None
        growth = {other: self._growth(other, stop) for other, stop in stops().items()}
        missing += sum(growth.values())
        kept, holders = set(self._begin(sequence, prefix)), Counter[int]()
        for count, victim in enumerate(victims):
            if missing + spare(count) <= 0:
                return count
            missing -= growth[victim]
            for block in self._table(victim):
                if block != NO_BLOCK and block not in kept:
                    holders[block] += 1
                    missing -= holders[block] == self._ref_counts[block]
        return len(victims) if missing + spare(len(victims)) <= 0 else None

    def admission_cost(self, sequence: Sequence, prefix: list[int]) -> int:
        """Blocks that :meth:`admit` takes of those available."""
        begin, counts = self._begin(sequence, prefix), self._ref_counts
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(begin)
        return num_fresh + sum(block != NO_BLOCK and counts[block] == 0 for block in begin)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let the table of ``sequence`` begin with ``prefix``, and add fresh blocks.

        Args:
            sequence: holds no block.
            prefix: as the prefix cache gave it.
        """
        begin = self._begin(sequence, prefix)
        for block in begin:  # before any fresh one is taken, which might evict them
            if block != NO_BLOCK:
                self._share(block)
        num_fresh = self._admitted_blocks(sequence, len(prefix)) - len(begin)
        table = self._table(sequence)
        table.extend(begin)
        table.extend([self._take() for _ in range(num_fresh)])
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_writable_tokens = len(table) * self.block_size
        sequence.num_published_blocks = len(prefix)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens :meth:`try_admit` would find in the prefix cache."""
        return 0 if self._cache is None else len(self._cache.match(sequence)) * self.block_size

    def try_join(
        self,
        sequence: Sequence,
        sibling: Sequence,
        num_common: int,
        spare: int,
        copies: list[BlockCopy],
    ) -> bool:
        """:meth:`try_admit` for a sequence that begins like one which holds blocks.

        Full blocks of the common begin are shared; the begin of a block is copied, so that neither
        ever writes into a block of the other's. All or nothing: False, also if what the sibling has
        in common has left the window, leaves everything as it was.

        Args:
            sequence: holds no block.
            sibling: has computed the first ``num_common`` tokens of ``sequence`` in earlier steps.
            num_common: fewer than ``sequence`` has.
            spare: blocks that must still be available afterwards.
            copies: those of the step so far; gets the copy that must run before it.
        """
        num_common = self.joinable(sibling, num_common, copies)
        cost = self.joining_cost(sequence, sibling, num_common)
        if cost is None or cost + spare > self.num_available:
            return False
        self.join(sequence, sibling, num_common, copies)
        return True

    def joinable(self, sibling: Sequence, num_common: int, copies: list[BlockCopy]) -> int:
        """So many of the common tokens can be given to another sequence in this step.

        Copies may not build on one another. Where an earlier one makes the block in which the
        common begin ends, that block's tokens are left out.
        """
        num_full, rest = divmod(num_common, self.block_size)
        if rest:
            source = self._table(sibling)[num_full]
            if any(copy.target == source and copy.kind == self._kind for copy in copies):
                return num_full * self.block_size
        return num_common

    def joining_cost(self, sequence: Sequence, sibling: Sequence, num_common: int) -> int | None:
        """Blocks that :meth:`join` takes; None if the sibling has given up one that is needed."""
        first = first_seen_block(num_common, self.window, self.block_size)
        if NO_BLOCK in self._table(sibling)[first : self.blocks_for(num_common)]:
            return None
        num_full = num_common // self.block_size
        return self._admitted_blocks(sequence, num_full) - num_full

    def join(
        self, sequence: Sequence, sibling: Sequence, num_common: int, copies: list[BlockCopy]
    ) -> None:
        """Let ``sequence`` begin with what it has in common with ``sibling``; see above."""
        num_full, rest = divmod(num_common, self.block_size)
        first = first_seen_block(num_common, self.window, self.block_size)
        table, known = self._table(sequence), self._table(sibling)
        num_fresh = self._admitted_blocks(sequence, num_full) - num_full
        for block in known[first:num_full]:
            self._share(block)
        table.extend([NO_BLOCK] * first + known[first:num_full])
        table.extend([self._take() for _ in range(num_fresh)])
        if rest:
            copies.append(BlockCopy(known[num_full], table[num_full], self._kind))
        sequence.num_computed_tokens = num_common
        sequence.num_writable_tokens = len(table) * self.block_size
        sequence.num_published_blocks = num_full

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
        return self._growth(sequence, stop) <= len(self._unused)

    def _growth(self, sequence: Sequence, stop: int) -> int:
        """Blocks that :meth:`try_reserve` takes."""
        table = self._table(sequence)
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        unshare = offset != 0 and self._ref_counts[table[index]] > 1
        return max(self.blocks_for(stop) - len(table), 0) + unshare

    def trim(self, sequence: Sequence) -> None:
        """Take back blocks behind the tokens ``sequence`` has: they were for refused drafts."""
        table = self._table(sequence)
        for _ in range(len(table) - self.blocks_for(len(sequence.token_ids))):
            self._drop(table.pop())
        sequence.num_writable_tokens = len(table) * self.block_size

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

    def reclaim(self, sequences: Iterable[Sequence]) -> None:
        """Take back at once what :meth:`settle` would when a sequence has filled its next block.

        Called when blocks are short, so that nobody loses its own for some that nobody needs.
        """
        if self.window is not None:
            for sequence in sequences:
                self.slide(sequence)

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

    def _begin(self, sequence: Sequence, prefix: list[int]) -> list[int]:
        """The begin of the table: hits, and of them only what is seen if the host keeps more."""
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
