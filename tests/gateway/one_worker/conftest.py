"""One worker with the demo model, for all tests that only ask it."""

from __future__ import annotations

import pytest
from gateway.folder_server import fleet as fleet
from gateway.folder_server import folder as folder
from gateway.folder_server import gateway as gateway
from gateway.folder_server import server as server
from workers import WorkerFactory


@pytest.fixture(scope="session", autouse=True)
def demo_worker(fleet: WorkerFactory) -> None:
    fleet.supervised("demo")
