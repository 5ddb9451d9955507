"""Log-probabilities of sampled tokens, for the rows whose requests ask for them.

They belong to the distribution of the model's logits, before temperature and all other options, as
those of OpenAI and vLLM do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions

from .row_operations import RowOperations

__all__ = ["LogprobRows", "Logprobs"]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that ask for log-probabilities; ``R`` of them.

    Attributes:
        rows: positions in the batch.
        index: the same, int64 ``[R]``, where the logits are.
        widths: how many most likely tokens each wants.
    """

    rows: tuple[int, ...]
    index: Tensor
    widths: tuple[int, ...]

    @classmethod
    def of(cls, options: Sequence[SamplingOptions], device: torch.device) -> LogprobRows | None:
        """Those of a batch with these options; None if there are none."""
        wanted = {row: of.logprobs for row, of in enumerate(options) if of.logprobs is not None}
        if not wanted:
            return None
        rows = tuple(wanted)
        return cls(rows, torch.tensor(rows, device=device), tuple(wanted.values()))

    def compute(self, logits: Tensor, tokens: Tensor, operations: RowOperations) -> Logprobs:
        """Queue the work for one step.

        Args:
            logits: ``[N, V]``; not changed.
            tokens: int64 ``[N]``; for a negative one, a row without distribution, the result means
                nothing.
            operations: what computes.
        """
        width = min(max(self.widths), logits.shape[1])
        mine = tokens[self.index].clamp(min=0)
        return Logprobs(self, *operations.logprobs(logits, self.index, mine, width))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One step's figures, on the device.

    Attributes:
        of: their rows.
        chosen: float32 ``[R]``, of the sampled tokens.
        values: float32 ``[R, K]``, of the most likely ones.
        ids: int64 ``[R, K]``.
    """

    of: LogprobRows
    chosen: Tensor
    values: Tensor
    ids: Tensor

    def by_row(self) -> dict[int, TokenLogprobs]:
        """The figures by position in the batch. Waits for the device."""
        columns = self.chosen.tolist(), self.values.tolist(), self.ids.tolist()
        found = {}
        for row, width, chosen, values, ids in zip(
            self.of.rows, self.of.widths, *columns, strict=True
        ):
            pairs = zip(ids[:width], values[:width], strict=True)
            # A token of probability 0 is not among the most likely.
            top = tuple((token_id, value) for token_id, value in pairs if value > -math.inf)
            found[row] = TokenLogprobs(chosen, top)
        return found
