"""Packs decode steps in memory that stays in place."""

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
from .step_buffers import StepBuffers

__all__ = ["DecodeBatch"]

_SPARE_BLOCKS = 16
"""Columns of a table behind those that its contexts reach, so that it need not grow soon."""

_MOST_SHAPES = 32
"""Memory that is kept: for one sequence with each number of drafts, in both parts."""


class DecodeBatch:
    """Packs steps in which each sequence computes its last token, with drafts behind it or none.

    From one such step to the next, each sequence moves by a few positions. In its block table, only
    the blocks that it writes to may be others: new ones, or its copy of one that it shared. So
    tables stay in place, and a step writes what differs. They are laid out anew for other
    sequences, and for sequences that were given other tables. All else that a step reads lies in
    place, too, in memory of which each shape has two parts.

    A step may be packed *ahead*, while the one before it runs and reads the same tables. That is
    safe because what differs lies behind its contexts: a new block. So it must not be done where a
    block was copied; plans that are made ahead have no copies. It is packed into the other part of
    the memory; :meth:`take_ahead` then makes that the present one.

    Args:
        pool: where the sequences' KV lies.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._block_tables: Sequence[tuple[list[int], ...]] = ()
        self._positions: list[int] = []  # of the last step; none if tables are to be laid out
        self._groups: list[_GroupTables] = []
        self._shapes: dict[tuple[tuple[int, ...], int], StepBuffers] = {}
        self._turn = 0
        self._on_host = pool.device.type == "cpu"

    def pack(
        self,
        token_ids: Sequence[int],
        positions: list[int],
        block_tables: list[tuple[list[int], ...]],
        query_lens: tuple[int, ...] | None = None,
        *,
        ahead: bool = False,
        largest_only: bool = False,
    ) -> PackedStep:
        """As :func:`.batch.pack` of chunks all of whose rows are wanted.

        Args:
            token_ids: of all sequences, one after the other; at least one.
            positions: of each sequence, the place of its first token.
            block_tables: of each sequence, one for each KV cache group of the pool: the lists that
                the engine keeps, not copies of them.
            query_lens: of each sequence, its tokens; None: one each.
            ahead: whether the step that was packed last may still run.
            largest_only: as in :class:`.batch.PackedStep`.

        Returns:
            The step, in memory that the next call may change.

        Raises:
            ValueError: a table does not reach its sequence's last position.
        """
        same = len(block_tables) == len(self._block_tables)
        if not same or not all(map(is_, block_tables, self._block_tables)):
            self._begin(block_tables)
        buffers = self._buffers((1,) * len(positions) if query_lens is None else query_lens, ahead)
        contexts = buffers.write(token_ids, positions)
        before, self._positions = self._positions, []  # until all are laid out
        for group, slots in zip(self._groups, buffers.slots, strict=True):
            group.reach(before, positions, contexts, buffers.longest)
            slots.write(group.slots(positions, contexts, buffers.longest))
        self._positions = positions
        return self._step(buffers, contexts, largest_only=largest_only)

    def _step(self, buffers: StepBuffers, contexts: list[int], *, largest_only: bool) -> PackedStep:
        groups, moved = self._pool.groups, self._on_device
        host_positions = buffers.positions.tensor
        first, *more = self._groups
        batch = RaggedBatch(
            query_starts=buffers.query_starts,
            context_lens=moved(buffers.contexts.tensor),
            block_tables=moved(first.padded),
            positions=moved(host_positions),
            slots=moved(buffers.slots[0].tensor),
            block_size=self._pool.block_size,
            host_query_lens=buffers.query_lens,
            host_context_lens=tuple(contexts),
            host_query_starts=buffers.host_query_starts,
            host_block_tables=first.padded,
            host_positions=host_positions,
            max_query_len=buffers.longest,
            max_context_len=max(contexts),
            max_block=first.max_block,
            window=groups[0].window,
        )
        others = [
            replace(
                batch,
                block_tables=moved(tables.padded),
                slots=moved(slots.tensor),
                host_block_tables=tables.padded,
                max_block=tables.max_block,
                window=group.window,
            )
            for tables, slots, group in zip(more, buffers.slots[1:], groups[1:], strict=True)
        ]
        return PackedStep(
            input_ids=moved(buffers.input_ids),
            rows=buffers.rows,
            num_rows=len(buffers.tokens.values),
            batches=(batch, *others),
            largest_only=largest_only,
            buffers=buffers,
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the device. On the CPU that is itself, and to ask PyTorch takes longer."""
        return tensor if self._on_host else tensor.to(self._pool.device)

    def take_ahead(self) -> None:
        """The step that was packed ahead is the present one now."""
        self._turn = 1 - self._turn

    def _buffers(self, query_lens: tuple[int, ...], ahead: bool) -> StepBuffers:
        key = query_lens, self._turn ^ ahead
        buffers = self._shapes.get(key)
        if buffers is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()  # a step that still runs holds its own
            buffers = StepBuffers(query_lens, len(self._pool.groups), self._pool.device)
            self._shapes[key] = buffers
        return buffers

    def _begin(self, block_tables: list[tuple[list[int], ...]]) -> None:
        """Take other sequences, whose tables are to be laid out."""
        self._block_tables, self._positions = block_tables, []
        self._groups = [
            _GroupTables(tables, self._pool.block_size)
            for tables in zip(*block_tables, strict=True)
        ]


