"""What the parts of the scheduler share: its budgets, its queues and the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.shared.protocol.states import BY_URGENCY, Lane

from ..sequence import Sequence, SequenceStatus
from .preemption_costs import PreemptionCosts
from .scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .policies.policy import Policy

__all__ = ["RunningQueue", "SchedulerState"]


class RunningQueue:
    """The running sequences in the *order of service*: by lane, inside a lane as admitted.

    The order is the same under every policy; a policy orders only waiting sequences. When KV is
    short a sequence may take blocks only from those behind it.
    """

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        # Dictionaries: ordered sets from whose middle a sequence leaves in O(1).
        self._lanes: dict[Lane, dict[Sequence, None]] = {lane: {} for lane in BY_URGENCY}

    def add(self, sequence: Sequence) -> None:
        """Append an admitted sequence to its lane."""
        sequence.status = SequenceStatus.RUNNING
        self._lanes[sequence.lane][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that was preempted or has ended."""
        del self._lanes[sequence.lane][sequence]

    def in_order(self) -> list[Sequence]:
        """All running sequences, the first to be served first."""
        return [sequence for lane in self._lanes.values() for sequence in lane]

    def less_urgent(self, rank: int) -> list[Sequence]:
        """Sequences of lanes behind the one of ``rank``, the last to be served first."""
        lanes = [lane for key, lane in self._lanes.items() if key.rank > rank]
        return [sequence for lane in reversed(lanes) for sequence in reversed(lane)]

    def count(self, lane: Lane) -> int:
        """Number of running sequences of a lane."""
        return len(self._lanes[lane])

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lanes[sequence.lane]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """One scheduler's state. A sequence it knows is either in ``running`` or in ``waiting``.

    Attributes:
        config: token and sequence budgets, and how prompts are chunked.
        kv: the KV blocks of running sequences, and the swapped KV of waiting ones.
        waiting: the waiting sequences, in order of admission.
        preemption_costs: measures swap against recompute; None where ``config`` has chosen.
        running: the running sequences, in order of service.
    """

    config: SchedulerConfig
    kv: KVCache
    waiting: Policy
    preemption_costs: PreemptionCosts | None
    running: RunningQueue = field(default_factory=RunningQueue)
