"""One step's tokens of many sequences, packed side by side without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.ragged import RaggedBatch

from .forward_context import ForwardContext
from .kv.kv_pool import KVPool

__all__ = ["PackedStep", "Piece", "Rows", "decode_pieces", "forward_logits", "pack"]


class Rows(Enum):
    """Of which tokens of a piece the logits are wanted."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens one sequence computes in a step.

    Attributes:
        token_ids: the tokens.
        start: position of the first of them in its sequence; the KV of all before lies in the pool.
        block_table: the sequence's blocks, covering at least ``start + len(token_ids)`` tokens.
        rows: whose logits are wanted.
        more_tables: those of the pool's other KV kinds.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    rows: Rows = Rows.NONE
    more_tables: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What a forward over T packed tokens needs.

    Attributes:
        input_ids: int64 ``[1, T]``.
        rows: int64 ``[R]``, the packed tokens whose logits are wanted, at least one.
        num_rows: how many of them were asked for; 0 where ``rows`` had to name one all the same.
        batches: whose tokens these are and where in their sequences; one for each KV kind of the
            pool, with its block tables.
    """

    input_ids: Tensor
    rows: Tensor
    num_rows: int
    batches: tuple[RaggedBatch, ...]


def pack(pieces: Sequence[Piece], pool: KVPool) -> PackedStep:
    """Pack ``pieces`` in their order.

    Args:
        pieces: at least one, each with at least one token.
        pool: where their KV lies; the tensors go to its device.
    """
    device = pool.device
    token_ids: list[int] = []
    rows: list[int] = []
    for piece in pieces:
        first = len(token_ids)
        token_ids += piece.token_ids
        if piece.rows is Rows.ALL:
            rows += range(first, len(token_ids))
        elif piece.rows is Rows.LAST:
            rows.append(len(token_ids) - 1)
    batch = RaggedBatch.from_lists(
        [len(piece.token_ids) for piece in pieces],
        [piece.start + len(piece.token_ids) for piece in pieces],
        [piece.block_table for piece in pieces],
        block_size=pool.block_size,
        device=device,
        window=pool.kinds[0].window,
    )
    more = (
        batch.with_tables([piece.more_tables[index] for piece in pieces], window=kind.window)
        for index, kind in enumerate(pool.kinds[1:])
    )
    return PackedStep(
        input_ids=torch.tensor([token_ids], device=device),
        # An empty selection is an odd shape for quantised and prepacked output layers.
        rows=torch.tensor(rows or [0], device=device),
        num_rows=len(rows),
        batches=(batch, *more),
    )


def decode_pieces(pool: KVPool, num_sequences: int, num_drafts: int = 0) -> list[Piece]:
    """Pieces of a decode step of short sequences, with so many drafts each, to time or warm up.

    As many as the pool has blocks for; their positions are the last of these.
    """
    size, count = pool.block_size, 1 + num_drafts
    each = -(-count // size)
    rows = Rows.ALL if num_drafts else Rows.LAST
    num_more, num_blocks = len(pool.kinds) - 1, min(kind.num_blocks for kind in pool.kinds)
    tables = [range(start, start + each) for start in range(0, num_blocks - each + 1, each)]
    return [
        Piece([0] * count, each * size - count, table, rows, [table] * num_more)
        for table in tables[:num_sequences]
    ]


def forward_logits(model: Any, context: ForwardContext, pool: KVPool, step: PackedStep) -> Tensor:
    """Compute ``step``, storing its KV in ``pool``.

    Returns:
        The logits of the wanted rows, ``[num_rows, vocab]``, in the model's dtype.

    Raises:
        RuntimeError: the model gives other rows than those asked for.
    """
    with context.step(pool, step.batches):
        logits: Tensor = model(
            input_ids=step.input_ids,
            position_ids=step.batches[0].positions.unsqueeze(0),
            use_cache=False,
            # As a tensor; and never lm_head alone: softcap and scaling of logits live in forward.
            logits_to_keep=step.rows,
        ).logits
    if logits.shape[1] != len(step.rows):
        raise RuntimeError(
            f"asked for the logits of {len(step.rows)} tokens, the model gives those of "
            f"{logits.shape[1]}: it does not heed logits_to_keep"
        )
    return logits[0, : step.num_rows]
