"""Fixtures for folders of tests that share a server, a worker and a gateway.

All files of such a folder run in one process (``tests/conftest.py``). What one leaves on the
server, the others find.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway.rig import GatewayProcess
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import find_servers

__all__ = ["fleet", "folder", "gateway", "server"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the shared worker's files and of the gateway's log."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(find_servers()[0], password="") as server:
        yield server


@pytest.fixture(scope="session")
def fleet(server: EmbeddedRedis, folder: Path) -> Iterator[WorkerFactory]:
    """Starts workers of the folder's server."""
    factory = WorkerFactory(server.url, folder)
    yield factory
    factory.close()


@pytest.fixture(scope="session")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "gateway.log")
    yield process
    process.kill()
