"""Webhook calls in Redis: due, repeated with pauses, or given up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import BatchKeys
from penstock.shared.redis.retrying_client import RetryingClient

from .deliveries import CallFailed, Delivery

if TYPE_CHECKING:
    from .caller import WebhookCaller  # its package is an extra that a gateway does not need

__all__ = ["DeliveryStore"]

_KEEP_DEAD_S = 30 * 24 * 3600


class DeliveryStore:
    """The calls of one Redis server.

    Args:
        client: the connection.
    """

    def __init__(self, client: RetryingClient) -> None:
        self._client = client
        self._redis = client.redis
        self._keys = BatchKeys()

    async def add(self, delivery: Delivery) -> None:
        """Queue a call; one of this id that is queued already stays as it is."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.delivery(delivery.id), delivery.model_dump_json(), nx=True)
                pipe.zadd(self._keys.deliveries, {delivery.id: delivery.due_at}, nx=True)
                await pipe.execute()

        await self._client.call(send)

    async def due(self, limit: int = 100) -> list[str]:
        """Ids of calls whose time has come, the oldest first."""
        now = int(time.time())
        ids = await self._client.call(
            lambda: self._redis.zrangebyscore(self._keys.deliveries, 0, now, start=0, num=limit)
        )
        return [name.decode() for name in ids]

    async def attempt(self, delivery_id: str, caller: WebhookCaller) -> bool:
        """Make a call once; returns whether it succeeded or was not queued any more."""
        key = self._keys.delivery(delivery_id)
        data = await self._client.call(lambda: self._redis.get(key))
        if data is None:
            await self._forget(delivery_id)
            return True
        delivery = Delivery.model_validate_json(data)
        now = int(time.time())
        try:
            await caller.call(delivery)
        except CallFailed as error:
            again = delivery.failed(str(error), now)
            if again is None:
                await self._bury(delivery, str(error), now)
            else:
                await self._postpone(again)
            return False
        await self._forget(delivery_id)
        return True

    async def dead(self, limit: int = 100) -> list[Delivery]:
        """Calls that were given up, the latest first."""
        ids = await self._client.call(
            lambda: self._redis.zrevrange(self._keys.dead_deliveries, 0, limit - 1)
        )
        names = [self._keys.delivery(name.decode()) for name in ids]
        found = await self._client.call(lambda: self._redis.mget(names)) if names else []
        return [Delivery.model_validate_json(data) for data in found if data is not None]

    async def retry(self, delivery_id: str) -> None:
        """Queue a call again that was given up, with all its attempts.

        Raises:
            InvalidRequest: no such call was given up.
        """
        keys, now = self._keys, int(time.time())
        score = await self._client.call(
            lambda: self._redis.zscore(keys.dead_deliveries, delivery_id)
        )
        data = await self._client.call(lambda: self._redis.get(keys.delivery(delivery_id)))
        if score is None or data is None:
            raise InvalidRequest("id", delivery_id, "a call that `penstock webhook list` shows")
        again = Delivery.model_validate_json(data).model_copy(update={"attempts": 0, "due_at": now})

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(keys.delivery(delivery_id), again.model_dump_json())
                pipe.zrem(keys.dead_deliveries, delivery_id)
                pipe.zadd(keys.deliveries, {delivery_id: now})
                await pipe.execute()

        await self._client.call(send)

    async def _forget(self, delivery_id: str) -> None:
        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zrem(self._keys.deliveries, delivery_id)
                pipe.delete(self._keys.delivery(delivery_id))
                await pipe.execute()

        await self._client.call(send)

    async def _postpone(self, delivery: Delivery) -> None:
        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.delivery(delivery.id), delivery.model_dump_json())
                pipe.zadd(self._keys.deliveries, {delivery.id: delivery.due_at})
                await pipe.execute()

        await self._client.call(send)

    async def _bury(self, delivery: Delivery, error: str, now: int) -> None:
        last = delivery.model_copy(update={"error": error, "attempts": delivery.attempts + 1})

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.delivery(last.id), last.model_dump_json(), ex=_KEEP_DEAD_S)
                pipe.zrem(self._keys.deliveries, last.id)
                pipe.zadd(self._keys.dead_deliveries, {last.id: now})
                pipe.zremrangebyscore(self._keys.dead_deliveries, 0, now - _KEEP_DEAD_S)
                await pipe.execute()

        await self._client.call(send)
