"""What the scheduler asks of the KV cache; :class:`~..kv.kv_manager.KVManager` provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ..plan import BlockCopy
from ..sequence import Sequence

__all__ = ["KVCache"]


class KVCache(Protocol):
    """Blocks on the device for running sequences, and on the host for swapped ones.

    A ``try_`` method changes everything it promises and returns True, or changes nothing.
    """

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone."""

    @property
    def num_host_blocks(self) -> int:
        """Host blocks for swapped sequences; 0: nothing is swapped."""

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that the prefix cache has of a waiting sequence."""

    def try_admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, and leave ``spare`` blocks."""

    def try_join(
        self,
        sequence: Sequence,
        sibling: Sequence,
        num_common: int,
        spare: int,
        copies: list[BlockCopy],
    ) -> bool:
        """The same for a sequence that shares its first tokens with a running sibling."""

    def try_reserve(self, sequence: Sequence, stop: int, copies: list[BlockCopy]) -> bool:
        """Make a running sequence's positions up to ``stop`` writable."""

    def victims_needed(
        self,
        sequence: Sequence,
        victims: list[Sequence],
        spare: Callable[[int], int],
        stops: Callable[[], Mapping[Sequence, int]],
    ) -> int | None:
        """How many ``victims`` must lose their blocks for ``sequence`` to start; None: too few."""

    def drop_unneeded(self, sequences: Iterable[Sequence]) -> None:
        """Free blocks that have left the windows of running sequences."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share all that is computed for ``parent``."""

    def release(self, sequence: Sequence) -> None:
        """Take all device blocks from a running sequence."""

    def num_swap_blocks(self, sequence: Sequence) -> int:
        """Host blocks that the KV of a running sequence would take."""

    def try_swap_out(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """Keep the KV of a sequence on the host before its device blocks are released."""

    def swap_in(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Bring the KV of an admitted sequence back, as far as the prefix cache lacks it."""

    def drop_swapped(self, sequence: Sequence) -> None:
        """Free the host blocks of a waiting sequence, if it has some."""

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Recount all blocks; raises ``IntegrityError``."""
