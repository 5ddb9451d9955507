"""Records of batches in Redis: read, listed, and changed one version at a time."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

from redis.exceptions import WatchError

from penstock.shared.errors import PenstockError
from penstock.shared.keys import BatchKeys
from penstock.shared.local.tasks import end_tasks
from penstock.shared.protocol.request import check_tenant
from penstock.shared.redis.retrying_client import RetryingClient

from ..webhooks.deliveries import Delivery
from .records import Batch, batch_folder

__all__ = ["BatchChanged", "BatchStore", "UnknownBatch"]

_LEASE_S = 6
_QUEUED_S = 60


class UnknownBatch(PenstockError):
    """No such batch of this tenant."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"no batch {batch_id!r}; its record may have expired")


class BatchChanged(PenstockError):
    """Somebody else changed the batch first; read it again."""


class BatchStore:
    """The batches of one Redis server.

    Args:
        client: the connection.
        keep_s: how long the record of an ended batch is kept.
    """

    def __init__(self, client: RetryingClient, *, keep_s: int) -> None:
        self._client = client
        self._redis = client.redis
        self._keys = BatchKeys()
        self._keep_s = keep_s

    async def create(self, batch: Batch) -> Batch:
        """Store a new batch; one of this id that exists stays as it is, and is returned."""
        key = self._keys.batch(batch.id)
        score = {batch.id: batch.created_at}

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(key)
                if await cast(Awaitable[int], pipe.exists(key)):
                    return  # it may have ended, and must not become active again
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.set(key, batch.model_dump_json())
                pipe.zadd(self._keys.batches(batch.tenant), score)
                pipe.zadd(self._keys.active, score)
                with contextlib.suppress(WatchError):  # somebody else has created it
                    await pipe.execute()

        await self._client.call(send)
        return await self.get(batch.id)

    async def get(self, batch_id: str, tenant: str | None = None) -> Batch:
        """A batch.

        Args:
            batch_id: which.
            tenant: the tenant it must belong to; None accepts any.

        Raises:
            UnknownBatch: there is none.
        """
        if not batch_id.isascii():  # it may not even have bytes
            raise UnknownBatch(batch_id)
        data = await self._client.call(lambda: self._redis.get(self._keys.batch(batch_id)))
        batch = None if data is None else Batch.model_validate_json(data)
        if batch is None or (tenant is not None and batch.tenant != tenant):
            raise UnknownBatch(batch_id)
        return batch

    async def page(
        self, tenant: str, *, after: str | None = None, limit: int = 20
    ) -> tuple[list[Batch], bool]:
        """A tenant's batches, newest first, and whether there are more.

        Args:
            tenant: whose.
            after: the last batch of the page before.
            limit: most batches of this page.

        Raises:
            UnknownBatch: ``after`` is none of them.
            InvalidRequest: no tenant can have this name.
        """
        index = self._keys.batches(check_tenant(tenant))
        start = 0
        if after is not None:
            if not after.isascii():
                raise UnknownBatch(after)
            rank = await self._client.call(lambda: self._redis.zrevrank(index, after))
            if rank is None:
                raise UnknownBatch(after)
            start = rank + 1
        found: list[Batch] = []
        while len(found) <= limit:
            ids = await self._names(index, start, limit)
            if not ids:
                break
            records = await self._records(ids)
            gone = [name for name, record in records if record is None]
            if gone:  # its record has expired
                await self._drop(index, gone)
            found += [record for _, record in records if record is not None]
            start += len(ids) - len(gone)
        return found[:limit], len(found) > limit

    async def active(self) -> list[str]:
        """Ids of the batches that have not ended, oldest first."""
        ids = await self._client.call(lambda: self._redis.zrange(self._keys.active, 0, -1))
        return [name.decode() for name in ids]

    async def retire(self, batch_id: str) -> None:
        """Look no more after a batch that has ended, or whose record is gone."""
        await self._client.call(lambda: self._redis.zrem(self._keys.active, batch_id))

    async def change(self, before: Batch, after: Batch) -> Batch:
        """Replace a batch by its next version, and queue its webhook once it has ended.

        Returns:
            The batch as it is stored now.

        Raises:
            BatchChanged: ``before`` is not the stored version.
        """
        mark = secrets.token_hex(8)
        after = after.model_copy(update={"version": before.version + 1, "change": mark})
        key = self._keys.batch(before.id)
        delivery = Delivery.of_batch(after) if after.ended else None

        async def send() -> bool:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(key)
                data = await cast(Awaitable[bytes | None], pipe.get(key))
                stored = None if data is None else Batch.model_validate_json(data)
                if stored is None or stored.version != before.version:
                    # This change, if the reply to it was lost and it is sent again.
                    return stored is not None and stored.change == mark
                pipe.multi()  # type: ignore[no-untyped-call]
                self._queue_change(pipe, after, delivery)
                try:
                    await pipe.execute()
                except WatchError:
                    return False
                return True

        if not await self._client.call(send):
            raise BatchChanged(f"batch {before.id} was changed by somebody else")
        return after

    @contextlib.asynccontextmanager
    async def drive(self, batch_id: str) -> AsyncIterator[bool]:
        """Whether this caller alone drives the batch now.

        Two drivers at once would do no harm, since changes are versioned, but half of their work
        would be for nothing.
        """
        key, mark = self._keys.tick(batch_id), secrets.token_hex(8)
        await self._client.call(lambda: self._redis.delete(self._keys.queued(batch_id)))
        held = await self._client.call(lambda: self._redis.set(key, mark, nx=True, ex=_LEASE_S))
        renewal = asyncio.create_task(self._renew(key)) if held else None
        try:
            yield bool(held)
        finally:
            if renewal is not None:
                await end_tasks([renewal])
                if not renewal.cancelled():
                    renewal.result()  # raises why the lease may have lapsed
                await self._client.call(lambda: self._redis.delete(key))

    async def undriven(self) -> list[str]:
        """Ids of open batches that no process drives now, oldest first."""
        ids = await self.active()
        names = [self._keys.tick(batch_id) for batch_id in ids]
        held = await self._client.call(lambda: self._redis.mget(names)) if names else []
        return [batch_id for batch_id, mark in zip(ids, held, strict=True) if mark is None]

    async def may_queue(self, batch_id: str) -> bool:
        """Whether the caller is to queue a job for the batch: not if one waits already.

        That one is believed to wait for a minute, or until :meth:`drive`. If it is lost, or waits
        longer, the batch gets another.
        """
        key = self._keys.queued(batch_id)
        queued = self._client.call(lambda: self._redis.set(key, b"1", nx=True, ex=_QUEUED_S))
        return bool(await queued)

    async def _renew(self, key: str) -> None:
        while True:
            await asyncio.sleep(_LEASE_S / 3)
            await self._client.call(lambda: self._redis.expire(key, _LEASE_S))

    async def _names(self, index: str, start: int, limit: int) -> list[str]:
        found = await self._client.call(lambda: self._redis.zrevrange(index, start, start + limit))
        return [name.decode() for name in found]

    async def _drop(self, index: str, names: list[str]) -> None:
        await self._client.call(lambda: self._redis.zrem(index, *names))

    async def _records(self, ids: list[str]) -> list[tuple[str, Batch | None]]:
        names = [self._keys.batch(name) for name in ids]
        found = await self._client.call(lambda: self._redis.mget(names))
        return [
            (name, None if data is None else Batch.model_validate_json(data))
            for name, data in zip(ids, found, strict=True)
        ]

    def _queue_change(self, pipe: Any, after: Batch, delivery: Delivery | None) -> None:
        key = self._keys.batch(after.id)
        if not after.ended:
            pipe.set(key, after.model_dump_json())
            return
        pipe.set(key, after.model_dump_json(), ex=self._keep_s)
        pipe.zrem(self._keys.active, after.id)
        pipe.zadd(self._keys.leftovers, {batch_folder(after.id): int(time.time())})
        if delivery is not None:
            pipe.set(self._keys.delivery(delivery.id), delivery.model_dump_json())
            pipe.zadd(self._keys.deliveries, {delivery.id: delivery.due_at})
