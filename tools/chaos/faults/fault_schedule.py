"""The kinds of faults, and their schedule, drawn from a seed before the storm begins."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ALL_FAULTS", "Event", "Fault", "draw_schedule"]


class Fault(StrEnum):
    """The kinds of faults. The values are the command's options."""

    KILL = "kill"
    """Edge and engine processes, and at times their supervisor, are killed (-9)."""

    STOP = "stop"
    """Edge and engine processes stop for longer than their lease, and resume as zombies."""

    DRAIN = "drain"
    """Workers are ended with SIGTERM and replaced: a rolling restart."""

    RESET = "reset"
    """Connections of workers and clients are reset."""

    CUT = "cut"
    """The reply to a script is dropped after the server has executed it."""

    HALF_OPEN = "half-open"
    """Connections stay open, but nothing arrives."""

    LATE = "late"
    """Data arrives after its sender has given up, or with latency."""

    REDIS_KILL = "redis-kill"
    """The server is killed (-9) and restarts with its append-only file."""

    FLUSH = "flush"
    """The server forgets all scripts."""

    SLOW_READERS = "slow-readers"
    """Readers stop reading until the server disconnects them."""


ALL_FAULTS = frozenset(Fault)

_MEAN_GAP_S = {
    Fault.KILL: 0.85,
    Fault.STOP: 0.85,
    Fault.DRAIN: 6.0,
    Fault.RESET: 0.6,
    Fault.CUT: 0.5,
    Fault.HALF_OPEN: 4.0,
    Fault.LATE: 2.5,
    Fault.REDIS_KILL: 9.0,
    Fault.FLUSH: 0.5,
    Fault.SLOW_READERS: 2.5,
}
"""Mean seconds between two faults of a kind, on four workers of the synthetic model."""

_QUIET_S = 0.5
"""No fault comes earlier, so that the first requests are running."""


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """A scheduled fault.

    Attributes:
        at_s: seconds after the storm's start.
        fault: its kind.
        seed: of random choices when it happens, such as its victim.
    """

    at_s: float
    fault: Fault
    seed: int


def draw_schedule(
    seed: int, seconds: float, faults: Collection[Fault], *, pace: float = 1.0
) -> list[Event]:
    """All faults of a storm in order of time, at least one of each kind if time allows.

    Args:
        seed: of the storm.
        seconds: of the storm.
        faults: the kinds.
        pace: factor on the rate of faults.
    """
    events = []
    for fault in sorted(faults):
        rng = random.Random(f"{seed}/{fault}")
        mean = _MEAN_GAP_S[fault] / pace
        # The first one comes early enough for a storm of a few seconds.
        at = _QUIET_S + rng.uniform(0, max(0.0, min(mean, 0.6 * seconds - _QUIET_S)))
        while at < seconds:
            events.append(Event(at, fault, rng.getrandbits(32)))
            at += rng.expovariate(1 / mean)
    return sorted(events)
