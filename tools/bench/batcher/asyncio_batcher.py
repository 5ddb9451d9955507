"""What an application would write for itself: batches by size and window, in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["AsyncioBatcher"]


class AsyncioBatcher:
    """The usual forty lines: a queue, a size, a window, a thread.

    Args:
        infer: maps a list of items to a list of results; blocks.
        max_batch: items of a batch at most.
        max_wait_s: how long the first item of a batch waits for others.
    """

    def __init__(
        self, infer: Callable[[list[Any]], list[Any]], max_batch: int, max_wait_s: float
    ) -> None:
        self._infer = infer
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def __call__(self, item: Any) -> Any:
        """The result of one item."""
        future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((item, future))
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            ends_at = loop.time() + self._max_wait_s
            while len(batch) < self._max_batch:
                try:
                    async with asyncio.timeout_at(ends_at):
                        batch.append(await self._queue.get())
                except TimeoutError:
                    break
            results = await asyncio.to_thread(self._infer, [item for item, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)

    def close(self) -> None:
        """Serve no more."""
        self._task.cancel()
