"""Medians, spreads, ratios, percentiles, and what a run says of the machine."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import time

from waiting import wait_until

from penstock.shared.local.gc_tuning import calm_collector
from penstock.tools.rounds import Machine, Rounds, family_s, percentile, process_s

SPIN = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"

PARENT = """\
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.DEVNULL)
print(child.pid)
"""


def test_percentile_is_the_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert percentile(values, 99) == 99
    assert percentile(values, 50) == 50
    assert percentile(values, 100) == 100
    assert percentile([7.0], 1) == 7.0


def test_figures_are_medians_with_their_spread_and_checked_both_ways() -> None:
    rounds = Rounds()
    for slow, fast in ((30, 10), (50, 10), (40, 20)):
        rounds.add("slow", slow)
        rounds.add("fast", fast)
    rounds.add("once", 7)
    assert rounds.ratios("slow", "fast") == [3, 5, 2]
    report = rounds.report(
        "x", Machine(), at_most=[("slow", 39)], at_least=[("fast", 10)], notes=["n"]
    )
    assert {name: report.figures[name] for name in ("slow", "fast", "once")} == {
        "slow": 40, "fast": 10, "once": 7,
    }  # fmt: skip
    assert report.spread == {"slow": (30, 50), "fast": (10, 20)}
    assert [check.ok for check in report.checks] == [False, True]
    assert report.notes[0] == "n"


def spin(seconds: float) -> None:
    """Use CPU for this long, in CPU seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_children_count_as_ours_while_they_live_and_when_they_have_ended() -> None:
    began = family_s()
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    wait_until(lambda: family_s() - began > 0.3, "CPU used by a living child")
    child.kill()
    child.wait()
    assert family_s() - began > 0.3


def test_cpu_of_one_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    wait_until(lambda: process_s(child.pid) > 0.3, "CPU used by a living child")
    child.kill()
    child.wait()
    assert math.isnan(process_s(child.pid))


def test_what_others_use_is_told() -> None:
    # Detached by a parent that ends, so that it is no descendant of ours.
    stranger = int(subprocess.check_output([sys.executable, "-c", PARENT, SPIN]))
    try:
        machine = Machine()
        spin(1.0)
        cores, milliseconds, note = machine.stop()
    finally:
        os.kill(stranger, signal.SIGKILL)
    assert cores > 0.2
    assert note.startswith("NOISY")
    assert f"others used {cores:.2f} of" in note
    assert f"the reference loop took {milliseconds:.1f} ms" in note
    assert 0.1 < milliseconds < 1000


def test_the_collector_is_left_as_it_was() -> None:
    before = gc.get_threshold()
    with calm_collector():
        assert gc.get_threshold() != before
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
