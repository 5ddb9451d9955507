"""Packs decode steps with block tables that stay in place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

import torch
from torch import Tensor

from penstock.kernels.ragged import RaggedBatch

from ..kv.kv_pool import KVPool
from .batch import PackedStep

__all__ = ["DecodeBatch"]

_SPARE_BLOCKS = 16
"""Columns of a table behind those that its contexts reach, so that it need not grow soon."""


class DecodeBatch:
    """Packs steps in which each sequence computes one token and samples the next.

    From one such step to the next, each sequence moves by one position. In its block table, only
    the block that it writes to may be another: a new one, or its copy of one that it shared. So
    tables stay in place, and a step writes what differs. They are laid out anew for other
    sequences, and for sequences that were given other tables or moved further.

    A step may be packed while the one before it runs, and reads the same tables. That is safe
    because what differs lies behind its contexts: a new block. So it must not be done where a
    block was copied; plans that are made ahead have no copies.

    Args:
        pool: where the sequences' KV lies.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._block_tables: Sequence[tuple[list[int], ...]] = ()
        self._next_positions: list[int] = []
        self._groups: list[_GroupTables] = []
        self._set_count(1)

    def pack(
        self,
        token_ids: array[int],
        positions: list[int],
        block_tables: list[tuple[list[int], ...]],
        *,
        largest_only: bool = False,
    ) -> PackedStep:
        """As :func:`.batch.pack` of chunks of one token each, all of whose rows are wanted.

        Args:
            token_ids: int64, the token of each sequence, at least one. On the CPU the step's
                tokens are this memory.
            positions: its place in its sequence.
            block_tables: of each sequence, one for each KV cache group of the pool: the lists that
                the engine keeps, not copies of them.
            largest_only: as in :class:`.batch.PackedStep`.

        Returns:
            The step. The next call may change its block tables.

        Raises:
            ValueError: a table does not reach its sequence's position.
        """
        same = len(block_tables) == len(self._block_tables)
        if not same or not all(map(is_, block_tables, self._block_tables)):
            self._begin(block_tables)
        if positions != self._next_positions:
            self._next_positions = []  # until all are laid out
            for group in self._groups:
                group.lay_out(positions)
        contexts = self._next_positions = [position + 1 for position in positions]
        device = self._pool.device
        host_positions = _int64(positions)
        first, *more = [group.advance(positions) for group in self._groups]
        slots, tables, max_block = first
        batch = RaggedBatch(
            query_starts=self._query_starts,
            context_lens=torch.frombuffer(array("i", contexts), dtype=torch.int32).to(device),
            block_tables=tables.to(device),
            positions=host_positions.to(device),
            slots=slots.to(device),
            block_size=self._pool.block_size,
            host_query_lens=self._query_lens,
            host_context_lens=tuple(contexts),
            host_query_starts=self._host_query_starts,
            host_block_tables=tables,
            host_positions=host_positions,
            max_query_len=1,
            max_context_len=max(contexts),
            max_block=max_block,
            window=self._pool.groups[0].window,
        )
        others = [
            replace(
                batch,
                block_tables=tables.to(device),
                slots=slots.to(device),
                host_block_tables=tables,
                max_block=max_block,
                window=group.window,
            )
            for (slots, tables, max_block), group in zip(more, self._pool.groups[1:], strict=True)
        ]
        return PackedStep(
            input_ids=torch.frombuffer(token_ids, dtype=torch.int64).unsqueeze(0).to(device),
            rows=self._rows,
            num_rows=len(token_ids),
            batches=(batch, *others),
            largest_only=largest_only,
        )

    def _begin(self, block_tables: list[tuple[list[int], ...]]) -> None:
        """Take other sequences, whose tables are to be laid out."""
        if len(block_tables) != len(self._query_lens):
            self._set_count(len(block_tables))
        self._block_tables, self._next_positions = block_tables, []
        self._groups = [
            _GroupTables(tables, self._pool.block_size)
            for tables in zip(*block_tables, strict=True)
        ]

    def _set_count(self, count: int) -> None:
        device = self._pool.device
        self._query_lens = (1,) * count
        self._host_query_starts = tuple(range(count + 1))
        starts = array("i", self._host_query_starts)
        self._query_starts = torch.frombuffer(starts, dtype=torch.int32).to(device)
        self._rows = torch.arange(count, device=device)


class _GroupTables:
    """The block tables of one KV cache group, as one int32 ``[S, B]`` on the host.

    Args:
        tables: of ``S`` sequences, as the engine keeps them.
        block_size: tokens of a block.
    """

    def __init__(self, tables: Sequence[list[int]], block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size

    def lay_out(self, positions: list[int]) -> None:
        """Write what the tables have up to these positions."""
        size = self._block_size
        needed = [position // size + 1 for position in positions]
        self._width = width = max(needed) + _SPARE_BLOCKS
        flat, padding = array("i"), array("i", bytes(4 * width))
        for index, (table, count) in enumerate(zip(self._tables, needed, strict=True)):
            if len(table) < count:
                raise ValueError(
                    f"sequence {index} has {len(table)} blocks of {size} tokens, too few for "
                    f"position {positions[index]}"
                )
            flat.extend(table if len(table) == count else table[:count])
            flat.extend(padding[count:])
        self._flat = flat
        self._padded = torch.frombuffer(flat, dtype=torch.int32).view(len(needed), width)
        self._max_block = max(flat)
        self._last = [table[count - 1] for table, count in zip(self._tables, needed, strict=True)]

    def advance(self, positions: list[int]) -> tuple[Tensor, Tensor, int]:
        """The slots of these positions, the tables with their blocks, and the largest block."""
        size, tables = self._block_size, self._tables
        try:
            blocks = [table[place // size] for table, place in zip(tables, positions, strict=True)]
        except IndexError:
            raise ValueError(f"a block table is too short for its position: {positions}") from None
        if blocks != self._last:
            self._change(blocks, positions)
        slots = [
            block * size + place % size for block, place in zip(blocks, positions, strict=True)
        ]
        return _int64(slots), self._padded, self._max_block

    def _change(self, blocks: list[int], positions: list[int]) -> None:
        size, width = self._block_size, self._width
        if max(positions) // size >= width:
            self.lay_out(positions)
            return
        for row, (block, place) in enumerate(zip(blocks, positions, strict=True)):
            self._flat[row * width + place // size] = block
        self._last, self._max_block = blocks, max(self._max_block, *blocks)


def _int64(values: list[int]) -> Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64)
