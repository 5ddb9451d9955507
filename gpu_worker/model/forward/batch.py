"""A step's tokens of many sequences, packed side by side without padding."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.ragged import RaggedBatch

from ..kv.kv_pool import KVPool
from .forward_context import ForwardContext
from .step_buffers import StepBuffers

__all__ = [
    "Forward", "PackedStep", "Rows", "SequenceChunk", "decode_chunks", "forward_logits", "pack",
]  # fmt: skip

Forward = Callable[[Callable[[], None] | None], Tensor]
"""Computes one step's logits, and calls what it is given while the device does so."""


class Rows(Enum):
    """The tokens of a chunk whose logits are wanted."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The tokens one sequence computes in a step.

    Attributes:
        token_ids: the tokens.
        start: position of the first of them in its sequence; the KV of all before lies in the pool.
        block_tables: the sequence's blocks in each KV cache group of the pool, covering at least
            ``start + len(token_ids)`` tokens.
        rows: the tokens whose logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_tables: Sequence[Sequence[int]]
    rows: Rows = Rows.NONE


# Not frozen, see RaggedBatch.
@dataclass(slots=True)
class PackedStep:
    """What a forward over T packed tokens needs.

    Attributes:
        input_ids: int64 ``[1, T]``.
        rows: int64 ``[R]``, the packed tokens whose logits are wanted, at least one.
        num_rows: how many of them were asked for; 0 if ``rows`` names one only to have one.
        batches: which sequences and positions the tokens belong to; one batch for each KV cache
            group of the pool, with its block tables.
        largest_only: whether the largest logit of each row is all that is looked at.
        buffers: the host memory that it was packed in, which other steps of its shape share; None
            if all of it is its own. On the CPU its tensors are that memory.
    """

    input_ids: Tensor
    rows: Tensor
    num_rows: int
    batches: tuple[RaggedBatch, ...]
    largest_only: bool = False
    buffers: StepBuffers | None = None


def pack(
    chunks: Sequence[SequenceChunk], pool: KVPool, *, largest_only: bool = False
) -> PackedStep:
    """Pack ``chunks`` in their order.

    Args:
        chunks: at least one, each with at least one token.
        pool: where their KV lies; the tensors go to its device.
        largest_only: as in :class:`PackedStep`.
    """
    device = pool.device
    token_ids, rows = array("q"), array("q")
    for chunk in chunks:
        first = len(token_ids)
        token_ids.extend(chunk.token_ids)
        if chunk.rows is Rows.ALL:
            rows.extend(range(first, len(token_ids)))
        elif chunk.rows is Rows.LAST:
            rows.append(len(token_ids) - 1)
    batch = RaggedBatch.from_lists(
        [len(chunk.token_ids) for chunk in chunks],
        [chunk.start + len(chunk.token_ids) for chunk in chunks],
        [chunk.block_tables[0] for chunk in chunks],
        block_size=pool.block_size,
        device=device,
        window=pool.groups[0].window,
    )
    more = (
        batch.with_tables([chunk.block_tables[index] for chunk in chunks], window=group.window)
        for index, group in enumerate(pool.groups[1:], start=1)
    )
    return PackedStep(
        input_ids=torch.frombuffer(token_ids, dtype=torch.int64).unsqueeze(0).to(device),
        # An empty selection is an odd shape for quantised and prepacked output layers.
        rows=torch.frombuffer(rows or array("q", [0]), dtype=torch.int64).to(device),
        num_rows=len(rows),
        batches=(batch, *more),
        largest_only=largest_only,
    )


def decode_chunks(pool: KVPool, num_sequences: int, *, longest: int) -> list[SequenceChunk]:
    """A decode step of short sequences, to time or warm up.

    Each sequence has a block of its own and decodes its last position below ``longest``. So there
    are at most as many sequences as blocks in the pool.
    """
    position = max(0, min(pool.block_size, longest) - 1)
    num_blocks = min(group.num_blocks for group in pool.groups)
    return [
        SequenceChunk([0], position, [range(block, block + 1)] * len(pool.groups), Rows.LAST)
        for block in range(min(num_sequences, num_blocks))
    ]


def forward_logits(model: Any, context: ForwardContext, step: PackedStep, pool: KVPool) -> Tensor:
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
