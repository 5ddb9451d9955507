"""A bound on the wait of preempted sequences, whatever the order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from penstock.shared.protocol.states import Lane

from ...sequence import Sequence
from .policy import Policy

__all__ = ["BoundedPolicy"]


class BoundedPolicy(Policy):
    """Another order, in which no preempted sequence starves behind more urgent lanes.

    In most orders a lane is a hard class: as long as urgent work keeps coming, what it displaced
    would wait. So a sequence that has waited for ``max_overtake_s`` since its preemption is next,
    whatever its lane. Then it keeps its place; else it would be displaced again after one token.

    Time is the sum of step durations: without steps no sequence is overtaken.

    Args:
        order: decides otherwise.
        max_overtake_s: see above.
    """

    def __init__(self, order: Policy, max_overtake_s: float) -> None:
        self._order = order
        self._max_overtake_s = max_overtake_s
        self._now = 0.0
        self._returned: OrderedDict[Sequence, float] = OrderedDict()  # since when, oldest first
        self._protected: set[Sequence] = set()  # waited for too long; they keep their places

    def elapse(self, seconds: float) -> None:
        """A step took so long."""
        self._now += seconds

    def add(self, sequence: Sequence) -> None:
        """As the order has it."""
        self._order.add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """As the order has it, and its time begins."""
        self._order.put_back(sequence)
        self._returned[sequence] = self._now

    def peek(self) -> Sequence | None:
        """The sequence that has waited for too long, else the first of the order."""
        oldest = next(iter(self._returned), None)
        if oldest is not None and self._is_overdue(oldest):
            return oldest
        return self._order.peek()

    def _is_overdue(self, sequence: Sequence) -> bool:
        since = self._returned.get(sequence)
        return since is not None and self._now - since > self._max_overtake_s

    def admit(self, sequence: Sequence) -> None:
        """As the order has it; its time ends."""
        if self._is_overdue(sequence):
            self._protected.add(sequence)
        self._returned.pop(sequence, None)
        self._order.admit(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It leaves."""
        self._returned.pop(sequence, None)
        self._protected.discard(sequence)
        self._order.remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """It has ended."""
        self._protected.discard(sequence)
        self._order.end(sequence)

    def may_displace(self, head: Sequence, runs: Sequence) -> bool:
        """As the order has it, but for those that waited for too long before."""
        return runs not in self._protected and self._order.may_displace(head, runs)

    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""
        return self._order.num_waiting(lane)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)
