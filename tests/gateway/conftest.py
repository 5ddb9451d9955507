"""A server, workers and a gateway, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from gateway.rig import GatewayProcess
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import find_servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(find_servers()[0], password="").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fleet(server: EmbeddedRedis, folder: Path) -> Iterator[WorkerFactory]:
    """Starts workers of the module's server."""
    factory = WorkerFactory(server.url, folder)
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def demo_worker(fleet: WorkerFactory) -> None:
    """A worker with the demo model."""
    fleet.supervised("demo")


@pytest.fixture(scope="module")
def synthetic_worker(fleet: WorkerFactory) -> None:
    """A worker whose tokens are letters by a hash, under the name ``letters``."""
    fleet.supervised("letters", "--model", "synthetic", "--name", "letters")


@pytest.fixture(scope="module")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "gateway.log")
    yield process
    process.kill()


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client
