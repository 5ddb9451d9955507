"""A storm's outcome as a report: what happened, and whether everything held."""

from __future__ import annotations

from ...report import Check, Number, Report
from ..checks.storm_counts import Invariant
from ..faults.fault_schedule import Fault
from ..options import StormOptions
from .storm import StormResult

__all__ = ["report_storm"]

_FIGURES = {
    Fault.KILL: "worker_kills",
    Fault.STOP: "worker_stops",
    Fault.DRAIN: "worker_drains",
    Fault.RESET: "connection_resets",
    Fault.CUT: "replies_cut",
    Fault.HALF_OPEN: "half_opens",
    Fault.LATE: "late_and_delayed",
    Fault.REDIS_KILL: "redis_kills",
    Fault.FLUSH: "script_flushes",
    Fault.SLOW_READERS: "connections_choked",
}
"""The figure that counts each kind of fault."""

_LONG_S = 30.0
_KILLS_AND_STOPS_PER_S = 100 / 60
_MIGRATED_PER_S = 500 / 60
"""Minimum rates of a long storm of all faults on the synthetic model."""


def report_storm(result: StormResult) -> Report:
    """Figures, checks and violations of a storm."""
    options, counts, faults = result.options, result.findings.counts, result.counts
    figures: dict[str, Number] = {
        "seed": options.seed,
        "seconds": round(result.seconds, 1),
        "requests": counts["requests"],
        "tokens": counts["tokens"],
        "migrated": counts["migrated"],
        "redelivered": counts["redelivered"],
        "claims": counts["claims"],
        "violations": sum(result.findings.found.values()),
        "worker_kills_and_stops": int(faults["worker_kills"] + faults["worker_stops"]),
        **faults,
        "late_and_delayed": int(faults["late_deliveries"] + faults["delays"]),
    }
    for name in ("completed", "cancelled", "expired", "failed", "dead"):
        figures[name] = counts[name]
    for kind in ("live", "returning", "jumping", "slow", "late"):
        figures[f"{kind}_readers"] = counts[f"{kind}_readers"]
    for name in ("duplicate_submits", "conflicts_refused", "cancels", "recounts"):
        figures[name] = counts[name]
    figures["latest_end_after_deadline_ms"] = result.findings.latest_end_ms
    figures["longest_sweep_pause_ms"] = result.findings.longest_sweep_pause_ms
    checks = [Check(name, result.findings.found[name], 0) for name in Invariant]
    checks.append(Check("requests", counts["requests"], 1, at_least=True))
    checks += [
        Check(name, figures[name], least, at_least=True) for name, least in _least(options).items()
    ]
    return Report(
        subject=f"{options.seconds:g} s of {', '.join(sorted(options.faults)) or 'calm'}",
        figures=figures,
        checks=tuple(checks),
        notes=tuple(f"violation: {violation}" for violation in result.findings.violations),
    )


def _least(options: StormOptions) -> dict[str, int]:
    """The minimum counts of a storm with these options."""
    least = {_FIGURES[fault]: 1 for fault in sorted(options.faults)}
    full = {Fault.KILL, Fault.STOP} <= options.faults and options.model == "synthetic"
    if full and options.seconds >= _LONG_S:
        least["worker_kills_and_stops"] = int(options.seconds * _KILLS_AND_STOPS_PER_S)
        least["migrated"] = int(options.seconds * _MIGRATED_PER_S)
    if Fault.SLOW_READERS in options.faults and options.seconds >= _LONG_S:
        least["slow_reader_cuts"] = 1
    return least
