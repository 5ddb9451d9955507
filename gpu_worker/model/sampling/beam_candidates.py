"""The most likely next tokens of beams.

Their scores are those that beam search adds up in transformers' ``generate``: log-probabilities of
the logits, to which the processors are then applied. (So a penalty acts on log-probabilities here,
and on logits where tokens are sampled.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .logits_processors import LogitsProcessors, Processable, processes
from .row_operations import RowOperations

__all__ = ["CandidateRows", "CandidateTokens"]


class Beam(Processable, Protocol):
    """What is read of a sequence."""

    @property
    def num_candidates(self) -> int:
        """How many of its most likely next tokens are wanted; 0: it is no beam."""


@dataclass(frozen=True, slots=True)
class CandidateRows:
    """Rows that are beams; ``R`` of them.

    Attributes:
        rows: positions in the batch.
        index: the same, int64 ``[R]``, where the logits are.
        widths: how many most likely tokens each wants.
        processed: positions in ``rows`` of those whose figures are changed, int64; None: none.
        processors: what changes them; None: nothing.
    """

    rows: tuple[int, ...]
    index: Tensor
    widths: tuple[int, ...]
    processed: Tensor | None
    processors: LogitsProcessors | None

    @classmethod
    def of(
        cls, sequences: Sequence[Beam], device: torch.device, eos_token_ids: frozenset[int]
    ) -> CandidateRows | None:
        """Those of a batch of these sequences; None if there are none."""
        wanted = {row: s.num_candidates for row, s in enumerate(sequences) if s.num_candidates}
        if not wanted:
            return None
        rows = tuple(wanted)
        index = torch.tensor(rows, device=device)
        changed = [i for i, row in enumerate(rows) if processes(sequences[row].options)]
        if not changed:
            return cls(rows, index, tuple(wanted.values()), None, None)
        mine = [sequences[rows[i]] for i in changed]
        processors = LogitsProcessors(mine, device, eos_token_ids)
        processed = torch.tensor(changed, device=device)
        return cls(rows, index, tuple(wanted.values()), processed, processors)

    def compute(self, logits: Tensor, operations: RowOperations) -> CandidateTokens:
        """Queue the work for one step.

        Args:
            logits: ``[N, V]`` in any float type; not changed.
            operations: what computes over whole rows.
        """
        scores = torch.log_softmax(logits[self.index].float(), dim=-1)
        if self.processors is not None and self.processed is not None:
            scores[self.processed] = self.processors.apply(scores[self.processed], operations)
        values, ids = scores.topk(min(max(self.widths), scores.shape[1]), dim=-1)
        return CandidateTokens(self, values, ids)


@dataclass(frozen=True, slots=True)
class CandidateTokens:
    """One step's candidates, on the device.

    Attributes:
        of: their rows.
        values: float32 ``[R, K]``, the most likely first.
        ids: int64 ``[R, K]``.
    """

    of: CandidateRows
    values: Tensor
    ids: Tensor

    def by_row(self) -> dict[int, tuple[tuple[int, float], ...]]:
        """Tokens and figures by position in the batch. Waits for the device."""
        lists = zip(
            self.of.rows, self.of.widths, self.values.tolist(), self.ids.tolist(), strict=True
        )
        return {
            row: tuple(
                (token_id, value)
                for token_id, value in zip(ids[:width], values[:width], strict=True)
                if value > -math.inf
            )
            for row, width, values, ids in lists
        }
