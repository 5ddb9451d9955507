"""``edf``: earliest deadline first."""

from __future__ import annotations

from ...sequence import Sequence
from .ranked import RankedPolicy

__all__ = ["EdfPolicy"]


class EdfPolicy(RankedPolicy):
    """Lane by lane; inside a lane the one whose deadline comes first (Liu and Layland, 1973).

    None at all counts as one ``max_overtake_s`` after the arrival: otherwise a request without
    haste would wait for ever behind a stream of hasty ones. One that passed before the arrival
    counts as if it were then. So a request is never overtaken by one that arrived after its
    deadline. A late deadline says that a request can wait; no other bound applies to it.
    """

    def _place(self, sequence: Sequence) -> float:
        if sequence.deadline is None or not self._max_overtake_s:
            return 1.0
        return max(0.0, sequence.deadline - sequence.arrival) / self._max_overtake_s
