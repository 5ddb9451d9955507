"""A trace through Redis: a worker process serves it, this process submits it and reads it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from redis.asyncio import Redis

from penstock.shared.children import spawn_bound
from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.operations import Operations
from penstock.shared.protocol import Chunk, Request, unpack_event
from penstock.shared.settings import Settings

from ..launch import Launch
from .worker_side import submit_all

__all__ = ["run_through_redis", "worker_process"]

_START_TIMEOUT_S = 300.0
_SILENCE_S = 60.0


@contextlib.asynccontextmanager
async def worker_process(settings: Settings) -> AsyncIterator[int]:
    """An engine process that serves while the ``with`` lasts; gives its process id.

    Raises:
        PenstockError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ready = Path(folder) / "ready"
        process = spawn_bound(
            [sys.executable, "-m", "penstock.gpu_worker.process"], stdin=subprocess.PIPE
        )
        try:
            assert process.stdin is not None
            launch = Launch(settings, f"bench-{time.monotonic_ns():x}", ready)
            process.stdin.write(launch.to_line())
            process.stdin.close()
            await asyncio.to_thread(_wait_until_ready, process, ready)
            yield process.pid
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


async def run_through_redis(url: str, keys: Keys, requests: Sequence[Request]) -> float:
    """Seconds from the first submit until every token of all requests has been read."""
    async with Redis.from_url(url) as redis, redis.pubsub() as pubsub:
        operations = Operations(redis, keys)
        await pubsub.subscribe(*(keys.channel(request.id) for request in requests))
        for _ in requests:
            await pubsub.get_message(timeout=_SILENCE_S)  # the confirmations
        began = time.perf_counter()
        submitting = asyncio.create_task(submit_all(operations, requests, at_once=4))
        ends = tokens = 0
        while ends < len(requests):
            message = await pubsub.get_message(timeout=_SILENCE_S)
            if message is None:
                raise PenstockError(f"no token for {_SILENCE_S:g} s after {tokens} tokens")
            event = unpack_event(message["data"])
            if isinstance(event, Chunk):
                tokens += len(event.token_ids)
            else:
                ends += 1
        seconds = time.perf_counter() - began
        await submitting
    expected = sum(request.options.max_tokens for request in requests)
    if tokens != expected:
        raise PenstockError(f"{tokens} tokens came, not {expected}")
    return seconds
