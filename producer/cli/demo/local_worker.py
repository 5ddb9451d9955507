"""The demo's worker: a child process that ends with us, and what its metrics say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import Settings, environment_name

from .summary import EngineFigures

__all__ = ["DemoWorker", "Sampler", "WorkerFacts", "parse_metrics", "worker_command"]

_READY_TIMEOUT_S = 120.0
_DRAIN_S = 10.0
_POLL_S = 0.05
_SAMPLE_S = 0.05

_MAX_SEQUENCES = 4
"""Fewer than there are requests, so that the queue and its lanes have something to do."""


def worker_command(model: str) -> list[str]:
    """How to start a worker with the Python that runs this, wherever its programs are."""
    return [sys.executable, "-m", "penstock.gpu_worker", "worker", "--model", model]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself when it is ready."""

    worker_id: str
    metrics_port: int | None


class DemoWorker:
    """A worker for the time of a ``with`` block; it ends with us even if we are killed.

    Args:
        command: program and arguments; ``--ready-file PATH`` is added.
        url: address of Redis.
        settings: whose queue it serves.
    """

    def __init__(self, command: Sequence[str], url: str, settings: Settings) -> None:
        self._command = command
        given = {
            "redis.url": url,
            "redis.embedded": "never",
            "queue.model": settings.queue.model,
            "queue.shard": str(settings.queue.shard),
            "worker.metrics_host": "127.0.0.1",
            "worker.metrics_port": "0",
            "engine.max_sequences": str(_MAX_SEQUENCES),
        }
        self._environment = os.environ | {environment_name(k): v for k, v in given.items()}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-"))
            self._ready = Path(folder) / "ready.json"
            self._output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            # A session of its own: Ctrl-C reaches us alone, and we end the worker.
            self._process = spawn_bound(
                [*self._command, "--ready-file", str(self._ready)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                new_session=True,
            )
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    async def wait_until_ready(self) -> WorkerFacts:
        """Wait until the model is loaded.

        Raises:
            PenstockError: the worker ended instead, or takes too long.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                facts = json.loads(self._ready.read_text())
                return WorkerFacts(facts["worker_id"], facts["metrics_port"])
            self._check()
            await asyncio.sleep(_POLL_S)
        raise PenstockError(
            f"the worker is not ready after {_READY_TIMEOUT_S:g} s; it last said: {self._tail()}"
        )

    async def wait_until_gone(self) -> None:
        """Wait for the worker's end, which is always too early.

        Raises:
            PenstockError: it ended.
        """
        while True:
            self._check()
            await asyncio.sleep(_POLL_S)

    def _check(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise PenstockError(f"the worker ended with exit code {code}: {self._tail()}")

    def _tail(self) -> str:
        # The worker writes through a duplicate of this descriptor, which shares its offset.
        size = os.fstat(self._output.fileno()).st_size
        end = os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16)))
        lines = [line for line in end.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("error: ") if lines else "(it said nothing)"

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sampler:
    """Watches a worker's ``/metrics`` from the first to the last :meth:`sample`.

    Args:
        port: where they are served on 127.0.0.1; None if nowhere.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._kv_peak = 0.0

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(_SAMPLE_S)

    async def sample(self) -> None:
        """Look once; a worker that does not answer now is asked the next time."""
        if self._port is None:
            return
        with contextlib.suppress(OSError, EOFError):
            self._last = parse_metrics(await _get_metrics(self._port))
            self._first = self._first or self._last
            self._kv_peak = max(self._kv_peak, self._last.get("penstock_kv_blocks_used", 0.0))

    def figures(self) -> EngineFigures:
        """What was seen."""
        total = self._last.get("penstock_kv_blocks_total")
        steps = self._gain("penstock_step_sequences_count")
        return EngineFigures(
            mean_batch=self._gain("penstock_step_sequences_sum") / steps if steps else None,
            kv_blocks_peak=None if total is None else int(self._kv_peak),
            kv_blocks_total=None if total is None else int(total),
        )

    def _gain(self, name: str) -> float:
        return self._last.get(name, 0.0) - self._first.get(name, 0.0)


def parse_metrics(text: str) -> dict[str, float]:
    """Values of Prometheus' text format by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def _get_metrics(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(1):
            answer = await reader.read(-1)
    finally:
        writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()
