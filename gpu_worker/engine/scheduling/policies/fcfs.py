"""``fcfs``: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from penstock.shared.protocol.states import BY_URGENCY, Lane

from ...sequence import Sequence
from .policy import Policy

__all__ = ["FcfsPolicy"]


class FcfsPolicy(Policy):
    """``critical`` before ``normal`` before ``batch``; first come, first served inside a lane.

    Everything in O(1). Inside a lane no sequence overtakes another.
    """

    def __init__(self) -> None:
        # Ordered dictionaries: deques from whose middle an aborted sequence can leave in O(1).
        self._lanes: dict[Lane, OrderedDict[Sequence, None]] = {
            lane: OrderedDict() for lane in BY_URGENCY
        }

    def add(self, sequence: Sequence) -> None:
        """To the end of its lane."""
        self._lanes[sequence.lane][sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """To the front of its lane."""
        self.add(sequence)
        self._lanes[sequence.lane].move_to_end(sequence, last=False)

    def peek(self) -> Sequence | None:
        """The first sequence of the most urgent lane that is not empty."""
        for waiting in self._lanes.values():
            if waiting:
                return next(iter(waiting))
        return None

    def remove(self, sequence: Sequence) -> None:
        """From wherever it stands in its lane."""
        del self._lanes[sequence.lane][sequence]

    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""
        return len(self._lanes[lane])

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._lanes.values():
            yield from waiting
