"""Finds blocks by what was computed into them, so that equal prefixes are computed once."""

from __future__ import annotations

import hashlib
from array import array

from .sequence import Sequence

__all__ = ["PrefixCache"]

_DIGEST_BYTES = 16


class PrefixCache:
    """An index from the content of full blocks to their numbers.

    The keys and values at a position depend on every token before it, so a block is named by the
    digest of (name of the block before, its own token ids), and the first block's predecessor is
    the digest of the sequence's salt: equal digest, equal prefix, equal salt. BLAKE2b with 128
    bits, because a collision would show one user another one's context; Python's ``hash`` of ints
    is predictable and made for tables, not for this.

    Two invariants make a hit safe:

    - only blocks all of whose positions have really been computed are published, and a published
      block is never written again;
    - :meth:`match` leaves out the last token of a sequence, since its logits are needed, and with
      it the block it stands in: a sequence never writes into a block it got from here.

    The index knows nothing of reference counts; ``BlockManager`` tells it when it reuses a block.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest cached prefix of ``sequence``. Changes no state."""
        blocks: list[int] = []
        for index in range((sequence.num_tokens - 1) // self._block_size):
            block = self._block_of.get(self._digest(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, sequence: Sequence, num_full: int) -> None:
        """Offer the first ``num_full`` blocks of ``sequence``, which are full of computed tokens.

        A block whose content is cached elsewhere already stays private to its sequence.
        """
        for index in range(sequence.num_published_blocks, num_full):
            digest = self._digest(sequence, index)
            if digest not in self._block_of:
                block = sequence.block_table[index]
                self._block_of[digest] = block
                self._digest_of[block] = digest
        sequence.num_published_blocks = num_full

    def forget(self, block: int) -> None:
        """The content of ``block`` is about to be overwritten."""
        del self._block_of[self._digest_of.pop(block)]

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


def _root(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"prefix root").digest()
