"""Orders that give each sequence a place in time: the base of ``sjf``, ``edf``, ``priority``."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.shared.protocol.states import BY_URGENCY, Lane

from ...sequence import Sequence
from .policy import Policy
from .removable_heap import RemovableHeap

__all__ = ["Lengths", "RankedPolicy"]


class RankedPolicy(Policy):
    """Serves by ``key = arrival + max_overtake_s x place``, where ``place`` is 0 or more.

    That is linear ageing. An urgency of ``waited - max_overtake_s x place`` grows by one a second,
    so the difference of two never changes. The constant part, the key, gives the same order at any
    time, and a heap by it is never sorted again.

    Overtaking is bounded, too: a sequence served before another has no larger key. So it arrived at
    most ``max_overtake_s`` times the other's place after it.

    Args:
        max_overtake_s: how much later one may have arrived that is admitted before another of its
            lane whose place is 1; 0 serves by arrival.
    """

    def __init__(self, max_overtake_s: float) -> None:
        self._max_overtake_s = max_overtake_s
        self._lanes: dict[Lane, RemovableHeap[Sequence]] = {
            lane: RemovableHeap() for lane in BY_URGENCY
        }
        self._returned: dict[Lane, OrderedDict[Sequence, None]] = {
            lane: OrderedDict() for lane in BY_URGENCY
        }

    @abstractmethod
    def _place(self, sequence: Sequence) -> float:
        """For how many times ``max_overtake_s`` it may be overtaken, as it arrives."""

    def _key(self, sequence: Sequence) -> float:
        return sequence.arrival + self._max_overtake_s * self._place(sequence)

    def add(self, sequence: Sequence) -> None:
        """To its place in its lane."""
        self._lanes[sequence.lane].put(sequence, self._key(sequence))

    def put_back(self, sequence: Sequence) -> None:
        """To the front of its lane."""
        returned = self._returned[sequence.lane]
        returned[sequence] = None
        returned.move_to_end(sequence, last=False)

    def peek(self) -> Sequence | None:
        """The first sequence of the most urgent lane that is not empty."""
        for lane in BY_URGENCY:
            if (first := self._first(lane)) is not None:
                return first
        return None

    def _first(self, lane: Lane) -> Sequence | None:
        returned = self._returned[lane]
        return next(iter(returned)) if returned else self._lanes[lane].first()

    def remove(self, sequence: Sequence) -> None:
        """From wherever it stands in its lane."""
        returned = self._returned[sequence.lane]
        if sequence in returned:
            del returned[sequence]
        else:
            self._lanes[sequence.lane].remove(sequence)

    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""
        return len(self._lanes[lane]) + len(self._returned[lane])

    def __iter__(self) -> Iterator[Sequence]:
        for lane in BY_URGENCY:
            yield from self._returned[lane]
            yield from self._lanes[lane]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long sequences may still run.

    Attributes:
        longest: tokens of the longest sequence.
        chunk_size: most tokens of a sequence that one step computes.
    """

    longest: int
    chunk_size: int

    def place(self, sequence: Sequence) -> float:
        """From 0 to 1 for the longest, by the logarithm.

        So twice the length is worth the same wait, be it 100 steps against 50 or 10,000 against
        5,000. As shares of a context of 100,000, both would count for nothing.

        The length is in steps, since for these it holds its place in the batch. Each chunk of its
        prompt, and of what another worker gave of it, is a step. So is each token that it may still
        give. What it really gives is not known, nor what the prefix cache will have when it is
        admitted; ``max_tokens`` and the context bound it.
        """
        allowed = sequence.options.max_tokens - sequence.num_output_tokens
        outputs = max(0, min(allowed, self.longest - sequence.num_tokens))
        steps = -(-sequence.num_tokens // sequence.chunk(self.chunk_size)) + outputs
        return min(1.0, math.log1p(steps) / math.log1p(self.longest))
