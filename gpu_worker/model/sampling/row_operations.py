"""What the sampler computes over whole rows of logits: by PyTorch, or by another library."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .gumbel_sampling import SampledRows, draw, largest

__all__ = ["RowOperations", "TorchRows"]


class RowOperations(Protocol):
    """A row of logits is long, so what reads all of it should be fast."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each row, and the first token that has it."""

    def draw(self, logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
        """A token of each sampled row; see :func:`.gumbel_sampling.draw`."""


class TorchRows:
    """By PyTorch, on any device."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`RowOperations`."""
        return largest(logits)

    def draw(self, logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
        """See :class:`RowOperations`."""
        return draw(logits, largest, sampled)
