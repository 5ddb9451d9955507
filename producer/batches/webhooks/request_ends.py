"""Requests whose end calls a webhook."""

from __future__ import annotations

import time
from typing import Any

import msgpack

from penstock.shared.keys import BatchKeys
from penstock.shared.protocol.states import TERMINAL_STATES
from penstock.shared.redis.retrying_client import RetryingClient

from ..clients import Clients
from .deliveries import Delivery
from .delivery_store import DeliveryStore

__all__ = ["RequestEnds"]


class RequestEnds:
    """Watched requests of one Redis server.

    Args:
        client: the connection.
        clients: one for each shard.
        deliveries: where calls are queued.
    """

    def __init__(self, client: RetryingClient, clients: Clients, deliveries: DeliveryStore) -> None:
        self._client = client
        self._redis: Any = client.redis
        self._clients = clients
        self._deliveries = deliveries
        self._key = BatchKeys().watched

    async def watch(self, model: str, shard: int, request_id: str, webhook: str) -> None:
        """Call this URL when the request has ended."""
        field = msgpack.packb((model, shard, request_id))
        await self._client.call(lambda: self._redis.hset(self._key, field, webhook))

    async def queue_ends(self) -> None:
        """Queue the calls of requests that have ended, or that are not known any more."""
        watched = await self._client.call(lambda: self._redis.hgetall(self._key))
        by_shard: dict[tuple[str, int], list[tuple[bytes, str, str]]] = {}
        for field, webhook in watched.items():
            model, shard, request_id = msgpack.unpackb(field)
            entry = (field, request_id, webhook.decode())
            by_shard.setdefault((model, shard), []).append(entry)
        for (model, shard), entries in by_shard.items():
            producer = await self._clients.get(model, shard)
            states = await producer.states([request_id for _, request_id, _ in entries])
            for (field, request_id, webhook), state in zip(entries, states, strict=True):
                if state is None or state in TERMINAL_STATES:
                    word = "expired" if state is None else state.value
                    event = f"response.{word}"
                    call = Delivery.of(webhook, event, request_id, int(time.time()))
                    await self._deliveries.add(call)
                    await self._forget(field)

    async def _forget(self, field: bytes) -> None:
        await self._client.call(lambda: self._redis.hdel(self._key, field))
