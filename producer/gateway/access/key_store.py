"""The API keys in Redis: made, listed, revoked and rotated."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import GatewayKeys
from penstock.shared.redis.retrying_client import RetryingClient

from .key_records import KeyRecord, digest_of, new_secret

__all__ = ["KeyStore"]

_MOST_KEYS = 100_000


class KeyStore:
    """All keys of a Redis server.

    A revoked or expired key stays in the list: its id may be in logs, and a gateway that once had
    keys never serves without.

    Args:
        client: the connection.
    """

    def __init__(self, client: RetryingClient) -> None:
        self._client = client
        self._keys = GatewayKeys()

    async def create(
        self, record: KeyRecord, *, lifetime_ms: int | None = None
    ) -> tuple[str, KeyRecord]:
        """Make a key; its secret is told once, here.

        Args:
            record: what it allows; its id and times are set here.
            lifetime_ms: how long it is in force; None for ever.

        Returns:
            The secret and the record.

        Raises:
            InvalidRequest: a field is out of range, or there are 100,000 keys.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        now = await self.now_ms()
        expires_at = None if lifetime_ms is None else now + lifetime_ms
        record = replace(record, id=f"key-{secrets.token_hex(6)}").with_times(now, expires_at)
        record.check()
        if await self.count() >= _MOST_KEYS:
            raise InvalidRequest("keys", _MOST_KEYS, f"fewer than {_MOST_KEYS} keys")
        return await self._store(record), record

    async def all(self) -> list[KeyRecord]:
        """Every key, oldest first.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        index = await self._index()
        found = [await self._read(digests[0]) for digests in index.values() if digests]
        return sorted((r for r in found if r is not None), key=lambda r: (r.created_at, r.id))

    async def count(self) -> int:
        """How many there are, revoked ones included.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        redis = self._client.redis

        async def send() -> int:
            count: int = await redis.hlen(self._keys.index)  # type: ignore[misc]
            return count

        return await self._client.call(send)

    async def find(self, secret: str) -> KeyRecord | None:
        """The key of a secret, in force or not; None if there is none.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        digest = digest_of(secret)
        raw = await self._hash(digest)
        # The name of the key is its digest, and a damaged copy must not do for another.
        stored = raw.get(b"digest", b"")
        return KeyRecord.read(raw) if hmac.compare_digest(stored, digest.encode()) else None

    async def revoke(self, key_id: str) -> KeyRecord:
        """End a key for good, with all its secrets; repeating it is harmless.

        Raises:
            InvalidRequest: there is no such key.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        digests, record = await self._named(key_id)
        if record.revoked_at is None:
            record = replace(record, revoked_at=await self.now_ms())
            for digest in digests:
                await self._write(digest, {"revoked_at": record.revoked_at})
        return record

    async def rotate(self, key_id: str, *, grace_ms: int = 0) -> tuple[str, KeyRecord]:
        """Give a key a new secret; its id, limits and what they count stay.

        Args:
            key_id: the key.
            grace_ms: how long the secret before is still in force; those before it end now.

        Returns:
            The new secret and the record.

        Raises:
            InvalidRequest: there is no such key, or it is not in force.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        digests, record = await self._named(key_id)
        now = await self.now_ms()
        if not record.is_valid(now):
            raise InvalidRequest("key", key_id, "a key that is in force")
        secret = await self._store(record, digests[:1])
        for digest, ends in zip(digests, (now + grace_ms, *[now] * len(digests)), strict=False):
            if record.expires_at is None or ends < record.expires_at:
                await self._write(digest, {"expires_at": ends})
        return secret, record

    async def _store(self, record: KeyRecord, before: Sequence[str] = ()) -> str:
        secret = new_secret()
        digest = digest_of(secret)
        redis, keys = self._client.redis, self._keys

        async def send() -> None:
            pipeline = redis.pipeline(transaction=True)
            pipeline.hset(keys.key(digest), mapping={**record.fields(), "digest": digest})
            pipeline.hset(keys.index, record.id, " ".join((digest, *before)))
            await pipeline.execute()

        await self._client.call(send)
        return secret

    async def _write(self, digest: str, fields: dict[str, Any]) -> None:
        redis, name = self._client.redis, self._keys.key(digest)

        async def send() -> None:
            await redis.hset(name, mapping=fields)  # type: ignore[misc]

        await self._client.call(send)

    async def _named(self, key_id: str) -> tuple[list[str], KeyRecord]:
        digests = (await self._index()).get(key_id)
        record = await self._read(digests[0]) if digests else None
        if not digests or record is None:
            raise InvalidRequest("key", key_id, "the id of a key, as `penstock keys list` shows it")
        return digests, record

    async def _read(self, digest: str) -> KeyRecord | None:
        return KeyRecord.read(await self._hash(digest))

    async def _hash(self, digest: str) -> dict[bytes, bytes]:
        redis, name = self._client.redis, self._keys.key(digest)

        async def send() -> dict[bytes, bytes]:
            raw: dict[bytes, bytes] = await redis.hgetall(name)  # type: ignore[misc]
            return raw

        return await self._client.call(send)

    async def _index(self) -> dict[str, list[str]]:
        redis = self._client.redis

        async def send() -> dict[bytes, bytes]:
            raw: dict[bytes, bytes] = await redis.hgetall(self._keys.index)  # type: ignore[misc]
            return raw

        index = await self._client.call(send)
        return {name.decode(): value.decode().split() for name, value in index.items()}

    async def now_ms(self) -> int:
        """Redis' clock in ms."""
        seconds, microseconds = await self._client.call(lambda: self._client.redis.time())
        return int(seconds) * 1000 + int(microseconds) // 1000
