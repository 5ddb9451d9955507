"""The packed, unpadded batch one engine step computes, and where its keys and values live.

A step mixes sequences that each contribute some query tokens: a prefill chunk, one decode token, a
draft to verify. Their rows are concatenated (``T`` rows, no padding). A block table leads to a
sequence's keys and values (PagedAttention: Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


# Its fields are never set again. Not frozen: one is made for every step, and setting the fields of
# a frozen one costs four times as much.
@dataclass(slots=True, eq=False)
class RaggedBatch:
    """``S`` sequences' query tokens, packed to ``T`` rows; build it with :meth:`from_lists`.

    Sequence ``s`` owns rows ``query_starts[s] : query_starts[s + 1]``, which are the *last*
    ``query_lens[s]`` positions of its context: causality needs no further description.

    Attributes:
        query_starts: int32 [S + 1], first row of each sequence; the last entry is ``T``.
        context_lens: int32 [S], tokens whose keys and values are in the cache once this step's
            have been written, this step's tokens included.
        block_tables: int32 [S, B], block ids in order of position; behind a context there may be
            any ids up to ``max_block``.
        positions: int64 [T], position of each row's token in its sequence.
        slots: int64 [T], ``block * block_size + offset`` where each row's key and value go.
        block_size: tokens per block.
        host_query_lens: the query lengths, on the host.
        host_context_lens: ``context_lens``, on the host.
        host_query_starts: ``query_starts``, on the host.
        host_block_tables: ``block_tables``, on the host.
        host_positions: ``positions``, on the host.
        max_block: the largest block id used; the cache must have more blocks than this.
        window: how far back of each query its table is filled, in tokens, itself included: for
            layers with that window or a smaller one. None: to the begin.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slots: Tensor
    block_size: int
    host_query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    host_query_starts: tuple[int, ...]
    host_block_tables: Tensor
    host_positions: Tensor
    max_query_len: int
    max_context_len: int
    max_block: int
    window: int | None = None

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        window: int | None = None,
    ) -> RaggedBatch:
        """Lay out a step from its lengths and block tables.

        Args:
            query_lens: S numbers of query tokens, each at least 1.
            context_lens: S context lengths in tokens, this step's query tokens included.
            block_tables: S lists of block ids; those past the context are ignored.
            block_size: tokens per block.
            device: where the tensors go; the host copies stay on the CPU.
            window: no layer sees further back; ids of blocks that lie wholly before the window of
                a sequence's first query token may be negative. None: layers see everything.

        Raises:
            ValueError: lengths disagree, or a query is empty or longer than its context. Or a block
                table is too short for its context, or a block that is seen has a negative id.
        """
        _validate(query_lens, context_lens, block_tables, block_size)
        starts = (0, *accumulate(query_lens))
        tables, max_block = _pad_tables(block_tables, query_lens, context_lens, block_size, window)
        positions = array("q")
        for query_len, context_len in zip(query_lens, context_lens, strict=True):
            positions.extend(range(context_len - query_len, context_len))
        host_positions = torch.frombuffer(positions, dtype=torch.int64)
        slots = _slots(query_lens, context_lens, block_tables, block_size)
        target = torch.device(device)
        return cls(
            query_starts=torch.frombuffer(array("i", starts), dtype=torch.int32).to(target),
            context_lens=torch.frombuffer(array("i", context_lens), dtype=torch.int32).to(target),
            block_tables=tables.to(target),
            positions=host_positions.to(target),
            slots=slots.to(target),
            block_size=block_size,
            host_query_lens=tuple(query_lens),
            host_context_lens=tuple(context_lens),
            host_query_starts=starts,
            host_block_tables=tables,
            host_positions=host_positions,
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            max_block=max_block,
            window=window,
        )

    def with_tables(
        self, block_tables: Sequence[Sequence[int]], *, window: int | None
    ) -> RaggedBatch:
        """The same tokens with their keys and values in other blocks: those of other layers.

        Args:
            block_tables: as in :meth:`from_lists`.
            window: as in :meth:`from_lists`.

        Raises:
            ValueError: as in :meth:`from_lists`.
        """
        query_lens, context_lens = self.host_query_lens, self.host_context_lens
        _validate(query_lens, context_lens, block_tables, self.block_size)
        tables, max_block = _pad_tables(
            block_tables, query_lens, context_lens, self.block_size, window
        )
        device = self.slots.device
        slots = _slots(query_lens, context_lens, block_tables, self.block_size)
        return replace(
            self,
            block_tables=tables.to(device),
            slots=slots.to(device),
            host_block_tables=tables,
            max_block=max_block,
            window=window,
        )

    @property
    def num_sequences(self) -> int:
        """``S``."""
        return len(self.host_query_lens)

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return self.host_query_starts[-1]


def _validate(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, it must be at least 1")
    if not query_lens:
        raise ValueError("query_lens is empty: a batch needs at least one sequence")
    if not len(query_lens) == len(context_lens) == len(block_tables):
        raise ValueError(
            f"query_lens, context_lens and block_tables describe {len(query_lens)}, "
            f"{len(context_lens)} and {len(block_tables)} sequences; they must agree"
        )
    for index, (query_len, context_len, table) in enumerate(
        zip(query_lens, context_lens, block_tables, strict=True)
    ):
        if not 1 <= query_len <= context_len:
            raise ValueError(
                f"sequence {index} has query_len {query_len} and context_len {context_len}; "
                "a query has at least one token and its context includes it"
            )
        if len(table) * block_size < context_len:
            raise ValueError(
                f"sequence {index} has {len(table)} blocks of {block_size} tokens, "
                f"too few for its context of {context_len} tokens"
            )


def _slots(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> Tensor:
    """int64 [T] on the host, where each row's key and value go.

    Without tensors: for a step of a few tokens each operation on one takes longer than all of this.
    """
    slots = array("q")
    for query_len, context_len, table in zip(query_lens, context_lens, block_tables, strict=True):
        position = context_len - query_len
        while position < context_len:
            index, offset = divmod(position, block_size)
            count = min(block_size - offset, context_len - position)
            first = table[index] * block_size + offset
            slots.extend(range(first, first + count))
            position += count
    return torch.frombuffer(slots, dtype=torch.int64)


def _pad_tables(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    window: int | None,
) -> tuple[Tensor, int]:
    """int32 [S, B] on the host, of just the blocks the contexts reach, padded with 0.

    And the largest id in it.
    """
    needed = [-(-context_len // block_size) for context_len in context_lens]
    width = max(needed)
    padding = array("i", bytes(4 * width))
    flat = array("i")
    for index, (table, count) in enumerate(zip(block_tables, needed, strict=True)):
        try:
            flat.extend(table if len(table) == count else table[:count])
        except (OverflowError, TypeError) as error:
            raise ValueError(f"block table of sequence {index} is not of int32: {error}") from None
        if count < width:
            flat.extend(padding[count:])
    tables = torch.frombuffer(flat, dtype=torch.int32).view(len(needed), width)
    least, most = tables.aminmax()
    if least < 0:
        reach = max(context_lens) if window is None else window
        first = [
            max(0, c - q - reach + 1) // block_size
            for c, q in zip(context_lens, query_lens, strict=True)
        ]
        seen = torch.arange(width) >= torch.tensor(first)[:, None]
        if bool((bad := (tables < 0) & seen).any()):
            index = int(bad.any(dim=1).nonzero()[0])
            raise ValueError(f"block table of sequence {index} has a negative block id")
    return tables, int(most)
