"""A shard with an ingress on every server program of this machine, and workers on the best."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ingress.shard_ingress import ShardIngress
from redis.asyncio import Redis
from workers import WorkerFactory


@pytest.fixture
async def ingress(any_redis_url: str) -> AsyncIterator[ShardIngress]:
    """An ingress on every server program, one after the other."""
    async with Redis.from_url(any_redis_url) as client:
        yield ShardIngress(client)
        await client.config_set("maxmemory", 0)


@pytest.fixture
async def newest_ingress(redis_url: str) -> AsyncIterator[ShardIngress]:
    """One on the newest server, for tests that would take too long on all."""
    async with Redis.from_url(redis_url) as client:
        yield ShardIngress(client)


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    """Starts worker processes against ``redis_url``; all are gone after the test."""
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()
