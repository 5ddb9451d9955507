"""Figures over several rounds, and the load of other processes meanwhile."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from .report import Check, Number, Progress, Report

__all__ = ["Machine", "Progress", "Rounds", "family_s", "group_s", "percentile", "process_s"]

_QUIET_CORES = 0.15
"""Foreign load in CPU cores above which a run counts as noisy."""

_PROC = Path("/proc")

_LOOP, _LOOPS = 100_000, 5
"""Turns of the reference loop, and its repetitions before and after."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at ``percent`` % of the sorted values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class Rounds:
    """Values by figure: one per round, or a single one for a figure measured once."""

    def __init__(self) -> None:
        self._values: dict[str, list[Number]] = {}

    def add(self, name: str, value: Number) -> None:
        """Add a figure's value of this round."""
        self._values.setdefault(name, []).append(value)

    def median(self, name: str) -> Number:
        """Median of a figure."""
        return statistics.median(self._values[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """Ratios of two figures, within each round."""
        pairs = zip(self._values[name], self._values[base], strict=True)
        return [value / other for value, other in pairs]

    def report(
        self,
        subject: str,
        machine: Machine,
        *,
        at_most: Iterable[tuple[str, Number]] = (),
        at_least: Iterable[tuple[str, Number]] = (),
        notes: Iterable[str] = (),
    ) -> Report:
        """Build the report: medians and spreads, checked against limits. Ends the measurement."""
        other_cores, reference_ms, note = machine.stop()
        figures = {name: self.median(name) for name in self._values}
        checks = [Check(name, figures[name], limit) for name, limit in at_most]
        checks += [Check(name, figures[name], limit, at_least=True) for name, limit in at_least]
        spread = {
            name: (min(values), max(values))
            for name, values in self._values.items()
            if len(values) > 1
        }
        figures["other_cpu_cores"] = round(other_cores, 3)
        figures["reference_loop_ms"] = round(reference_ms, 2)
        return Report(subject, figures, tuple(checks), (*notes, note), spread)


class Machine:
    """Watches the machine's load until :meth:`stop`."""

    def __init__(self) -> None:
        self._loops = _reference_loops()
        self._load = os.getloadavg()[0]
        self._began, self._busy, self._ours = time.monotonic(), _busy_s(), family_s()

    def stop(self) -> tuple[float, float, str]:
        """Return how busy and how fast the machine was.

        Returns:
            Average CPU cores kept busy by other processes; median milliseconds of the reference
            loop before and after; a sentence on both.
        """
        seconds = time.monotonic() - self._began
        cores, note = self._others(seconds)
        milliseconds = 1000 * statistics.median(self._loops + _reference_loops())
        return cores, milliseconds, f"{note}; the reference loop took {milliseconds:.1f} ms"

    def _others(self, seconds: float) -> tuple[float, str]:
        load = f"load average {self._load:.1f} before, {os.getloadavg()[0]:.1f} after"
        if math.isnan(self._busy):
            return math.nan, f"{load}; what others used is not known on this system"
        others = (_busy_s() - self._busy) - (family_s() - self._ours)
        cores = max(0.0, others / seconds)
        used = f"others used {cores:.2f} of {os.cpu_count()} CPU cores for these {seconds:.0f} s"
        verdict = "NOISY, measure again when it is quiet" if cores > _QUIET_CORES else "quiet"
        return cores, f"{verdict}: {used}; {load}"


def _reference_loops() -> list[float]:
    """Seconds of a loop of plain Python, to compare runs on machines of different speeds.

    A virtual machine's speed may double within minutes.
    """
    taken = []
    for _ in range(_LOOPS):
        began, total = time.perf_counter(), 0
        for number in range(_LOOP):
            total += number * number % 7
        taken.append(time.perf_counter() - began)
    return taken


def _busy_s() -> float:
    """CPU seconds used by all processes since boot; NaN where unknown."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return math.nan
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_s(pid: int) -> float:
    """CPU seconds of one living process and its threads; NaN where unknown."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def group_s(group: int) -> float:
    """CPU seconds of all living processes of a group."""
    found = math.nan
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[2]) == group:
            seconds = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            found = seconds + (0.0 if math.isnan(found) else found)
    return found


def family_s() -> float:
    """CPU seconds of this process and all its descendants, reaped ones included."""
    ticks, parents = {}, {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")
