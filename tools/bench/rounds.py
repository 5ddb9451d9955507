"""Figures over several rounds, and what else the machine did meanwhile."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..report import Check, Number, Report

__all__ = ["Machine", "Progress", "Rounds", "family_s", "group_s", "percentile", "process_s"]

Progress = Callable[[str, int, int], None]
"""Told the stage, how much of it is done and how much there is."""

_QUIET_CORES = 0.15
"""CPU cores that others may have in use before a run counts as noisy."""

_PROC = Path("/proc")

_LOOP, _LOOPS = 100_000, 5
"""Turns of the reference loop, and how often it is timed before and after."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by ``percent`` % of the values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class Rounds:
    """Values by figure, one per round; a figure that is measured once has one value."""

    def __init__(self) -> None:
        self._values: dict[str, list[Number]] = {}

    def add(self, name: str, value: Number) -> None:
        """The value of a figure in this round."""
        self._values.setdefault(name, []).append(value)

    def median(self, name: str) -> Number:
        """The median of a figure."""
        return statistics.median(self._values[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """One figure over another, within each round."""
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
        """Medians and spreads, checked against limits; measuring ends here."""
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
    """Watches the machine from its making to :meth:`stop`."""

    def __init__(self) -> None:
        self._loops = _reference_loops()
        self._load = os.getloadavg()[0]
        self._began, self._busy, self._ours = time.monotonic(), _busy_s(), family_s()

    def stop(self) -> tuple[float, float, str]:
        """How busy and how fast it was.

        Returns:
            CPU cores that processes other than ours kept busy on average; the median of a reference
            loop's milliseconds before and after; a sentence on both.
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
    """Seconds of plain Python, by which runs on machines of other speeds can be compared.

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
    """CPU seconds that all processes have used since boot; NaN where this is not known."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return math.nan
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_s(pid: int) -> float:
    """CPU seconds of one living process and its threads; NaN where this is not known."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def group_s(group: int) -> float:
    """The same of all living processes of a group."""
    found = math.nan
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == group:
            seconds = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            found = seconds + (0.0 if math.isnan(found) else found)
    return found


def family_s() -> float:
    """CPU seconds of this process and all its descendants, ended and waited-for ones included."""
    ticks, parents = {}, {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")
