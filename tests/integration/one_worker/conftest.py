"""One worker with the demo model, for all tests that only send it requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer
from penstock.shared.local.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def worker(
    server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    factory = WorkerFactory(server.url, tmp_path_factory.mktemp("worker"))
    yield factory.engine("only", engine__max_sequences=8)
    factory.close()


@pytest.fixture
async def producer(server: EmbeddedRedis, worker: WorkerProcess) -> AsyncIterator[Producer]:
    async with Producer(server.url) as producer:
        yield producer
