"""A shard with a plain door on every server program of this machine, and workers on the best."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from door.plain import PlainDoor
from redis.asyncio import Redis
from workers import WorkerFactory


@pytest.fixture
async def door(any_redis_url: str) -> AsyncIterator[PlainDoor]:
    """A plain door on every server program, one after the other."""
    async with Redis.from_url(any_redis_url) as client:
        yield PlainDoor(client)
        await client.config_set("maxmemory", 0)


@pytest.fixture
async def newest_door(redis_url: str) -> AsyncIterator[PlainDoor]:
    """One on the newest server, for tests that would take too long on all."""
    async with Redis.from_url(redis_url) as client:
        yield PlainDoor(client)


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    """Starts worker processes against ``redis_url``; all are gone after the test."""
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()
