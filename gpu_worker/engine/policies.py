"""In which order waiting sequences are admitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from penstock.shared.protocol import Lane

from .sequence import Sequence

__all__ = ["LaneFcfs", "Policy"]


class Policy(ABC):
    """The queue of waiting sequences, and the order in it.

    The scheduler looks only at the first (:meth:`peek`), and when that one does not fit, nobody
    overtakes it: so whatever the order, a large request is not starved by small ones. No method may
    take time in proportion to the number of waiting sequences, except iteration.
    """

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """A new sequence."""

    @abstractmethod
    def put_back(self, sequence: Sequence) -> None:
        """A preempted one: it goes before all others of its lane."""

    @abstractmethod
    def peek(self) -> Sequence | None:
        """The one to admit next; None if nobody waits."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """A waiting one was admitted or aborted."""

    @abstractmethod
    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, for checks."""


class LaneFcfs(Policy):
    """``critical`` before ``normal`` before ``batch``; first come, first served inside a lane."""

    def __init__(self) -> None:
        # Ordered dictionaries: deques from whose middle an aborted sequence can leave in O(1).
        self._lanes: dict[Lane, OrderedDict[Sequence, None]] = {
            lane: OrderedDict() for lane in sorted(Lane, key=lambda lane: lane.rank)
        }

    def add(self, sequence: Sequence) -> None:
        """To the end of its lane."""
        self._lanes[sequence.lane][sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """To the front of its lane."""
        self.add(sequence)
        self._lanes[sequence.lane].move_to_end(sequence, last=False)

    def peek(self) -> Sequence | None:
        """The first of the most urgent lane in which somebody waits."""
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
