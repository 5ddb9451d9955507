"""Which way the sources are lined up, by batch size."""

from __future__ import annotations

from collections.abc import Mapping

from .draft_strategy import LineUp
from .guard import size_class

__all__ = ["Ways"]

_COMPARED = 8
"""Steps after which the ways are compared again."""

_MARGIN = 1.02
"""Another way must promise this much more than the present one. A sequence that comes back to the
draft model lets it read up all that came meanwhile, which no promise contains."""


class Ways:
    """The present way of each class of batch sizes; at first each sequence has what is surer."""

    def __init__(self) -> None:
        self._present: dict[int, LineUp] = {}
        self._turns: dict[int, int] = {}

    def is_due(self, num_sequences: int) -> bool:
        """Whether the next step should compare; to be asked once for each step with choices."""
        key = size_class(num_sequences)
        turn = self._turns[key] = (self._turns.get(key, 0) + 1) % _COMPARED
        return not turn

    def compare(self, num_sequences: int, promised: Mapping[LineUp, float]) -> None:
        """Take another way if it is clearly better; ``promised`` are tokens per second of each."""
        best = max(promised, key=promised.__getitem__)
        if promised[best] > _MARGIN * promised[self.present(num_sequences)]:
            self._present[size_class(num_sequences)] = best

    def present(self, num_sequences: int) -> LineUp:
        """The way of a step."""
        return self._present.get(size_class(num_sequences), LineUp.SURER)
