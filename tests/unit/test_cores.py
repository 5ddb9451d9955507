"""The cores a process is bound to by a setting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.local.cores import bind_to_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores"
)

_BOUND = """
import os, sys
from penstock.shared.local.cores import bind_to_cores, usable_cores
bind_to_cores("engine.cores", sys.argv[1])
print(sorted(os.sched_getaffinity(0)), usable_cores())
"""


def test_a_process_keeps_to_the_cores_it_is_given() -> None:
    for core in sorted(os.sched_getaffinity(0)):
        command = [sys.executable, "-c", _BOUND, f"{core}-{core},{core}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said == f"[{core}] 1\n"


@pytest.mark.parametrize("text", ["0-70000", "70000"])
def test_cores_that_it_may_not_use_are_refused(text: str) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigurationError) as caught:
        bind_to_cores("engine.cores", text)
    usable = ",".join(map(str, sorted(before)))
    said = f"engine.cores: got {text!r}; allowed: cores that this process may use: {usable}"
    assert str(caught.value) == said
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text", ["3-2", "0,5-3"])
def test_a_range_that_goes_down_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed: ranges that go up: \d-\d"):
        bind_to_cores("engine.cores", text)
