"""What the storage is to be rid of: noted in Redis first, so that no death leaves a body behind.

A deletion is noted with the change of the record that makes it due. An upload is noted before its
first byte, and struck off once its record exists. A sweep therefore reads these notes alone, never
the storage's listing, and two installations may share a directory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from penstock.shared.keys import BatchKeys
from penstock.shared.redis.retrying_client import RetryingClient

from .storage import Storage, StorageError

__all__ = ["Leftovers"]

_UPLOAD_S = 24 * 3600
_AGAIN_S = 600
_AT_ONCE = 100

_log = logging.getLogger(__name__)


class Leftovers:
    """The leftovers of one Redis server and storage.

    Args:
        client: the connection.
        storage: what is swept.
    """

    def __init__(self, client: RetryingClient, storage: Storage) -> None:
        self._client = client
        self._redis: Any = client.redis
        self._storage = storage
        self._key = BatchKeys().leftovers

    async def expect(self, name: str) -> None:
        """Note a file that is about to be written: it goes after a day unless it is kept."""
        due = int(time.time()) + _UPLOAD_S
        await self._client.call(lambda: self._redis.zadd(self._key, {name: due}))

    async def clear(self, name: str) -> None:
        """Delete a file or folder that was noted. If the storage refuses, a sweep tries again."""
        try:
            await asyncio.to_thread(self._storage.delete, name)
        except StorageError as error:
            _log.warning("%s; trying again in %d s", error, _AGAIN_S)
            due = int(time.time()) + _AGAIN_S
            await self._client.call(lambda: self._redis.zadd(self._key, {name: due}))
            return
        await self._client.call(lambda: self._redis.zrem(self._key, name))

    async def sweep(self) -> None:
        """Delete what is due, and what killed processes have begun to write a day ago."""
        now = int(time.time())
        names = await self._client.call(
            lambda: self._redis.zrangebyscore(self._key, 0, now, start=0, num=_AT_ONCE)
        )
        for name in names:
            await self.clear(name.decode())
        try:
            await asyncio.to_thread(self._storage.delete_unfinished, _UPLOAD_S)
        except StorageError as error:
            _log.warning("%s", error)
