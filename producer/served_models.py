"""What is served on a Redis server: living workers, and the models they serve."""

from __future__ import annotations

from redis.exceptions import NoPermissionError

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import Keys
from penstock.shared.redis.retrying_client import RetryingClient

__all__ = ["count_workers", "find_served_models"]

_KEYS_PER_SCAN = 1000
_MAX_SCANS = 1000


async def count_workers(client: RetryingClient, keys: Keys) -> int:
    """How many workers of a shard hold a lease now.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> int:
        seconds, microseconds = await client.redis.time()
        now_ms = seconds * 1000 + microseconds // 1000
        count: int = await client.redis.zcount(keys.leases, f"({now_ms}", "+inf")
        return count

    return await client.call(send)


async def find_served_models(client: RetryingClient) -> list[Keys]:
    """The models and shards with a living worker; in a cluster, those of this node.

    It looks at the names of the first million keys.

    Returns:
        In order of model and shard; empty if this user may not list keys.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> list[str]:
        found: set[bytes] = set()
        cursor = 0
        for _ in range(_MAX_SCANS):
            cursor, names = await client.redis.scan(
                cursor, match="ps:{*}:leases", count=_KEYS_PER_SCAN
            )
            found.update(names)
            if not cursor:
                break
        return sorted(name.decode(errors="replace") for name in found)

    async def allowed() -> list[str]:
        try:
            return await send()
        except NoPermissionError:
            return []

    shards = [keys for name in await client.call(allowed) if (keys := _shard_of(name)) is not None]
    return [keys for keys in shards if await count_workers(client, keys)]


def _shard_of(leases: str) -> Keys | None:
    """The shard that a key of leases belongs to; None if the key is named otherwise."""
    model, _, shard = leases.removeprefix("ps:{").removesuffix("}:leases").rpartition(".")
    try:
        return Keys(model, int(shard))
    except (ValueError, InvalidRequest):
        return None
