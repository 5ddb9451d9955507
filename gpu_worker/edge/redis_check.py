"""Looks at the server once, before a worker starts: reachable, new enough, and not forgetful."""

from __future__ import annotations

import contextlib
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.server_binary import check_server
from penstock.shared.redis.address import redact_url
from penstock.shared.redis.cluster import follow
from penstock.shared.redis.transient_errors import NotNow

from .worker_connections import connect

__all__ = ["check_redis"]


async def check_redis(url: str, key: str, *, timeout_s: float) -> None:
    """Refuse a server on which penstock's promises would not hold.

    Args:
        url: its address; of a cluster, any node's.
        key: any key of the shard, by which the cluster's node is found.
        timeout_s: bound on connecting and on each reply.

    Raises:
        RedisUnavailable: it does not answer, refuses access, is older than 6.2, is a replica that
            takes no writes, or evicts keys when its memory is full (an accepted request could
            vanish).
    """
    redis, shown = connect(url, timeout_s=timeout_s), redact_url(url)
    try:
        with contextlib.suppress(NoPermissionError):
            await follow(lambda: redis.exists(key))
        facts: dict[str, Any] = await redis.info()
    except NoPermissionError:
        return  # a restricted user: what it may not see can not be checked
    except AuthenticationError as error:
        raise RedisUnavailable(
            f"Redis at {shown} refuses access: {error}; check user and password"
        ) from None
    except ResponseError as error:
        raise RedisUnavailable(
            f"Redis at {shown} refuses: {error}; check database and user in REDIS_URL or --redis"
        ) from None
    except (NotNow, BusyLoadingError) as error:
        raise RedisUnavailable(
            f"Redis at {shown} answers, but serves nobody now: {error}; start again when it does"
        ) from None
    except (RedisError, OSError) as error:
        tls = ", which must be redis:// unless it speaks TLS on that port"
        raise RedisUnavailable(
            f"cannot reach Redis at {shown}: {error}; start the server, or set REDIS_URL or "
            f"--redis to its address{tls if url.startswith('rediss:') else ''}"
        ) from None
    finally:
        await redis.aclose()
    check_server(str(facts["redis_version"]))
    if facts.get("role") == "slave" and facts.get("slave_read_only") == 1:
        raise RedisUnavailable(
            f"Redis at {shown} is a read only replica; point REDIS_URL or --redis to its primary"
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise RedisUnavailable(
            f"Redis at {shown} has maxmemory-policy {policy}, which may evict accepted "
            "requests; set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )
