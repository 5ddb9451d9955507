"""One server, one worker with the demo model and one gateway, for all tests that only ask it.

All files of the folder run in one process (``tests/conftest.py``). What they leave, others find.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway.rig import GatewayProcess
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import find_servers


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-worker")


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(find_servers()[0], password="") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def demo_worker(server: EmbeddedRedis, folder: Path) -> Iterator[None]:
    factory = WorkerFactory(server.url, folder)
    factory.supervised("demo")
    yield
    factory.close()


@pytest.fixture(scope="session")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "gateway.log")
    yield process
    process.kill()
