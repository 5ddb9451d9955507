"""Blocks for models whose layers differ in how far back they see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from penstock.shared.errors import IntegrityError

from ..config import EngineConfig
from ..plan import BlockCopy
from ..sequence import Sequence
from .block_manager import BlockManager
from .kv_cache_groups import KVKind
from .prefix_cache import longest_hit

__all__ = ["Blocks", "HybridBlocks", "make_blocks"]


class HybridBlocks:
    """Several :class:`BlockManager`, one for each KV kind, that act as one.

    Full attention needs the keys and values of all tokens, a layer with a window only the last
    ones. If both shared their blocks, what the window layers no longer need could never be given
    up (in Gemma 3 five of six layers). So each kind has its pool, its block ids, its prefix cache
    and its table in every sequence; positions mean the same in all of them.

    Two things hold across kinds: a sequence gets what it needs in all of them or in none, and it
    has computed the same tokens in all of them.

    Args:
        kinds: at least one; block tables are in this order.
        block_size: tokens per block, in all kinds.
        prefix_cache: keep released blocks for sequences with the same prefix.
        max_span: most query tokens of one sequence in one step.
    """

    def __init__(
        self, kinds: Iterable[KVKind], block_size: int, *, prefix_cache: bool, max_span: int
    ) -> None:
        self.block_size = block_size
        self.kinds = tuple(
            BlockManager(
                kind.num_blocks,
                block_size,
                prefix_cache=prefix_cache,
                window=kind.window,
                max_span=max_span,
                kind=index,
            )
            for index, kind in enumerate(kinds)
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools together."""
        return sum(kind.num_blocks for kind in self.kinds)

    @property
    def num_used(self) -> int:
        """Blocks that stand in at least one block table."""
        return sum(kind.num_used for kind in self.kinds)

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content could still be hit."""
        return sum(kind.num_cached for kind in self.kinds)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free or cached."""
        return sum(kind.num_available for kind in self.kinds)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were given away because free ones ran out."""
        return sum(kind.num_evictions for kind in self.kinds)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone; ``sys.maxsize`` if any does."""
        return min(kind.capacity_tokens for kind in self.kinds)

    def try_admit(self, sequence: Sequence, spare: int) -> bool:
        """As :meth:`BlockManager.try_admit`.

        ``spare`` is for the first kind; of the other pools as large a part is left over.
        """
        prefixes = self._prefixes(sequence)
        for kind, prefix in zip(self.kinds, prefixes, strict=True):
            needed = kind.admission_cost(sequence, prefix) + self._spare(kind, spare)
            if needed > kind.num_available:
                return False
        self._make_tables(sequence)
        for kind, prefix in zip(self.kinds, prefixes, strict=True):
            kind.admit(sequence, prefix)
        self._note_writable(sequence)
        return True

    def victims_needed(
        self,
        sequence: Sequence,
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """As :meth:`BlockManager.victims_needed`: as many as the scarcest kind needs."""
        most = 0
        for kind, prefix in zip(self.kinds, self._prefixes(sequence), strict=True):

            def scaled(gone: int, kind: BlockManager = kind) -> int:
                return self._spare(kind, spare(gone))

            count = kind.victims_freeing(sequence, prefix, victims, scaled, stops)
            if count is None:
                return None
            most = max(most, count)
        return most

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """As :meth:`BlockManager.num_cached_tokens`."""
        return len(self._prefixes(sequence)[0]) * self.block_size

    def try_join(
        self,
        sequence: Sequence,
        sibling: Sequence,
        num_common: int,
        spare: int,
        copies: list[BlockCopy],
    ) -> bool:
        """As :meth:`BlockManager.try_join`."""
        num_common = min(kind.joinable(sibling, num_common, copies) for kind in self.kinds)
        for kind in self.kinds:
            cost = kind.joining_cost(sequence, sibling, num_common)
            if cost is None or cost + self._spare(kind, spare) > kind.num_available:
                return False
        self._make_tables(sequence)
        for kind in self.kinds:
            kind.join(sequence, sibling, num_common, copies)
        self._note_writable(sequence)
        return True

    def try_reserve(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> bool:
        """As :meth:`BlockManager.try_reserve`."""
        if not all(kind.can_reserve(sequence, stop) for kind in self.kinds):
            return False
        for kind in self.kinds:
            kind.try_reserve(sequence, stop, copies)
        self._note_writable(sequence)
        return True

    def trim(self, sequence: Sequence) -> None:
        """As :meth:`BlockManager.trim`."""
        for kind in self.kinds:
            kind.trim(sequence)
        self._note_writable(sequence)

    def settle(self, sequence: Sequence) -> None:
        """As :meth:`BlockManager.settle`."""
        num_full = sequence.num_computed_tokens // self.block_size
        for kind in self.kinds:
            kind.publish(sequence, num_full)
            kind.slide(sequence)
        sequence.num_published_blocks = num_full

    def reclaim(self, sequences: Iterable[Sequence]) -> None:
        """As :meth:`BlockManager.reclaim`."""
        sequences = list(sequences)
        for kind in self.kinds:
            kind.reclaim(sequences)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """As :meth:`BlockManager.fork`."""
        self._make_tables(child)
        for kind in self.kinds:
            kind.fork(parent, child)

    def release(self, sequence: Sequence) -> None:
        """As :meth:`BlockManager.release`."""
        for kind in self.kinds:
            kind.release(sequence)

    def available_tokens(self, longest: int) -> int:
        """Tokens of new sequences for which there is room, none of them over ``longest``."""
        return min(kind.available_tokens(longest) for kind in self.kinds)

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Recount each kind.

        Raises:
            IntegrityError: a block is lost, owned twice, or counted wrongly.
        """
        owners = list(owners)
        for sequence in owners:
            if len(sequence.more_tables) + 1 != len(self.kinds):
                raise IntegrityError(f"{sequence} lacks the block table of a KV kind")
        for kind in self.kinds:
            kind.check_integrity(owners)

    def _prefixes(self, sequence: Sequence) -> list[list[int]]:
        """Per kind the begin of the table, after the longest prefix that all of them can give."""
        found, before = longest_hit(sequence, self.block_size), -1
        while found != before:  # a shorter prefix may end outside what another kind has kept
            before = found
            for kind in self.kinds:
                found = kind.covered(sequence, found)
        return [kind.prefix(sequence, found) for kind in self.kinds]

    def _spare(self, kind: BlockManager, spare: int) -> int:
        return math.ceil(spare * kind.num_blocks / self.kinds[0].num_blocks)

    def _make_tables(self, sequence: Sequence) -> None:
        if not sequence.more_tables:
            sequence.more_tables = tuple([] for _ in self.kinds[1:])

    def _note_writable(self, sequence: Sequence) -> None:
        sequence.num_writable_tokens = min(kind.writable_tokens(sequence) for kind in self.kinds)


Blocks = BlockManager | HybridBlocks
"""Whose methods the scheduler calls."""


def make_blocks(config: EngineConfig) -> Blocks:
    """The books of the pools in ``config``."""
    if config.more_kinds:
        return HybridBlocks(
            config.kinds,
            config.block_size,
            prefix_cache=config.prefix_cache,
            max_span=config.max_span,
        )
    return BlockManager(
        config.num_blocks,
        config.block_size,
        prefix_cache=config.prefix_cache,
        window=config.window,
        max_span=config.max_span,
    )
