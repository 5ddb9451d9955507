"""``penstock worker`` without what it needs: an error at once, nothing started."""

from __future__ import annotations

import importlib.util

import pytest

from penstock.gpu_worker import worker_command
from penstock.shared.errors import ConfigurationError


@pytest.mark.parametrize(
    ("model", "absent"),
    [("demo", "torch"), ("demo", "prometheus_client"), ("synthetic", "prometheus_client")],
)
def test_missing_packages_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, model: str, absent: str
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == absent else real(name, package)

    def must_not_run(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(worker_command, "open_redis", must_not_run)
    with pytest.raises(ConfigurationError, match=rf"{absent}.*penstock\[worker\]"):
        worker_command.worker(model=model)
