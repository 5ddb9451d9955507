"""The counts and the findings of a storm."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.shared.protocol.events import End

__all__ = ["Ended", "Findings", "Invariant", "Violation"]

_VIOLATIONS_KEPT = 200


class Invariant(StrEnum):
    """What must hold under every fault."""

    READERS_EXACT = "I1_readers_exact"
    """Every reader receives each index from its first to the last exactly once."""

    READERS_AGREE = "I2_readers_agree"
    """All readers, the log and the undisturbed output agree."""

    ONE_END = "I3_one_end"
    """Every accepted request reaches one fitting terminal state, at the latest by its deadline."""

    COUNTERS = "I4_counters"
    """Counters equal a recount; at the end nothing waits or is owned."""

    NO_LEAKS = "I5_no_leaks"
    """Only the constant keys lack an expiry; no process is left."""

    USAGE_ONCE = "I6_usage_once"
    """Usage is recorded once, with the right numbers."""

    CLIENTS_SOUND = "clients_sound"
    """Clients survive every outage."""

    WORKERS_SOUND = "workers_sound"
    """No worker breaks by itself, and every drain succeeds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant.

    Attributes:
        invariant: the violated one.
        where: the request's id, or what else was checked.
        seen: what was seen.
    """

    invariant: Invariant
    where: str
    seen: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.where}: {self.seen}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended, for the final checks.

    Attributes:
        end: its terminal event.
        digest: of its tokens.
        lane: its lane.
        tenant: its tenant.
    """

    end: End
    digest: int
    lane: str
    tenant: str


@dataclass(slots=True)
class Findings:
    """Counts and findings.

    Attributes:
        counts: by name.
        found: how often each invariant was violated.
        violations: the first 200.
        ended: every accepted request that has ended.
        latest_end_ms: longest time of an end after its deadline.
        longest_sweep_pause_ms: longest time without a sweep.
    """

    counts: Counter[str] = field(default_factory=Counter)
    found: Counter[Invariant] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)
    latest_end_ms: int = 0
    longest_sweep_pause_ms: int = 0

    def violated(self, invariant: Invariant, where: str, seen: str) -> None:
        """Record a violation."""
        self.found[invariant] += 1
        if len(self.violations) < _VIOLATIONS_KEPT:
            self.violations.append(Violation(invariant, where, seen))
