"""Checks a server before use: reachable, a Redis server, new enough and, for workers, safe."""

from __future__ import annotations

import contextlib
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from ..errors import RedisUnavailable
from .cluster import follow_moved, moved_to
from .opening import open_client
from .unavailable import describe_address, not_redis, unavailable
from .version import check_version

__all__ = ["check_durability", "check_server"]


async def check_server(redis: Redis, key: str, section: str | None = None) -> dict[str, Any] | None:
    """Reach the server that serves a key's shard once, without retries, and check its version.

    Args:
        redis: the client.
        key: any key of the shard; in a cluster it finds the node.
        section: of INFO; None for the default ones.

    Returns:
        INFO's fields; None if this user may not run INFO, so that nothing more can be checked.

    Raises:
        RedisUnavailable: unreachable, not Redis, access refused, or too old. Or the caller's own
            client is connected to a cluster's node that does not serve the shard.
    """
    pool = redis.connection_pool
    try:
        with contextlib.suppress(NoPermissionError):  # then the first real command finds the node
            if type(found := await follow_moved(lambda: redis.exists(key))) is not int:
                raise not_redis(f"EXISTS answered {found!r}", pool)
        facts: dict[str, Any] = await redis.info(section)
        version = str(facts["redis_version"])
    except NoPermissionError:
        return None
    except (RedisError, OSError) as error:
        node = moved_to(error)
        if node is None:
            raise unavailable(error, pool) from error
        raise RedisUnavailable(
            f"Redis at {describe_address(pool)} does not serve this shard, {node[0]}:{node[1]} "
            "does: connect your client to that node, or give the URL of any node instead"
        ) from error
    except (AttributeError, LookupError, TypeError, ValueError):
        # What redis-py's parsers make of a reply that is not INFO's.
        raise not_redis("it does not answer INFO", pool) from None
    check_version(version)
    return facts


async def check_durability(url: str, key: str, *, timeout_s: float) -> None:
    """Refuse a server on which a worker could not keep penstock's promises.

    Args:
        url: its address; in a cluster, any node's.
        key: any key of the shard.
        timeout_s: limit on connecting and on each reply, in seconds.

    Raises:
        RedisUnavailable: see :func:`check_server`. Also a replica that takes no writes, or a server
            that evicts keys when its memory is full: an accepted request could vanish.
    """
    redis = open_client(url, timeout_s=timeout_s)
    try:
        facts = await check_server(redis, key)
    finally:
        await redis.aclose()
    if facts is None:
        return
    server = f"Redis at {describe_address(redis.connection_pool)}"
    if facts.get("role") == "slave" and facts.get("slave_read_only") == 1:
        raise RedisUnavailable(
            f"{server} is a read only replica; point REDIS_URL or --redis to its primary"
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise RedisUnavailable(
            f"{server} has maxmemory-policy {policy}, which may evict accepted "
            "requests; set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )
