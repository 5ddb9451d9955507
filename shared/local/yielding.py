"""A thread that works in the background of others that must not wait for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["yielding_to_others"]

_SWITCH_S = 0.0005
_LOWEST_PRIORITY = 19


@contextmanager
def yielding_to_others() -> Iterator[None]:
    """Inside the ``with``, the process's other threads come before this one.

    It gets what processor time they leave, and hands over the interpreter lock within half a
    millisecond. Python's usual 5 ms are half of a small model's step, which takes the lock several
    times. Threads and processes that it starts keep its low priority. So does the thread itself,
    because only a privileged one may raise it again: use a thread of its own.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    # On Linux each thread has a priority of its own; elsewhere the process would lose its.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
