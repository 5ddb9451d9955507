"""Which sequences run, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.shared.protocol import Lane

from ..sequence import Sequence, SequenceStatus
from .policies import BY_URGENCY

__all__ = ["Running"]


class Running:
    """The running sequences, in the *order of service*: by lane, inside a lane as admitted.

    It holds whatever the policy, which orders only those that wait. When KV is short a sequence may
    take blocks only from those behind it.
    """

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        # Dictionaries: ordered sets from whose middle one leaves in O(1).
        self._lanes: dict[Lane, dict[Sequence, None]] = {lane: {} for lane in BY_URGENCY}

    def add(self, sequence: Sequence) -> None:
        """It was admitted: to the end of its lane."""
        sequence.status = SequenceStatus.RUNNING
        self._lanes[sequence.lane][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """It was preempted or has ended."""
        del self._lanes[sequence.lane][sequence]

    def in_order(self) -> list[Sequence]:
        """All of them, the first to be served first."""
        return [sequence for lane in self._lanes.values() for sequence in lane]

    def less_urgent(self, rank: int) -> list[Sequence]:
        """Those of lanes behind the one of ``rank``, the last to be served first."""
        lanes = [lane for key, lane in self._lanes.items() if key.rank > rank]
        return [sequence for lane in reversed(lanes) for sequence in reversed(lane)]

    def count(self, lane: Lane) -> int:
        """How many of this lane."""
        return len(self._lanes[lane])

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lanes[sequence.lane]
