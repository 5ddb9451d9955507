"""A shard on every server program of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from delivery.fleet import Shard
from redis.asyncio import Redis


@pytest.fixture
async def shard(any_redis_url: str) -> AsyncIterator[Shard]:
    client = Redis.from_url(any_redis_url)
    yield Shard(client)
    await client.config_set("maxmemory", 0)
    await client.aclose()
