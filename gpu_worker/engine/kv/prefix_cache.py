"""Finds blocks by what was computed into them, so that equal prefixes are computed once."""

from __future__ import annotations

import hashlib
from array import array

from ..sequence import Sequence
from .kv_cache_groups import NO_BLOCK, first_seen_block

__all__ = ["PrefixCache", "longest_hit"]

_DIGEST_BYTES = 16


class PrefixCache:
    """An index from the content of full blocks to their numbers.

    The keys and values at a position depend on every token before it. So a block's name is the
    digest of (name of the block before, its own token ids). The first block's predecessor is the
    digest of the sequence's salt: equal digest, equal prefix, equal salt. The digest is BLAKE2b
    with 128 bits, because a collision would show one user another's context. Python's ``hash`` of
    ints is predictable.

    Two invariants make a hit safe:

    - only blocks all of whose positions have really been computed are published, and a published
      block is never written again;
    - :func:`longest_hit` leaves out a sequence's last token, whose logits are needed, and that
      token's block. So a sequence never writes into a block it got from here.

    The index knows nothing of reference counts; ``BlockPool`` tells it when it reuses a block.

    With a window a sequence can also continue a prefix whose first blocks are gone, if all that its
    next token sees is there. Names are chained, so a block found by name follows the right blocks,
    cached or not.

    Args:
        block_size: tokens per block.
        window: tokens a token sees, itself included; None: all.
    """

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self._block_size = block_size
        self._window = window
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def num_hit_blocks(self, sequence: Sequence, limit: int) -> int:
        """Length in blocks of the longest prefix behind which ``sequence`` could go on.

        At most ``limit``, and not more than :func:`longest_hit`. Changes no state.
        """
        if not self._block_of:
            return 0
        if self._window is None:
            found = (self._find(sequence, index) for index in range(limit))
            return next((index for index, block in enumerate(found) if block is None), limit)
        # Looks at each block once. A missing block rules out all prefixes whose next token would
        # see it, so the next candidate ends before it.
        end = index = limit
        while index > self._first_seen(end):
            index -= 1
            if self._find(sequence, index) is None:
                end = index
        return end

    def hit_blocks(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The table of a prefix of ``num_blocks`` blocks that :meth:`num_hit_blocks` has found.

        ``NO_BLOCK`` stands where a block has left the window.
        """
        first = self._first_seen(num_blocks)
        seen = [self._block_of[self._digest(sequence, i)] for i in range(first, num_blocks)]
        return [NO_BLOCK] * first + seen

    def publish(self, sequence: Sequence, table: list[int], num_full: int) -> None:
        """Offer the first ``num_full`` blocks of ``table``, which are full of computed tokens.

        A block whose content is already cached stays private to its sequence. A table entry
        without a block had left the attention window and stayed behind on the host.
        """
        for index in range(sequence.num_published_blocks, num_full):
            digest = self._digest(sequence, index)
            block = table[index]
            if digest not in self._block_of and block != NO_BLOCK:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """The content of ``block`` is about to be overwritten."""
        del self._block_of[self._digest_of.pop(block)]

    def _first_seen(self, num_blocks: int) -> int:
        """Index of the first block that the token behind ``num_blocks`` blocks sees."""
        return first_seen_block(num_blocks * self._block_size, self._window, self._block_size)

    def _find(self, sequence: Sequence, index: int) -> int | None:
        return self._block_of.get(self._digest(sequence, index))

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """The name of the sequence's block ``index``, all of whose tokens are known.

        Tokens are only ever appended, so the names are computed once and kept in the sequence.
        """
        digests, size = sequence.block_digests, self._block_size
        while len(digests) <= index:
            first = len(digests) * size
            parent = digests[-1] if digests else _root(sequence.cache_salt)
            ids = array("I", sequence.token_ids[first : first + size]).tobytes()
            digests.append(hashlib.blake2b(parent + ids, digest_size=_DIGEST_BYTES).digest())
        return digests[index]


def longest_hit(sequence: Sequence, block_size: int) -> int:
    """Most blocks of ``sequence`` that may come from a cache: never that of its last token.

    Nor of prompt tokens whose logits are asked for and were not seen yet.
    """
    seen = sequence.num_prompt_logprobs
    num_tokens = sequence.num_tokens - 1
    return (num_tokens if seen is None else min(num_tokens, seen)) // block_size


def _root(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"prefix root").digest()
