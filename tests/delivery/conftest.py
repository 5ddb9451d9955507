"""A shard on every server program of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from delivery.fleet import Shard
from redis.asyncio import Redis


@pytest.fixture
async def newest_shard(redis_url: str) -> AsyncIterator[Shard]:
    """A shard on the newest server, for tests that would take too long on all."""
    async with Redis.from_url(redis_url) as client:
        yield Shard(client)


@pytest.fixture
async def shard(any_redis_url: str) -> AsyncIterator[Shard]:
    """A shard on every server program, one after the other."""
    client = Redis.from_url(any_redis_url)
    yield Shard(client)
    await client.config_set("maxmemory", 0)
    await client.aclose()
