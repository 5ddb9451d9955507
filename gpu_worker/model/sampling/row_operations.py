"""What the sampler computes over whole rows of logits: by PyTorch, or by another library."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from .gumbel_sampling import (
    SampledRows,
    draw,
    integer_weights,
    largest,
    most_likely,
    rows_at_once,
    weight_shift,
)

__all__ = ["RowOperations", "TorchRows"]


class RowOperations(Protocol):
    """A row of logits is long, so what reads all of it should be fast."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each row, and the first token that has it."""

    def largest_as_lists(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """What :meth:`largest` gives, on the host."""

    def draw(self, logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
        """A token of each sampled row; see :func:`.gumbel_sampling.draw`."""

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of a token of each of ``R`` rows, and of the most likely ones.

        Args:
            logits: ``[N, V]``; not changed.
            rows: int64 ``[R]``.
            tokens: int64 ``[R]``.
            width: how many of the most likely tokens.

        Returns:
            float32 ``[R]``, float32 ``[R, width]`` and their ids int64 ``[R, width]``, most likely
            first. They mean nothing for a row without a distribution.
        """

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Make the logits of forbidden tokens -inf, in place.

        Args:
            logits: float32 ``[N, V]``.
            rows: int64 ``[R]``, no row twice.
            masks: int32 ``[R, words]`` on the host. Bit ``i % 32`` of word ``i // 32`` tells
                whether token ``i`` may come.
        """


class TorchRows:
    """By PyTorch, on any device."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`RowOperations`."""
        return largest(logits)

    def largest_as_lists(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """See :class:`RowOperations`."""
        both = torch.stack([found.double() for found in self.largest(logits)]).cpu()  # one wait
        return both[0].tolist(), both[1].long().tolist()

    def draw(self, logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
        """See :class:`RowOperations`."""
        return draw(logits, largest, sampled)

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`RowOperations`."""
        step = rows_at_once(logits)
        slices = [slice(start, start + step) for start in range(0, rows.numel(), step)]
        parts = [_logprobs(logits[rows[part]].float(), tokens[part], width) for part in slices]
        chosen, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        return chosen, values, ids

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """See :class:`RowOperations`."""
        words = masks.to(logits.device, non_blocking=True)
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        # A few rows at a time: unpacked, a row is 32 times as large.
        step = rows_at_once(logits)
        for start in range(0, words.shape[0], step):
            which, part = rows[start : start + step], words[start : start + step]
            bits = (part.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)
            forbidden = bits[:, : logits.shape[1]] == 0
            logits[which] = logits[which].masked_fill_(forbidden, -math.inf)


def _logprobs(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores - scores.max(dim=-1, keepdim=True).values
    vocab_size = scores.shape[1]
    # Of the sampler's integer weights, so that a row's figures depend neither on how a device
    # splits the sum nor on the batch.
    total = integer_weights(scores.clone(), vocab_size).sum(dim=-1, keepdim=True)
    log_total = total.double().log() - weight_shift(vocab_size) * math.log(2)
    chosen = scores.gather(1, tokens.unsqueeze(1)).double() - log_total
    if width:
        values, ids = most_likely(scores, width)
    else:
        values, ids = scores[:, :0], torch.empty_like(tokens).unsqueeze(1)[:, :0]
    return chosen.squeeze(1).float(), (values.double() - log_total).float(), ids
