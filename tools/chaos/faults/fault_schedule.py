"""Which faults there are, and when they happen: drawn from a seed before the storm begins."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ALL_FAULTS", "Event", "Fault", "draw_schedule"]


class Fault(StrEnum):
    """What a storm does. The values are the command's options."""

    KILL = "kill"
    """Edge and engine processes are killed (-9), and at times their supervisor, too."""

    STOP = "stop"
    """Edge and engine processes stand still for longer than their lease, and wake up as zombies."""

    DRAIN = "drain"
    """Workers are ended with SIGTERM and replaced: a rolling restart."""

    RESET = "reset"
    """Connections of workers and clients are reset."""

    CUT = "cut"
    """The reply to a script is dropped after the server has executed it."""

    HALF_OPEN = "half-open"
    """Connections stay open and nothing arrives any more."""

    LATE = "late"
    """What was sent arrives after its sender has given up, or with latency."""

    REDIS_KILL = "redis-kill"
    """The server is killed (-9) and comes back with its append-only file."""

    FLUSH = "flush"
    """The server forgets all scripts."""

    SLOW_READERS = "slow-readers"
    """Readers stop reading until the server cuts them."""


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
"""Seconds between two of a kind on average, on four workers of the synthetic model."""

_QUIET_S = 0.5
"""No fault before this: the first requests are to be under way."""


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """A fault at a time.

    Attributes:
        at_s: seconds after the storm's begin.
        fault: what happens.
        seed: for what is drawn when it happens, such as its victim.
    """

    at_s: float
    fault: Fault
    seed: int


def draw_schedule(
    seed: int, seconds: float, faults: Collection[Fault], *, pace: float = 1.0
) -> list[Event]:
    """Times of all faults of a storm, in order. Each kind has at least one if time allows.

    Args:
        seed: of the storm.
        seconds: its length.
        faults: the kinds wanted.
        pace: how many times as often as usual.
    """
    events = []
    for fault in sorted(faults):
        rng = random.Random(f"{seed}/{fault}")
        mean = _MEAN_GAP_S[fault] / pace
        # The first one early enough to happen in any storm of a few seconds.
        at = _QUIET_S + rng.uniform(0, max(0.0, min(mean, 0.6 * seconds - _QUIET_S)))
        while at < seconds:
            events.append(Event(at, fault, rng.getrandbits(32)))
            at += rng.expovariate(1 / mean)
    return sorted(events)
