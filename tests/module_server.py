"""Fixtures for folders of tests that share a server and workers within a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import find_servers

__all__ = ["fleet", "folder", "server", "start_letters", "synthetic_worker"]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the file's own."""
    return tmp_path_factory.mktemp(request.path.stem)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A server of the file's own, with the best program of this machine."""
    server = EmbeddedRedis(find_servers()[0], password="").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fleet(server: EmbeddedRedis, folder: Path) -> Iterator[WorkerFactory]:
    """Starts workers of the module's server."""
    factory = WorkerFactory(server.url, folder)
    yield factory
    factory.close()


def start_letters(fleet: WorkerFactory) -> None:
    """Start a worker whose tokens are letters by a hash, under the name ``letters``.

    It publishes each token alone, so that streams can be disturbed between any two.
    """
    at_once = {"PENSTOCK_WORKER__STREAM_INTERVAL_MS": "0"}
    fleet.supervised("letters", "--model", "synthetic", "--name", "letters", **at_once)


@pytest.fixture(scope="module")
def synthetic_worker(fleet: WorkerFactory) -> None:
    """What :func:`start_letters` starts."""
    start_letters(fleet)
