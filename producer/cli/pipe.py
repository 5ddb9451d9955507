"""Notices that the reader of standard output has left, even before the next write."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
from collections.abc import Coroutine
from typing import TypeVar

__all__ = ["while_read"]

_Result = TypeVar("_Result")


async def while_read(work: Coroutine[None, None, _Result]) -> _Result:
    """Do the work as long as standard output has a reader.

    A write to a pipe without a reader fails, but the next write may be far away while a request
    waits for its turn. So the pipe itself is watched.

    Raises:
        BrokenPipeError: the reader has left; the work was cancelled.
    """
    pipe = _output_pipe()
    if pipe is None:
        return await work
    loop, task, left = asyncio.get_running_loop(), asyncio.ensure_future(work), False

    def leave() -> None:
        nonlocal left
        left = True
        loop.remove_reader(pipe)
        task.cancel()

    # Nothing can be read from this end of it: all that comes is the error of having no reader.
    loop.add_reader(pipe, leave)
    try:
        return await task
    except asyncio.CancelledError:
        if left:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output has left") from None
        raise
    finally:
        loop.remove_reader(pipe)


def _output_pipe() -> int | None:
    """The file descriptor of standard output if that is a pipe."""
    try:
        descriptor = sys.stdout.fileno()
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError):  # closed, or something in a test's memory
        return None
