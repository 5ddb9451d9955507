"""Fixtures for tests with real worker processes, and for readers of what a test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from log_writer import LogWriter
from redis.asyncio import Redis
from workers import WorkerFactory

from penstock.producer import Producer


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    """Starts worker processes against ``redis_url``; all are gone after the test."""
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()


@pytest.fixture
async def client(any_redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(any_redis_url) as connection:
        yield connection


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(redis_url) as producer:
        yield producer


@pytest.fixture
async def writer(redis_client: Redis) -> LogWriter:
    return await LogWriter(redis_client, "request-1").open()
