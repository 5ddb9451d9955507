"""Single requests whose end calls a webhook."""

from __future__ import annotations

import time
from typing import Any

import msgpack

from penstock.shared.errors import QueueFull, UnknownRequest
from penstock.shared.keys import BatchKeys, Keys
from penstock.shared.protocol.states import TERMINAL_STATES, Reason, State
from penstock.shared.redis.retrying_client import RetryingClient

from ...results import Status
from ..clients import Clients
from .deliveries import Delivery
from .webhook_url import check_webhook_url

__all__ = ["RequestEnds", "RequestWatch"]

_AT_ONCE = 500
_MAX_WATCHED = 100_000
_RETRY_MS = 5000


class RequestWatch:
    """Where an application says which ends it wants to hear of.

    Args:
        client: the connection.
    """

    def __init__(self, client: RetryingClient) -> None:
        self._client = client
        self._redis: Any = client.redis
        self._key = BatchKeys().watched

    async def check(self, url: str) -> None:
        """Refuse what :meth:`watch` could not keep; called before the request is submitted.

        Raises:
            InvalidRequest: the URL is wrong.
            QueueFull: too many requests are watched; ``penstock batches`` may not be running.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        check_webhook_url(url)
        if await self._client.call(lambda: self._redis.hlen(self._key)) >= _MAX_WATCHED:
            raise QueueFull("webhooks", _MAX_WATCHED, _RETRY_MS)

    async def watch(self, keys: Keys, request_id: str, url: str) -> None:
        """Have ``penstock batches`` call a URL when an accepted request has ended.

        Args:
            keys: of the request's model and shard.
            request_id: which request. To watch it again replaces its URL.
            url: what is called.

        Raises:
            InvalidRequest: the URL is wrong.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        field = msgpack.packb((keys.model, keys.shard, request_id))
        checked = check_webhook_url(url)
        await self._client.call(lambda: self._redis.hset(self._key, field, checked))


class RequestEnds:
    """The watched requests of one Redis server.

    Args:
        client: the connection.
        clients: one for each shard.
    """

    def __init__(self, client: RetryingClient, clients: Clients) -> None:
        self._client = client
        self._redis: Any = client.redis
        self._clients = clients
        self._keys = BatchKeys()

    async def queue_calls(self) -> None:
        """Queue the calls of watched requests that have ended, or are not known any more."""
        cursor, watched = await self._page(0)
        while True:
            by_shard: dict[tuple[str, int], list[tuple[bytes, str, str]]] = {}
            for field, url in watched.items():
                model, shard, request_id = msgpack.unpackb(field)
                by_shard.setdefault((model, shard), []).append((field, request_id, url.decode()))
            for (model, shard), entries in by_shard.items():
                await self._queue_calls(model, shard, entries)
            if cursor == 0:
                return
            cursor, watched = await self._page(cursor)

    async def _page(self, cursor: int) -> tuple[int, dict[bytes, bytes]]:
        page: tuple[int, dict[bytes, bytes]] = await self._client.call(
            lambda: self._redis.hscan(self._keys.watched, cursor, count=_AT_ONCE)
        )
        return page

    async def _queue_calls(
        self, model: str, shard: int, entries: list[tuple[bytes, str, str]]
    ) -> None:
        producer = await self._clients.get(model, shard)
        states = await producer.states([request_id for _, request_id, _ in entries])
        for (field, request_id, url), state in zip(entries, states, strict=True):
            if state is not None and state not in TERMINAL_STATES:
                continue
            try:
                status = await producer.status(request_id)
            except UnknownRequest:
                status = None
            call = Delivery.of(url, _event(status), request_id, _ended_at(status))
            await self._replace(field, call)

    async def _replace(self, field: bytes, call: Delivery) -> None:
        """Queue a call in place of what was watched, in one step: neither lost nor made twice."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.delivery(call.id), call.model_dump_json(), nx=True)
                pipe.zadd(self._keys.deliveries, {call.id: call.due_at}, nx=True)
                pipe.hdel(self._keys.watched, field)
                await pipe.execute()

        await self._client.call(send)


def _event(status: Status | None) -> str:
    """The event's type, in the words of OpenAI's Responses API."""
    if status is None:
        return "response.failed"
    if status.state is State.CANCELLED:
        return "response.cancelled"
    if status.state is not State.COMPLETED:
        return "response.failed"
    short = status.end is not None and status.end.reason is Reason.LENGTH
    return "response.incomplete" if short else "response.completed"


def _ended_at(status: Status | None) -> int:
    """When, in seconds of the Unix epoch."""
    ended_ms = None if status is None else status.ended_at
    return int(time.time()) if ended_ms is None else ended_ms // 1000
