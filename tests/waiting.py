"""Waiting for a condition with a deadline, and looking at processes of others."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until ``condition()`` is true; fail, saying ``what`` was awaited, after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


async def wait_until_async(
    condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = 60.0
) -> None:
    """The same for a condition that awaits something."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; one that nobody has reaped has ended."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # ended between the two looks, or a system without /proc
        return not Path("/proc/self").exists()
    return state != "Z"
