"""How much more work a worker asks for: the rule that its edge and the simulator share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.protocol import Lane

__all__ = ["NO_ROOM", "Room"]

_BY_URGENCY = tuple(sorted(Lane, key=lambda lane: lane.rank))


@dataclass(frozen=True, slots=True)
class Room:
    """How many more requests a worker can run, and of which lanes.

    Attributes:
        requests: how many.
        least_urgent: of this lane, and of all more urgent ones.
    """

    requests: int
    least_urgent: Lane

    @classmethod
    def beside(
        cls,
        owned: Mapping[str, int],
        waiting: Mapping[Lane, int],
        arriving_tokens: int,
        *,
        max_sequences: int,
        claim_batch: int,
        step_tokens: int,
    ) -> Room:
        """What to ask for beside what is there.

        Sequences only keep those from running that are not more urgent, since the engine lets
        urgent work displace the rest. So for each lane, those at least as urgent count; the least
        urgent lane for which a sequence is left is what to ask for.

        Nothing is hoarded: a claimed request that only waits here could be running elsewhere, so
        more is asked for only while everything as urgent that was claimed before runs, and new
        prompts do not fill a step.

        Args:
            owned: sequences of requests claimed and not ended, by lane; a lane without any may
                lack.
            waiting: of these, sequences without KV blocks; likewise.
            arriving_tokens: of prompts that were claimed and whose first step has not ended.
            max_sequences: sequences that the worker runs at the same time.
            claim_batch: requests claimed in one exchange at most.
            step_tokens: query tokens of a step at most.
        """
        room, busy = NO_ROOM, 0
        if arriving_tokens >= step_tokens:
            return room
        for lane in _BY_URGENCY:
            busy += owned.get(lane, 0)
            free = min(claim_batch, max_sequences - busy)
            if free <= 0 or waiting.get(lane, 0):
                break
            room = cls(free, lane)
        return room


NO_ROOM = Room(0, Lane.CRITICAL)
