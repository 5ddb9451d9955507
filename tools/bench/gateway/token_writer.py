"""A process that claims requests and publishes their tokens at a rate, as a worker's edge does."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound

from ..queue.edge_harness import WorkerSide

__all__ = ["TokenWriter"]


class TokenWriter:
    """The writer's process, see :meth:`start`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, url: str, model: str, *, streams: int, steps: int, rate: float
    ) -> AsyncIterator[TokenWriter]:
        """Start it; it claims at once.

        Args:
            url: address of Redis.
            model: whose requests it claims.
            streams: how many it waits for.
            steps: tokens of each.
            rate: tokens a second, of all together.
        """
        facts = [url, model, str(streams), str(steps), str(rate)]
        process = spawn_bound(
            [sys.executable, "-m", __spec__.name, *facts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def claimed(self) -> None:
        """Wait until it owns all requests."""
        await self._line()

    async def write(self) -> None:
        """Have the tokens written, and wait until Redis has confirmed the last one."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        await self._line()

    async def _line(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError("the writer of the tokens ended")


async def _write(url: str, model: str, streams: int, steps: int, rate: float) -> None:
    loop = asyncio.get_running_loop()
    async with WorkerSide(url, Keys(model), requests=streams) as side:
        renewal = asyncio.create_task(_serve(side, streams))
        await renewal
        print("claimed", flush=True)
        edge = asyncio.create_task(side.redis_loop.run())
        await asyncio.to_thread(sys.stdin.readline)
        begin = loop.time()
        for step in range(steps):
            side.outbox.post(side.updates("word "))
            await asyncio.sleep(begin + (step + 1) * streams / rate - loop.time())
        side.redis_loop.stop()
        await edge
        print("written", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


async def _serve(side: WorkerSide, streams: int) -> None:
    """Claim while the requests come; each exchange renews the lease."""
    while len(side.runs) < streams:
        side.redis_loop.expect_work()
        await side.redis_loop.exchange()
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(
        _write(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    )
