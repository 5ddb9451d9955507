"""Log-probabilities of sampled tokens, for the rows whose requests ask for them.

They belong to the distribution of the model's logits, before temperature and all other options, as
those of OpenAI and vLLM do. The sum over the vocabulary is of the sampler's integer weights. So a
row's figures depend neither on how a device splits the sum nor on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions

from .gumbel_sampling import integer_weights, most_likely, rows_at_once, weight_shift

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

    def compute(self, logits: Tensor, tokens: Tensor) -> Logprobs:
        """Queue the work for one step.

        Args:
            logits: ``[N, V]``; not changed.
            tokens: int64 ``[N]``; for a negative one, a row without distribution, the result means
                nothing.
        """
        width = min(max(self.widths), logits.shape[1])
        step = rows_at_once(logits)
        slices = [self.index[start : start + step] for start in range(0, len(self.rows), step)]
        parts = [
            _of_rows(logits[rows].float(), tokens[rows].clamp(min=0), width) for rows in slices
        ]
        chosen, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        return Logprobs(self, chosen, values, ids)


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


def _of_rows(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores - scores.max(dim=-1, keepdim=True).values
    vocab_size = scores.shape[1]
    total = integer_weights(scores.clone(), vocab_size).sum(dim=-1, keepdim=True)
    log_total = total.double().log() - weight_shift(vocab_size) * math.log(2)
    chosen = scores.gather(1, tokens.unsqueeze(1)).double() - log_total
    if width:
        values, ids = most_likely(scores, width)
    else:
        values, ids = scores[:, :0], torch.empty_like(tokens).unsqueeze(1)[:, :0]
    return chosen.squeeze(1).float(), (values.double() - log_total).float(), ids
