"""What a storm has counted, and what it has found wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.shared.protocol import End

__all__ = ["Ended", "Invariant", "Ledger", "Violation"]

_VIOLATIONS_KEPT = 200


class Invariant(StrEnum):
    """What must hold whatever happens."""

    READERS_EXACT = "I1_readers_exact"
    """Every reader sees indexes from its first one to the last, each once."""

    READERS_AGREE = "I2_readers_agree"
    """Live, returning, slow and late readers, the log and the undisturbed output are the same."""

    ONE_END = "I3_one_end"
    """Every accepted request reaches one terminal state that fits it, by deadline and sweep."""

    COUNTERS = "I4_counters"
    """Counters equal a recount, and nothing is owned or waits at the end."""

    NO_LEAKS = "I5_no_leaks"
    """No key without expiry but the constant ones; no process is left."""

    USAGE_ONCE = "I6_usage_once"
    """Usage is recorded once, with the right numbers."""

    CLIENTS_SOUND = "clients_sound"
    """Clients ride out every outage."""

    WORKERS_SOUND = "workers_sound"
    """No worker breaks by itself, and a drain ends well."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be.

    Attributes:
        invariant: which does not hold.
        where: the request's id, or what else was looked at.
        seen: what was seen.
    """

    invariant: Invariant
    where: str
    seen: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.where}: {self.seen}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended, for the last look at the end of the storm.

    Attributes:
        end: its terminal event.
        digest: of its tokens.
    """

    end: End
    digest: int


@dataclass(slots=True)
class Ledger:
    """Counts and findings.

    Attributes:
        counts: by name.
        found: how often each invariant was violated.
        violations: the first of them.
        ended: every accepted request that has ended.
        latest_end_ms: the longest that an end came after its deadline.
        longest_sweep_pause_ms: the longest time in which no worker swept.
    """

    counts: Counter[str] = field(default_factory=Counter)
    found: Counter[Invariant] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)
    latest_end_ms: int = 0
    longest_sweep_pause_ms: int = 0

    def violated(self, invariant: Invariant, where: str, seen: str) -> None:
        """Note a violation."""
        self.found[invariant] += 1
        if len(self.violations) < _VIOLATIONS_KEPT:
            self.violations.append(Violation(invariant, where, seen))
