"""Starts the engine process. Imports next to nothing, because the edge process does so first."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import NamedTuple

from penstock.shared.local.children import spawn_bound

__all__ = ["StartedEngine", "start_engine"]

ENGINE_PROGRAM = "penstock.gpu_worker.engine_process.main"


class StartedEngine(NamedTuple):
    """An engine process that loads its model.

    Attributes:
        process: ends with this one.
        channel: the edge's end of the socket between them.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket


def start_engine(line: bytes) -> StartedEngine:
    """Start the engine process.

    Args:
        line: what :meth:`.Launch.to_line` of :mod:`penstock.gpu_worker.launch` gives.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_bound(
            [sys.executable, "-m", ENGINE_PROGRAM, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already, as will be seen
        process.stdin.write(line)
        process.stdin.close()
    return StartedEngine(process, ours)
