"""A server, workers and a gateway, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway.openai_forms import check_body
from gateway.rig import GatewayProcess
from module_server import fleet as fleet
from module_server import folder as folder
from module_server import server as server
from module_server import synthetic_worker as synthetic_worker
from workers import WorkerFactory

from penstock.shared.local.embedded import EmbeddedRedis


@pytest.fixture(autouse=True)
def checked_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every JSON body that a test reads is checked, also those that OpenAI's client reads."""
    read = httpx.Response.json

    def checked(response: httpx.Response, **options: Any) -> Any:
        data = read(response, **options)
        check_body(data)
        return data

    monkeypatch.setattr(httpx.Response, "json", checked)


@pytest.fixture(scope="module")
def demo_worker(fleet: WorkerFactory) -> None:
    """A worker with the demo model."""
    fleet.supervised("demo")


@pytest.fixture(scope="module")
def gateway(server: EmbeddedRedis, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(server.url, folder / "gateway.log")
    yield process
    process.kill()


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client
