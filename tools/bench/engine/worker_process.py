"""A worker to measure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from penstock.gpu_worker.launch import Launch
from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import Settings

__all__ = ["BenchWorker", "worker_process"]

_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class BenchWorker:
    """A serving worker: the process id of its edge, and its metrics port if it has one."""

    pid: int
    metrics_port: int | None


@contextlib.asynccontextmanager
async def worker_process(settings: Settings) -> AsyncIterator[BenchWorker]:
    """An edge process that serves during the ``with`` block and leads its own process group.

    Raises:
        PenstockError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ready = Path(folder) / "ready"
        process = spawn_bound(
            [sys.executable, "-m", "penstock.gpu_worker.edge"],
            stdin=subprocess.PIPE,
            new_session=True,
        )
        try:
            assert process.stdin is not None
            launch = Launch(settings, f"bench-{time.monotonic_ns():x}", ready)
            process.stdin.write(launch.to_line())
            process.stdin.close()
            await asyncio.to_thread(_wait_until_ready, process, ready)
            yield BenchWorker(process.pid, json.loads(ready.read_text())["metrics_port"])
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


def _wait_until_ready(process: subprocess.Popen[bytes], ready: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None:
            raise PenstockError(f"the worker ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise PenstockError(f"the worker is not ready after {_START_TIMEOUT_S:g} s")
        time.sleep(0.05)
