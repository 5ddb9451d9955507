"""Ends tasks reliably."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["end_tasks"]

_AGAIN_S = 3.0
"""Long enough for a task to clean up after the first cancellation."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, with whatever result.

    It cancels repeatedly: redis-py sends within ``asyncio.wait_for``, which in Python 3.11 swallows
    a cancellation that comes just when the send completes (cpython#86296). A task that polls Redis
    would then run for ever. A task's children in a ``TaskGroup`` are cancelled only once, so they
    must not send with such a timeout.
    """
    tasks = list(tasks)
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