class _GroupTables:
    """The block tables of one KV cache group, on the host.

    Attributes:
        padded: int32 ``[S, B]``.
        max_block: at least the largest block in it.

    Args:
        tables: of ``S`` sequences, as the engine keeps them.
        block_size: tokens of a block.
    """

    def __init__(self, tables: Sequence[list[int]], block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        # The block that each sequence wrote to in the last step; none if it may have been several,
        # since one that was given back may come again at another place.
        self._last: list[int] = []

    def reach(
        self, before: list[int], positions: list[int], contexts: list[int], longest: int
    ) -> None:
        """Have in the tables what the sequences see and write.

        Args:
            before: where they wrote first in the step before; none if tables are to be laid out.
            positions: where they write now, up to the end of their contexts.
            contexts: how many tokens they see.
            longest: the most tokens that one of them writes.
        """
        size, tables = self._block_size, self._tables
        try:
            blocks = [table[(end - 1) // size] for table, end in zip(tables, contexts, strict=True)]
        except IndexError:
            before = []  # laying out says which table is too short
        if not before:
            self._lay_out(contexts)
        elif blocks == self._last and all(map(_follows, positions, before)):
            return
        else:
            self._write(before, positions, contexts)
        self._last = blocks if longest == 1 else []

    def slots(self, positions: list[int], contexts: list[int], longest: int) -> list[int]:
        """Where they store keys and values, ``longest`` of one sequence at most."""
        size, tables = self._block_size, self._tables
        if longest == 1:
            return [
                table[place // size] * size + place % size
                for table, place in zip(tables, positions, strict=True)
            ]
        return [
            table[place // size] * size + place % size
            for table, begin, end in zip(tables, positions, contexts, strict=True)
            for place in range(begin, end)
        ]

    def _lay_out(self, contexts: list[int]) -> None:
        """Write what the tables have."""
        size = self._block_size
        needed = [-(-end // size) for end in contexts]
        self._width = width = max(needed) + _SPARE_BLOCKS
        flat, padding = array("i"), array("i", bytes(4 * width))
        for index, (table, count) in enumerate(zip(self._tables, needed, strict=True)):
            if len(table) < count:
                raise ValueError(
                    f"sequence {index} has {len(table)} blocks of {size} tokens, too few for "
                    f"position {contexts[index] - 1}"
                )
            flat.extend(table if len(table) == count else table[:count])
            flat.extend(padding[count:])
        self._flat = flat
        self.padded = torch.frombuffer(flat, dtype=torch.int32).view(len(needed), width)
        self.max_block = max(flat)

    def _write(self, before: list[int], positions: list[int], contexts: list[int]) -> None:
        """Write the blocks that may be others than in the step before."""
        size, width = self._block_size, self._width
        if max(contexts) > width * size:
            self._lay_out(contexts)
            return
        most = self.max_block
        ranges = zip(self._tables, map(min, before, positions), contexts, strict=True)
        for row, (table, begin, end) in enumerate(ranges):
            first, stop = begin // size, (end - 1) // size + 1
            blocks = table[first:stop]
            most = max(most, *blocks)
            self._flat[row * width + first : row * width + stop] = array("i", blocks)
        self.max_block = most


def _follows(position: int, before: int) -> bool:
    return position == before + 1
