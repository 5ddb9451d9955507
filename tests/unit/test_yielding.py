"""A background thread that leaves processor and interpreter lock to the others."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from penstock.shared.local.yielding import yielding_to_others


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's threads have their own priority")
def test_only_the_thread_itself_gets_a_low_priority_and_the_lock_passes_faster_meanwhile() -> None:
    usual, mine = sys.getswitchinterval(), os.getpriority(os.PRIO_PROCESS, 0)
    inside: list[tuple[int, float]] = []

    def work() -> None:
        with yielding_to_others():
            inside.append((os.getpriority(os.PRIO_PROCESS, 0), sys.getswitchinterval()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((priority, interval),) = inside
    assert priority == 19
    assert interval < usual
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
    assert sys.getswitchinterval() == usual
