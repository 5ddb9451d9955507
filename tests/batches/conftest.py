"""A server with a worker, and processes that drive batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batches.receiver import Receiver
from module_server import fleet as fleet
from module_server import folder as folder
from module_server import server as server
from module_server import synthetic_worker as synthetic_worker
from waiting import wait_until_async

from penstock.producer.batches.batch_metrics import BatchMetrics
from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.stores.records import Batch
from penstock.shared.keys import BatchKeys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings, load_settings


@pytest.fixture(scope="module")
def settings(server: EmbeddedRedis, folder: Path) -> Settings:
    flags = {
        "redis.url": server.url,
        "batches.storage": str(folder / "files"),
        "batches.webhook_private": True,
        "queue.model": "letters",
    }
    return load_settings(flags)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.shutdown()
    receiver.server_close()


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[RetryingClient]:
    assert settings.redis.url is not None
    client = RetryingClient(settings.redis.url)
    await client.connect(BatchKeys().active)
    yield client
    await client.aclose()


@pytest.fixture
async def service(client: RetryingClient, settings: Settings) -> AsyncIterator[BatchService]:
    service = BatchService(client, settings)
    yield service
    await service.aclose()


@pytest.fixture
def drivers(
    server: EmbeddedRedis, settings: Settings, folder: Path
) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts ``penstock batches`` processes, and kills them at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "REDIS_URL": server.url,
            "PENSTOCK_BATCHES__STORAGE": settings.batches.storage,
            "PENSTOCK_BATCHES__WEBHOOK_PRIVATE": "true",
            "PENSTOCK_BATCHES__METRICS_PORT": "0",
        }
        with (folder / f"driver-{len(started)}.log").open("wb") as log:
            command = [sys.executable, "-m", "penstock.producer.cli", "batches"]
            process = spawn_bound(command, stdout=log, stderr=log, env=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(60)


async def upload(
    service: BatchService, data: bytes, tenant: str = "tests", filename: str = "input.jsonl"
) -> str:
    """Store a file of lines; returns its id."""

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    file = await service.files.upload(
        chunks(), tenant=tenant, filename=filename, expires_after_s=None
    )
    return file.id


async def start(service: BatchService, data: bytes, **options: Any) -> Batch:
    """Begin a batch of these lines."""
    options.setdefault("endpoint", "/v1/completions")
    name = await upload(service, data)
    return await service.create(input_file_id=name, tenant="tests", **options)


async def drive(service: BatchService, batch: Batch, metrics: BatchMetrics | None = None) -> Batch:
    """Drive a batch in this process until it has ended."""
    driver = service.driver(metrics or BatchMetrics())
    while await driver.tick(batch.id, budget_s=60):
        pass
    return await service.batches.get(batch.id)


async def ended(service: BatchService, batch: Batch) -> Batch:
    """Wait until a batch that others drive has ended."""

    async def has_ended() -> bool:
        return (await service.batches.get(batch.id)).ended

    await wait_until_async(has_ended, "the batch has ended", 60)
    return await service.batches.get(batch.id)


async def read_lines(service: BatchService, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output file."""
    assert file_id is not None
    file = await service.files.get(file_id)
    data = b"".join([chunk async for chunk in await service.files.content(file)])
    return [json.loads(line) for line in data.splitlines()]


def completion_lines(count: int, **body: Any) -> bytes:
    """Lines that ask for completions of numbered prompts."""
    lines = [
        {
            "custom_id": f"line {i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "letters", "prompt": f"number {i}", "max_tokens": 8, **body},
        }
        for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
