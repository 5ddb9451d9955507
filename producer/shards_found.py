"""Which shards a Redis server has keys of."""

from __future__ import annotations

from redis.exceptions import NoPermissionError

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import Keys
from penstock.shared.redis.retrying_client import RetryingClient

__all__ = ["find_shards"]

_KEYS_PER_SCAN = 1000
_MAX_SCANS = 1000


async def find_shards(client: RetryingClient, name: str) -> list[Keys]:
    """The shards that have a key of this name; in a cluster, those of this node.

    It looks at the names of the first million keys.

    Args:
        client: the connection.
        name: a key's name behind the shard's prefix, as a pattern for SCAN.

    Returns:
        In order of model and shard; empty if this user may not list keys.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> set[bytes]:
        found: set[bytes] = set()
        cursor = 0
        for _ in range(_MAX_SCANS):
            cursor, names = await client.redis.scan(
                cursor, match=f"ps:{{*}}:{name}", count=_KEYS_PER_SCAN
            )
            found.update(names)
            if not cursor:
                break
        return found

    async def allowed() -> set[bytes]:
        try:
            return await send()
        except NoPermissionError:
            return set()

    tags = {key.partition(b"}")[0].removeprefix(b"ps:{") for key in await client.call(allowed)}
    shards = (_shard(tag.decode(errors="replace")) for tag in tags)
    return sorted((s for s in shards if s is not None), key=lambda keys: (keys.model, keys.shard))


def _shard(tag: str) -> Keys | None:
    """The shard of a hash tag; None if it is none of ours."""
    model, _, shard = tag.rpartition(".")
    try:
        return Keys(model, int(shard))
    except (ValueError, InvalidRequest):
        return None
