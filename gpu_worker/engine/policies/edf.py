"""``edf``: earliest deadline first."""

from __future__ import annotations

from ..sequence import Sequence
from .ranked import Ranked

__all__ = ["EarliestDeadline"]


class EarliestDeadline(Ranked):
    """Lane by lane; inside a lane the one whose deadline comes first (Liu and Layland, 1973).

    A deadline more than ``max_overtake_s`` after the arrival counts as if it were there, and so
    does none at all: otherwise a request without haste would wait for ever behind a stream of hasty
    ones. One that passed before the arrival counts as if it were then.
    """

    def _place(self, sequence: Sequence) -> float:
        if sequence.deadline is None or not self._max_overtake_s:
            return 1.0
        ahead = sequence.deadline - sequence.arrival
        return min(1.0, max(0.0, ahead / self._max_overtake_s))
