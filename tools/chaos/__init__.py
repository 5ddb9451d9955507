"""Fault storms: real workers, real Redis, random deaths, and a look at every token afterwards."""

from __future__ import annotations

from .checks.storm_counts import Findings, Invariant, Violation
from .faults.fault_schedule import ALL_FAULTS, Fault
from .options import StormOptions
from .storm.storm import Storm, StormResult

__all__ = [
    "ALL_FAULTS",
    "Fault",
    "Findings",
    "Invariant",
    "Storm",
    "StormOptions",
    "StormResult",
    "Violation",
]
