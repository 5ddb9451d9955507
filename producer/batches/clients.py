"""Clients of the queue: one for each shard that batches use."""

from __future__ import annotations

import asyncio

from penstock.shared.keys import Keys
from penstock.shared.settings import Settings

from ..client import Producer

__all__ = ["Clients"]


class Clients:
    """Producers by model and shard, opened when they are first needed.

    Args:
        settings: the whole tree; ``redis`` and ``queue`` are used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[tuple[str, int], Producer] = {}
        self._lock = asyncio.Lock()

    async def get(self, model: str, shard: int) -> Producer:
        """The client of a shard.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        async with self._lock:
            producer = self._open.get((model, shard))
            if producer is None:
                producer = Producer(model=model, shard=shard, settings=self._settings)
                self._open[model, shard] = await producer.connect()
            return producer

    async def shards(self, model: str) -> tuple[int, ...]:
        """Shards of a model that workers serve now; the settings' shard if none does yet.

        Raises:
            InvalidRequest: no model can have this name.
            RedisUnavailable: Redis cannot be reached.
        """
        default = self._settings.queue.shard
        Keys(model, default)
        any_client = await self.get(self._settings.queue.model, default)
        served = [keys.shard for keys in await any_client.served_models() if keys.model == model]
        return tuple(sorted(served)) or (default,)

    async def aclose(self) -> None:
        """Close all of them."""
        for producer in self._open.values():
            await producer.aclose()
        self._open.clear()
