"""Fixtures for tests with real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import WorkerFactory


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerFactory]:
    """Starts worker processes against ``redis_url``; all are gone after the test."""
    factory = WorkerFactory(redis_url, tmp_path)
    yield factory
    factory.close()
