"""A storm that is ended early leaves nothing: no process, no directory, no stopped worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import is_running, wait_until

from penstock.tools.chaos.faults.process_table import children

pytestmark = pytest.mark.alone


def descendants(pid: int) -> set[int]:
    found = set(children(pid))
    return found.union(*(descendants(child) for child in found))


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_ended_in_the_middle(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.tools.chaos", "--seconds", "60", "--stop", "--kill"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seen: set[int] = set()

    def raging() -> bool:
        seen.update(descendants(process.pid))
        # Six supervisors with their engines, and Redis; then some were killed and replaced.
        return process.poll() is not None or len(seen) > 16

    try:
        wait_until(raging, "the storm rages", 60)
        assert process.poll() is None, process.communicate()[0].decode()
        seen |= descendants(process.pid)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not [pid for pid in seen if is_running(pid)], "all processes ended", 60)
    if number is not signal.SIGKILL:  # which leaves its directory, as any program does
        assert process.returncode == 130
        assert "Traceback" not in output
        assert os.listdir(tmp_path) == []
