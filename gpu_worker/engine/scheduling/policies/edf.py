"""``edf``: earliest deadline first."""

from __future__ import annotations

from ...sequence import Sequence
from .ranked import RankedPolicy

__all__ = ["EdfPolicy"]


class EdfPolicy(RankedPolicy):
    """Lane by lane; inside a lane the one whose deadline comes first (Liu and Layland, 1973).

    None at all counts as one ``max_overtake_s`` after the arrival: otherwise a request without
    haste would wait for ever behind a stream of hasty ones. One that passed before the arrival
    counts as if it were then. So nobody is admitted before a request that arrived after its
    deadline; and who can wait for long says so by a late one, and is not told so by a bound.
    """

    def _place(self, sequence: Sequence) -> float:
        if sequence.deadline is None or not self._max_overtake_s:
            return 1.0
        return max(0.0, sequence.deadline - sequence.arrival) / self._max_overtake_s
