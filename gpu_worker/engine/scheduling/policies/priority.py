"""``priority``: one order of waiting time, length and lane together."""

from __future__ import annotations

from penstock.shared.protocol.states import BY_URGENCY

from ...sequence import Sequence
from .ranked import Lengths, RankedPolicy

__all__ = ["PriorityPolicy"]

_LANE_SHARE = 0.75
"""Part of the time for which the least urgent lane may be overtaken; the rest is for length. With
three lanes and equal lengths a lane is worth three eighths of the whole, more than the length. So a
more urgent lane goes first unless the other has waited for longer."""


class PriorityPolicy(RankedPolicy):
    """All lanes in one order: lane and length are worth a head start, and waiting makes up for it.

    Only in this order is a lane no hard class: bounded overtaking holds between lanes, too. So only
    it bounds how long ``batch`` may wait behind ``critical`` inside a worker. Urgent work displaces
    running work of a less urgent lane only if that would wait behind it. So a sequence admitted for
    its age is not thrown out again for its lane.

    Args:
        max_overtake_s: see :class:`RankedPolicy`; here between all sequences.
        lengths: where a sequence stands by its length.
    """

    def __init__(self, max_overtake_s: float, lengths: Lengths) -> None:
        super().__init__(max_overtake_s)
        self._lengths = lengths

    def _place(self, sequence: Sequence) -> float:
        lane = sequence.rank / (len(BY_URGENCY) - 1)
        length = self._lengths.place(sequence)
        return _LANE_SHARE * lane + (1 - _LANE_SHARE) * length

    def peek(self) -> Sequence | None:
        """The first of the lane whose first has the smallest key."""
        firsts = [first for lane in BY_URGENCY if (first := self._first(lane)) is not None]
        return min(firsts, key=self._key, default=None)

    def may_displace(self, head: Sequence, runs: Sequence) -> bool:
        """Only if both the lane and the whole order say so."""
        return super().may_displace(head, runs) and self._key(head) < self._key(runs)
