"""What a worker says of a server on which it will not start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from penstock.gpu_worker.edge.redis_check import check_redis
from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.embedded import EmbeddedRedis


async def refusal(url: str) -> str:
    with pytest.raises(RedisUnavailable) as caught:
        await check_redis(url, "key", timeout_s=1)
    return str(caught.value)


async def test_what_is_wrong_with_a_server_is_named_with_the_remedy(
    start_redis: Callable[..., EmbeddedRedis],
) -> None:
    server = start_redis(password="right")
    assert "check user and password" in await refusal(server.url.replace("right", "wrong"))
    assert "DB index is out of range; check database" in await refusal(server.url[:-1] + "999")
    async with Redis.from_url(server.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        assert "CONFIG SET maxmemory-policy noeviction" in await refusal(server.url)
        await client.config_set("maxmemory-policy", "noeviction")
        await check_redis(server.url, "key", timeout_s=1)
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert "read only replica; point REDIS_URL or --redis to its primary" in await refusal(
            server.url
        )
        await client.config_set("replica-read-only", "no")
        await check_redis(server.url, "key", timeout_s=1)
    assert "must be redis:// unless it speaks TLS" in await refusal("rediss" + server.url[5:])
    server.stop()
    assert "start the server, or set REDIS_URL" in await refusal(server.url)
