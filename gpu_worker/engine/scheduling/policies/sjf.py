"""``sjf``: shortest remaining first."""

from __future__ import annotations

from ...sequence import Sequence
from .ranked import Lengths, RankedPolicy

__all__ = ["SjfPolicy"]


class SjfPolicy(RankedPolicy):
    """Lane by lane; inside a lane the one with the fewest steps left, ageing with the wait.

    The mean wait is least when the shortest go first (Schrage, 1968); without ageing the longest
    would starve.

    Args:
        max_overtake_s: see :class:`RankedPolicy`.
        lengths: the longest may be overtaken for the whole time, a shorter one for a part of it.
    """

    def __init__(self, max_overtake_s: float, lengths: Lengths) -> None:
        super().__init__(max_overtake_s)
        self._lengths = lengths

    def _place(self, sequence: Sequence) -> float:
        return self._lengths.place(sequence)
