"""Gives sequences KV blocks and takes them back: sharing, copy-on-write, prefix hits, windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from penstock.shared.errors import IntegrityError

from ..plan import BlockCopy
from ..sequence import Sequence
from .block_pool import BlockPool
from .host_pool import HostPool
from .kv_cache_groups import KVCacheGroup
from .prefix_cache import longest_hit

__all__ = ["KVManager"]


class KVManager:
    """Owns the block tables of all running sequences, after PagedAttention (Kwon et al., 2023).

    Knows block numbers, never tensors. Full attention needs the keys and values of all tokens, a
    layer with a window only the last ones. So each KV cache group has its own :class:`BlockPool`,
    and a sequence has a table in each. Positions mean the same in all of them. Most models have one
    group.

    Two invariants hold across pools. A sequence gets what it needs in all of them or in none, and
    it has computed the same tokens in all.

    Only their own sequence writes positions from ``num_computed_tokens`` on. So only the block in
    which they begin can be both partly computed and shared, and only that one is ever copied
    (:meth:`try_reserve`). All blocks behind it belong to one sequence.

    Blocks that lie wholly before a window are given up as the sequence goes on, and ``NO_BLOCK``
    takes their place in its table.

    Args:
        groups: at least one; block tables are in this order.
        block_size: tokens per block, in all groups.
        prefix_cache: keep released blocks for sequences with the same prefix.
        max_span: most query tokens of one sequence in one step; matters only with a window.

    Attributes:
        pools: one per group, on the device.
        host: keeps the KV of preempted sequences in host memory.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroup, ...],
        block_size: int,
        *,
        prefix_cache: bool = True,
        max_span: int = 1,
    ) -> None:
        self.block_size = block_size
        self.host = HostPool(groups, block_size)
        self.pools = tuple(
            BlockPool(group, index, block_size, prefix_cache=prefix_cache, max_span=max_span)
            for index, group in enumerate(groups)
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools together."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks that stand in at least one block table."""
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Unused blocks whose content a new sequence could still hit."""
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free or cached."""
        return sum(pool.num_available for pool in self.pools)

    @property
    def num_evictions(self) -> int:
        """Cached blocks handed out because no free one was left."""
        return sum(pool.num_evictions for pool in self.pools)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone; ``sys.maxsize`` if every one fits."""
        return min(pool.capacity_tokens for pool in self.pools)

    def available_tokens(self, longest: int) -> int:
        """Tokens of new sequences that fit, if none of them is longer than ``longest`` tokens."""
        return min(pool.available_tokens(longest) for pool in self.pools)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens :meth:`try_admit` would find in the prefix cache."""
        return len(self._prefixes(sequence)[0]) * self.block_size

    def try_admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence without blocks room for all tokens it has, prefix hits included.

        With a window, for as many as it can hold at the same time. All or nothing: False leaves
        everything as it was. On success the tokens found in the prefix cache count as computed.

        Args:
            sequence: holds no block.
            spare: blocks of the first pool that must still be available afterwards; of the other
                pools the same share.
        """
        # The last token always needs a block of its own.
        if any(pool.num_available <= self._share(pool, spare) for pool in self.pools):
            return False
        prefixes = self._prefixes(sequence)
        for pool, prefix in zip(self.pools, prefixes, strict=True):
            needed = pool.admission_cost(sequence, prefix) + self._share(pool, spare)
            if needed > pool.num_available:
                return False
        sequence.block_tables = tuple(
            pool.admit(sequence, prefix) for pool, prefix in zip(self.pools, prefixes, strict=True)
        )
        sequence.num_published_blocks = len(prefixes[0])
        sequence.num_computed_tokens = len(prefixes[0]) * self.block_size
        self._note_writable(sequence)
        return True

    def victims_needed(
        self,
        sequence: Sequence,
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """How many of ``victims``, in their order, must lose their blocks to admit ``sequence``.

        After that :meth:`try_admit` succeeds, and then :meth:`try_reserve` for all others. With one
        victim fewer not all would. But where several share the block they write next, the count
        includes a copy that the last of them need not make. None if all victims would not do.

        Args:
            sequence: holds no block.
            victims: some of those that run.
            spare: blocks that must be left over, by the number of victims gone.
            stops: gives, for all that run, one past the last position that they are about to write;
                called only if the answer depends on it.
        """
        most = 0
        for pool, prefix in zip(self.pools, self._prefixes(sequence), strict=True):

            def spare_here(gone: int, pool: BlockPool = pool) -> int:
                return self._share(pool, spare(gone))

            count = pool.victims_needed(sequence, prefix, victims, spare_here, stops)
            if count is None:
                return None
            most = max(most, count)
        return most

    def try_join(
        self,
        sequence: Sequence,
        sibling: Sequence,
        num_common: int,
        spare: int,
        copies: list[BlockCopy],
    ) -> bool:
        """:meth:`try_admit` for a sequence that begins like one which holds blocks.

        They share the full blocks of their common begin. A block that is only partly common is
        copied, so neither ever writes into the other's block. All or nothing: False, also if what
        the sibling has in common has left the window, leaves everything as it was.

        Args:
            sequence: holds no block.
            sibling: has computed the first ``num_common`` tokens of ``sequence`` in earlier steps.
            num_common: fewer than ``sequence`` has.
            spare: blocks that must still be available afterwards, as in :meth:`try_admit`.
            copies: those of the step so far; gets the copies that must run before it.
        """
        num_common = min(pool.joinable_tokens(sibling, num_common, copies) for pool in self.pools)
        for pool in self.pools:
            cost = pool.joining_cost(sequence, sibling, num_common)
            if cost is None or cost + self._share(pool, spare) > pool.num_available:
                return False
        sequence.block_tables = tuple(
            pool.join(sequence, sibling, num_common, copies) for pool in self.pools
        )
        sequence.num_computed_tokens = num_common
        sequence.num_published_blocks = num_common // self.block_size
        self._note_writable(sequence)
        return True

    def try_reserve(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> bool:
        """Make positions ``[num_computed_tokens, stop)`` writable by ``sequence`` alone.

        All or nothing: False leaves everything as it was.

        Args:
            sequence: holds the blocks of its computed tokens.
            stop: one past the last position that will be written.
            copies: gets the copies that must run before the write, if the first position lies in a
                block shared with another sequence.
        """
        for pool in self.pools:
            if pool.growth(sequence, stop) > pool.num_available:
                return False
        for pool in self.pools:
            pool.grow(sequence, stop, copies)
        self._note_writable(sequence)
        return True

    def trim(self, sequence: Sequence) -> None:
        """Take back blocks behind the tokens ``sequence`` has: they were for refused drafts."""
        for pool in self.pools:
            pool.trim(sequence)
        self._note_writable(sequence)

    def mark_computed(self, sequence: Sequence) -> None:
        """Publish the blocks of ``sequence`` that are full now, and drop what left its windows.

        Call it only after the step that computed the tokens has succeeded.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        for pool in self.pools:
            if num_full > sequence.num_published_blocks:
                pool.publish(sequence, num_full)
            pool.drop_out_of_window(sequence)
        sequence.num_published_blocks = num_full

    def drop_unneeded(self, sequences: Iterable[Sequence]) -> None:
        """Drop at once what :meth:`mark_computed` would when a sequence fills its next block.

        Called when blocks are short, before any sequence is preempted.
        """
        windowed = [pool for pool in self.pools if pool.window is not None]
        if windowed:
            for sequence in sequences:
                for pool in windowed:
                    pool.drop_out_of_window(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which holds no block, share everything computed for ``parent``.

        The child's tokens begin with the parent's computed ones. Blocks are copied later, when one
        of the two writes into the last, partly filled one.
        """
        child.block_tables = tuple(pool.fork(parent) for pool in self.pools)
        child.num_computed_tokens = parent.num_computed_tokens
        parent.num_writable_tokens = child.num_writable_tokens = 0
        child.num_published_blocks = parent.num_published_blocks
        child.block_digests = parent.block_digests[: parent.num_published_blocks]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from ``sequence``; none of its tokens count as computed any more."""
        for pool in self.pools:
            pool.release(sequence)
        sequence.block_tables = ()
        sequence.num_computed_tokens = 0
        sequence.num_writable_tokens = 0
        sequence.num_published_blocks = 0

    @property
    def num_host_blocks(self) -> int:
        """Host blocks for swapped sequences; 0: nothing is swapped."""
        return self.host.num_blocks

    def num_swap_blocks(self, sequence: Sequence) -> int:
        """Host blocks that it takes to keep ``sequence``, which has device blocks."""
        return self.host.num_needed(sequence)

    def try_swap_out(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """See :meth:`HostPool.try_save`."""
        return self.host.try_save(sequence, copies)

    def swap_in(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """See :meth:`HostPool.restore`."""
        self.host.restore(sequence, copies)

    def drop_swapped(self, sequence: Sequence) -> None:
        """See :meth:`HostPool.drop`."""
        self.host.drop(sequence)

    def check_integrity(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence] = ()
    ) -> None:
        """Recount every pool from the blocks of all sequences.

        Args:
            running: all sequences that hold device blocks.
            waiting: all others.

        Raises:
            IntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        owners = list(running)
        for sequence in owners:
            if len(sequence.block_tables) != len(self.pools):
                raise IntegrityError(f"{sequence} lacks the block table of a KV cache group")
        for pool in self.pools:
            pool.check_integrity(owners)
        self.host.check_integrity(waiting)

    def _prefixes(self, sequence: Sequence) -> list[list[int]]:
        """Per pool the table of the longest prefix that all of them have cached."""
        limit = longest_hit(sequence, self.block_size)
        while True:
            found = limit
            for pool in self.pools:
                found = pool.num_hit_blocks(sequence, found)
            if found == limit or len(self.pools) == 1:
                return [pool.hit_blocks(sequence, found) for pool in self.pools]
            limit = found  # a shorter prefix may end outside what another pool has kept

    def _share(self, pool: BlockPool, spare: int) -> int:
        """``spare`` blocks of the first pool, as blocks of ``pool``."""
        return math.ceil(spare * pool.num_blocks / self.pools[0].num_blocks)

    def _note_writable(self, sequence: Sequence) -> None:
        sequence.num_writable_tokens = min(map(len, sequence.block_tables)) * self.block_size
