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
from workers import WorkerFactory

from penstock.producer.batches.batch_service import BatchService
from penstock.shared.keys import BatchKeys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import find_servers
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings, load_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(find_servers()[0], password="").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def letters(server: EmbeddedRedis, folder: Path) -> Iterator[WorkerFactory]:
    """A worker whose tokens are letters by a hash, under the name ``letters``."""
    factory = WorkerFactory(server.url, folder)
    factory.supervised("letters", "--model", "synthetic", "--name", "letters")
    yield factory
    factory.close()


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
async def service(settings: Settings) -> AsyncIterator[BatchService]:
    assert settings.redis.url is not None
    client = RetryingClient(settings.redis.url)
    await client.connect(BatchKeys().active)
    service = BatchService(client, settings)
    yield service
    await service.aclose()
    await client.aclose()


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
        }
        with (folder / f"driver-{len(started)}.log").open("wb") as log:
            command = [sys.executable, "-m", "penstock.producer.cli", "batches"]
            process = spawn_bound(command, stdout=log, stderr=log, env=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


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
