"""Host memory for the KV of preempted sequences."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.errors import IntegrityError

from ..plan import BlockCopy
from ..sequence import Sequence
from .kv_cache_groups import NO_BLOCK, KVCacheGroup, first_seen_block

__all__ = ["HostPool"]


class HostPool:
    """Keeps the keys and values of sequences that wait, in blocks of host memory.

    Swapping as in PagedAttention (Kwon et al., 2023, section 4.5). Knows block numbers, never
    tensors. A host block is free, or in the ``host_blocks`` of exactly one sequence. Sequences
    share no host blocks: what two share on the device is kept twice. Each KV group has blocks of
    its own, and a sequence is kept in all groups or in none. Of a group with a window, only what
    the sequence's next token sees is kept.

    A step copies out, then in, then from block to block, then computes. That order is right for
    every plan:

    - Out reads device blocks that were freed in this plan, before anything in it writes them.
    - In reads host blocks that no later copy of the plan writes. The scheduler makes room before it
      admits, so a plan takes all its host blocks before it gives any back. (A sequence that
      displaces others is admitted at once, but only with room for all that go on, so no preemption
      follows it.)
    - In writes device blocks that were free when it was planned. The source of a block copy is not
      among them: another sequence holds it as well. Had that one been preempted after the copy was
      planned, none would have been admitted (thrash guard, part 1). A block copy may read what
      came in.

    What a plan copies out counts as kept from the moment it is planned. If the step turns out not
    to have made its copies, :meth:`discard_saves` forgets that again.

    Args:
        groups: how many blocks there are of each; 0 in all of them keeps nothing.
        block_size: tokens per block.

    Attributes:
        num_blocks: blocks of all groups.
        num_out: total blocks copied out.
        num_in: total blocks copied back.
        bytes_out: bytes of ``num_out`` blocks, for groups that give their ``block_bytes``.
        bytes_in: bytes of ``num_in`` blocks.
        num_refusals: total sequences for which too few blocks were free.
    """

    def __init__(self, groups: Iterable[KVCacheGroup], block_size: int) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self.num_blocks = sum(group.num_host_blocks for group in self._groups)
        self.num_out = self.bytes_out = 0
        self.num_in = self.bytes_in = 0
        self.num_refusals = 0
        # The block given back last is taken first: its pages are the ones that are in memory.
        self._free = [list(range(group.num_host_blocks - 1, -1, -1)) for group in self._groups]
        self._unconfirmed: list[Sequence] = []

    @property
    def num_used(self) -> int:
        """Blocks that keep something."""
        return self.num_blocks - sum(map(len, self._free))

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks that it takes to keep ``sequence``, which has device blocks."""
        return sum(map(len, self._held(sequence, sequence.num_computed_tokens)))

    def try_save(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """Keep the computed KV of ``sequence``, which is about to lose its device blocks.

        All or nothing: False, if there is too little room or nothing to keep, leaves everything as
        it was.

        Args:
            sequence: holds device blocks, and none here.
            copies: gets the copies from device to host.
        """
        # A beam may have computed all its tokens, but admission computes the last one again.
        # What that one sees may have left the window: then there is no going on from there.
        num_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
        held = self._held(sequence, num_tokens)
        if num_tokens == 0 or any(NO_BLOCK in blocks for blocks in held):
            return False
        if any(len(blocks) > len(free) for blocks, free in zip(held, self._free, strict=True)):
            self.num_refusals += 1
            return False
        kept = []
        for index, (blocks, free) in enumerate(zip(held, self._free, strict=True)):
            kept.append(tuple(free.pop() for _ in blocks))
            copies += [BlockCopy(*pair, index) for pair in zip(blocks, kept[-1], strict=True)]
            self.num_out += len(blocks)
            self.bytes_out += len(blocks) * self._groups[index].block_bytes
        sequence.host_blocks = tuple(kept)
        sequence.num_swapped_tokens = num_tokens
        self._unconfirmed.append(sequence)
        return True

    def restore(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Give an admitted sequence its kept KV back, and free its host blocks.

        What the prefix cache gave it, its computed tokens, is not copied.

        Args:
            sequence: has device blocks again, for all that is kept of it.
            copies: gets the copies from host to device.
        """
        num_hit = sequence.num_computed_tokens // self._block_size
        if sequence.num_swapped_tokens > sequence.num_computed_tokens:
            sequence.num_computed_tokens = sequence.num_swapped_tokens
            targets = self._held(sequence, sequence.num_swapped_tokens)
            for index, (kept, blocks) in enumerate(zip(sequence.host_blocks, targets, strict=True)):
                hits = max(0, num_hit - self._first(sequence, self._groups[index]))
                pairs = list(zip(kept, blocks, strict=True))[hits:]
                copies += [BlockCopy(*pair, index) for pair in pairs]
                self.num_in += len(pairs)
                self.bytes_in += len(pairs) * self._groups[index].block_bytes
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks of ``sequence``, if it has any."""
        for kept, free in zip(sequence.host_blocks, self._free, strict=False):
            free.extend(reversed(kept))
        sequence.host_blocks = ()
        sequence.num_swapped_tokens = 0

    def confirm_saves(self) -> None:
        """The copies of the last plan were made."""
        self._unconfirmed.clear()

    def discard_saves(self) -> None:
        """The copies of the last plan may not have been made: what it saved is computed again."""
        for sequence in self._unconfirmed:
            self.drop(sequence)
        self._unconfirmed.clear()

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Recount everything from the sequences that wait.

        Raises:
            IntegrityError: a block is lost or owned twice, or does not keep what it should.
        """
        owned = [list(free) for free in self._free]
        for sequence in waiting:
            kept, size = sequence.num_swapped_tokens, self._block_size
            if not kept and not sequence.host_blocks:
                continue
            expected = [-(-kept // size) - self._first(sequence, group) for group in self._groups]
            if expected != list(map(len, sequence.host_blocks)) or kept >= sequence.num_tokens:
                raise IntegrityError(f"{sequence}: {kept} tokens in {sequence.host_blocks}")
            for blocks, more in zip(owned, sequence.host_blocks, strict=True):
                blocks += more
        for blocks, group in zip(owned, self._groups, strict=True):
            if sorted(blocks) != list(range(group.num_host_blocks)):
                raise IntegrityError(
                    f"host blocks: {len(blocks)} owned or free, not {group.num_host_blocks}"
                )

    def _held(self, sequence: Sequence, num_tokens: int) -> list[list[int]]:
        """Per group the device blocks of its first tokens, from the first block still seen on."""
        stop = -(-num_tokens // self._block_size)
        return [
            table[first_seen_block(num_tokens, group.window, self._block_size) : stop]
            for table, group in zip(sequence.block_tables, self._groups, strict=True)
        ]

    def _first(self, sequence: Sequence, group: KVCacheGroup) -> int:
        """Index in its table of the first block that is kept of a sequence."""
        return first_seen_block(sequence.num_swapped_tokens, group.window, self._block_size)
