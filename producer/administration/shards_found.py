"""Which shards a Redis server has keys of."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import NoPermissionError

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import Keys
from penstock.shared.redis.retrying_client import RetryingClient

__all__ = ["FoundShards", "find_known_shards", "find_shards"]

_KEYS_PER_SCAN = 1000
_MAX_SCANS = 1000

_LASTING = frozenset({b"leases", b"model", b"counters"})
"""A shard that has, or once had, a worker or a request has one of these for ever."""

_LASTING_PATTERN = "[clm][eo][adu][ens][elt]*"
"""For SCAN, which takes one pattern: all of these, and few others."""


@dataclass(frozen=True, slots=True)
class FoundShards:
    """What a search has found.

    Attributes:
        shards: in order of model and shard; empty if this user may not list keys.
        pages: the cost to the server: how many times it listed a thousand keys.
    """

    shards: list[Keys]
    pages: int


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
    names, _ = await _scan(client, name)
    return _shards_of(names)


async def find_known_shards(client: RetryingClient) -> FoundShards:
    """The same for shards that have, or once had, a worker or a request.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    names, pages = await _scan(client, _LASTING_PATTERN)
    lasting = {name for name in names if name.partition(b"}:")[2] in _LASTING}
    return FoundShards(_shards_of(lasting), pages)


async def _scan(client: RetryingClient, pattern: str) -> tuple[set[bytes], int]:
    """Keys of shards, and how many calls it took; none if this user may not list keys."""

    async def send() -> tuple[set[bytes], int]:
        found: set[bytes] = set()
        cursor, pages = 0, 0
        while pages < _MAX_SCANS:
            cursor, names = await client.redis.scan(
                cursor, match=f"ps:{{*}}:{pattern}", count=_KEYS_PER_SCAN
            )
            pages += 1
            found.update(names)
            if not cursor:
                break
        return found, pages

    async def allowed() -> tuple[set[bytes], int]:
        try:
            return await send()
        except NoPermissionError:
            return set(), 0

    return await client.call(allowed)


def _shards_of(names: set[bytes]) -> list[Keys]:
    tags = {name.partition(b"}")[0].removeprefix(b"ps:{") for name in names}
    shards = (_shard(tag.decode(errors="replace")) for tag in tags)
    return sorted((s for s in shards if s is not None), key=lambda keys: (keys.model, keys.shard))


def _shard(tag: str) -> Keys | None:
    """The shard of a hash tag; None if it is none of ours."""
    model, _, shard = tag.rpartition(".")
    try:
        return Keys(model, int(shard))
    except (ValueError, InvalidRequest):
        return None
