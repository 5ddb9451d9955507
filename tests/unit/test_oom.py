"""Kills for want of memory are told by a count that rose, if it rose lately."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.gpu_worker.monitoring.oom import OomWatch, find_counter, read_counter

VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
VERSION_2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize("text", [VERSION_1, VERSION_2])
def test_the_count_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "counter").write_text(text)
    assert read_counter(tmp_path / "counter") == 3


@pytest.mark.parametrize("text", ["", "oom 3\n", "oom_kill many\n"])
def test_a_file_that_does_not_say(tmp_path: Path, text: str) -> None:
    (tmp_path / "counter").write_text(text)
    assert read_counter(tmp_path / "counter") is None
    assert read_counter(tmp_path / "nothing") is None
    watch = OomWatch(tmp_path / "counter")
    watch.look()
    assert not watch.killed_lately()


def test_this_process_has_a_counter() -> None:
    counter = find_counter()
    assert counter is not None
    assert read_counter(counter) is not None
    assert find_counter(2**22 + 1) == Path("/proc/vmstat")  # no such process: the whole system's


def test_only_a_late_rise_counts(tmp_path: Path) -> None:
    now, counter = 100.0, tmp_path / "counter"
    counter.write_text("oom_kill 3")
    watch = OomWatch(counter, lambda: now)
    assert not watch.killed_lately()
    counter.write_text("oom_kill 4")
    now += 5
    assert watch.killed_lately()
    for _ in range(12):
        now += 1
        watch.look()
    assert not watch.killed_lately()
    now += 1
    counter.write_text("oom_kill 5")
    watch.look()
    now += 9  # a big process takes its time to end
    assert watch.killed_lately()


def test_no_counter_notices_nothing() -> None:
    watch = OomWatch(None)
    watch.look()
    assert not watch.killed_lately()
