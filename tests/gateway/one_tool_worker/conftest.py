"""One worker with a tiny model that reasons and calls tools, for all tests that only ask it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway.folder_server import fleet as fleet
from gateway.folder_server import folder as folder
from gateway.folder_server import gateway as gateway
from gateway.folder_server import server as server
from workers import WorkerFactory


@pytest.fixture(scope="session", autouse=True)
def tool_worker(fleet: WorkerFactory, tool_model: Path) -> None:
    """It makes no log compact in this time but those that a test makes older."""
    settings = {"queue__model": "caller", "queue__compact_logs_after_s": 36_000}
    settings["worker__stream_interval_ms"] = 0  # streams are resumed between any two tokens
    fleet.engine("caller", model__path=str(tool_model), **settings)
