"""Files of tenants: records in Redis, bodies in the storage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import IO

from penstock.shared.errors import InvalidRequest, PenstockError
from penstock.shared.keys import BatchKeys
from penstock.shared.protocol.request import check_tenant
from penstock.shared.redis.retrying_client import RetryingClient

from .leftovers import Leftovers
from .records import FilePurpose, StoredFile, new_file_id
from .storage import Storage

__all__ = ["FileStore", "FileTooLarge", "UnknownFile"]

_READ_BYTES = 1 << 16


class UnknownFile(PenstockError):
    """No such file of this tenant."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"no file {file_id!r}; it may have expired or been deleted")


class FileTooLarge(PenstockError):
    """A file is over the limit on its size; nothing was stored."""


class FileStore:
    """The files of one Redis server and storage.

    Args:
        client: the connection.
        storage: where the bodies are.
        leftovers: what the storage is to be rid of.
        max_bytes: largest file.
    """

    def __init__(
        self, client: RetryingClient, storage: Storage, leftovers: Leftovers, *, max_bytes: int
    ) -> None:
        self._client = client
        self._leftovers = leftovers
        self._redis = client.redis
        self._storage = storage
        self._max_bytes = max_bytes
        self._keys = BatchKeys()

    async def upload(
        self,
        chunks: AsyncIterable[bytes],
        *,
        tenant: str,
        filename: str,
        expires_after_s: int | None,
    ) -> StoredFile:
        """Store a batch's input as it arrives.

        Raises:
            FileTooLarge: it is larger than allowed.
            InvalidRequest: it is empty, or no tenant can have this name.
            StorageError: it cannot be stored.
        """
        check_tenant(tenant)
        file_id = new_file_id()
        await self.expect(file_id)
        writer = await asyncio.to_thread(self._storage.writer, self.body(file_id))
        try:
            async for chunk in chunks:
                if writer.size + len(chunk) > self._max_bytes:
                    raise FileTooLarge(f"a file may have at most {self._max_bytes} bytes")
                await asyncio.to_thread(writer.write, chunk)
            if not writer.size:
                raise InvalidRequest("file", "", "a file with at least one line")
        except BaseException:
            await asyncio.to_thread(writer.discard)
            raise
        await asyncio.to_thread(writer.close)
        return await self.register(
            StoredFile(
                id=file_id,
                tenant=tenant,
                filename=filename.encode(errors="replace").decode(),  # of disks without UTF-8
                purpose=FilePurpose.BATCH,
                size=writer.size,
                created_at=int(time.time()),
                expires_at=_after(expires_after_s),
            )
        )

    async def expect(self, file_id: str) -> None:
        """Say that a body will be written: without :meth:`register` it is deleted after a day."""
        await self._leftovers.expect(self.body(file_id))

    async def register(self, file: StoredFile) -> StoredFile:
        """Make a file known whose body is in the storage; a second time changes nothing."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.file(file.id), file.model_dump_json(), nx=True)
                pipe.zadd(self._keys.files(file.tenant), {file.id: file.created_at}, nx=True)
                if file.expires_at is not None:
                    pipe.zadd(self._keys.file_expiry, {file.id: file.expires_at}, nx=True)
                pipe.zrem(self._keys.leftovers, self.body(file.id))
                await pipe.execute()

        await self._client.call(send)
        return file

    async def get(self, file_id: str, tenant: str | None = None) -> StoredFile:
        """A file's record.

        Args:
            file_id: which.
            tenant: the tenant it must belong to; None accepts any.

        Raises:
            UnknownFile: there is none.
        """
        if not file_id.isascii():  # it may not even have bytes
            raise UnknownFile(file_id)
        data = await self._client.call(lambda: self._redis.get(self._keys.file(file_id)))
        file = None if data is None else StoredFile.model_validate_json(data)
        if file is None or (tenant is not None and file.tenant != tenant):
            raise UnknownFile(file_id)
        return file

    async def is_known(self, file_id: str) -> bool:
        """Whether a file exists, wherever its body is."""
        try:
            await self.get(file_id)
        except UnknownFile:
            return False
        return True

    async def expire(self, file_id: str, life_s: int) -> None:
        """Let a file that would be kept for ever be deleted after some time."""
        with contextlib.suppress(UnknownFile):
            file = await self.get(file_id)
            if file.expires_at is None:
                at = int(time.time()) + life_s
                await self._put_expiry(file.model_copy(update={"expires_at": at}), at)

    async def page(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 100,
        purpose: str | None = None,
        newest_first: bool = True,
    ) -> tuple[list[StoredFile], bool]:
        """A tenant's files in order of their creation, and whether there are more.

        Raises:
            UnknownFile: ``after`` is none of them.
            InvalidRequest: no tenant can have this name.
        """
        index = self._keys.files(check_tenant(tenant))
        ids = await self._client.call(lambda: self._redis.zrange(index, 0, -1, desc=newest_first))
        names = [name.decode() for name in ids]
        if after is not None:
            if after not in names:
                raise UnknownFile(after)
            names = names[names.index(after) + 1 :]
        found: list[StoredFile] = []
        for start in range(0, len(names), limit):
            files = await self._records(names[start : start + limit])
            found += [file for file in files if purpose in (None, file.purpose.value)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces, once its body is open.

        Raises:
            UnknownFile: its body is gone.
            StorageError: it cannot be opened.
        """
        try:
            body = await asyncio.to_thread(self._storage.open, self.body(file.id))
        except FileNotFoundError:
            raise UnknownFile(file.id) from None
        return self._pieces(body)

    async def delete(self, file: StoredFile) -> None:
        """Remove a file. A batch that still reads it fails.

        A body that the storage does not delete now is deleted by ``penstock batches`` later.
        """

        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(self._keys.leftovers, {self.body(file.id): int(time.time())})
                pipe.delete(self._keys.file(file.id))
                pipe.zrem(self._keys.files(file.tenant), file.id)
                pipe.zrem(self._keys.file_expiry, file.id)
                await pipe.execute()

        await self._client.call(send)
        await self._leftovers.clear(self.body(file.id))

    async def delete_expired(self) -> int:
        """Remove the files whose time has come; returns how many."""
        now = int(time.time())
        ids = await self._client.call(
            lambda: self._redis.zrangebyscore(self._keys.file_expiry, 0, now, start=0, num=100)
        )
        for file in await self._records([name.decode() for name in ids]):
            await self.delete(file)
        # Those without a record had been deleted by hand.
        if ids:
            await self._client.call(lambda: self._redis.zrem(self._keys.file_expiry, *ids))
        return len(ids)

    async def _records(self, ids: list[str]) -> list[StoredFile]:
        names = [self._keys.file(file_id) for file_id in ids]
        found = await self._client.call(lambda: self._redis.mget(names)) if names else []
        return [StoredFile.model_validate_json(data) for data in found if data is not None]

    async def _put_expiry(self, file: StoredFile, at: int) -> None:
        async def send() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.file(file.id), file.model_dump_json(), xx=True)
                pipe.zadd(self._keys.file_expiry, {file.id: at})
                await pipe.execute()

        await self._client.call(send)

    async def _pieces(self, body: IO[bytes]) -> AsyncIterator[bytes]:
        try:
            while piece := await asyncio.to_thread(body.read, _READ_BYTES):
                yield piece
        finally:
            await asyncio.to_thread(body.close)

    @staticmethod
    def body(file_id: str) -> str:
        """Name of a file's body in the storage."""
        return f"files/{file_id}"


def _after(seconds: int | None) -> int | None:
    return None if seconds is None else int(time.time()) + seconds
