"""``penstock worker``: what it lacks or was told wrongly is an error at once, nothing started."""

from __future__ import annotations

import importlib.util
import signal
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.gpu_worker import command as worker_command
from penstock.gpu_worker.launch import describe_exit
from penstock.gpu_worker.monitoring.health import HealthServer
from penstock.gpu_worker.supervisor import restart_pause_s
from penstock.shared.errors import ConfigurationError
from penstock.shared.settings import Settings
from penstock.tools.chaos.faults.worker_fleet import find_crashes


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def must_not_run(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(worker_command, "open_redis", must_not_run)
    monkeypatch.chdir(tmp_path)


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

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigurationError, match=rf"{absent}.*penstock-llm\[worker\]"):
        worker_command.worker(model=model)


@pytest.mark.parametrize("folder", ["my model", "/", "_x"])
def test_a_directory_whose_name_can_not_be_the_models(folder: str) -> None:
    with pytest.raises(ConfigurationError, match=r"name: model: got .*another with --name"):
        worker_command.worker(model=folder)


@pytest.mark.parametrize(
    ("flags", "variable", "served"),
    [
        ({"model": "some/thing"}, None, "thing"),
        ({"model": "some/thing"}, "demo", "demo"),
        ({"model": "some/thing"}, "else", "else"),
        ({"model": "my model", "name": "demo"}, "else", "demo"),
        ({}, None, "demo"),
    ],
)
def test_under_which_name_a_model_is_served(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], variable: str | None, served: str
) -> None:
    found: list[Settings] = []

    def note(settings: Settings) -> None:
        found.append(settings)
        raise ConfigurationError("enough")

    if variable is not None:
        monkeypatch.setenv("PENSTOCK_QUEUE__MODEL", variable)
    monkeypatch.setattr(worker_command, "_require_packages", note)
    with pytest.raises(ConfigurationError, match="enough"):
        worker_command.worker(**flags)
    assert found[0].queue.model == served


def test_a_ready_file_that_can_not_be_written(tmp_path: Path) -> None:
    ready = tmp_path / "missing" / "ready.json"
    with pytest.raises(ConfigurationError, match=r"--ready-file .*missing is no directory"):
        worker_command.worker(model="synthetic", ready_file=ready)


@pytest.mark.parametrize(
    ("host", "setting"), [("192.0.2.1", "metrics_host"), (None, "metrics_port")]
)
def test_an_address_for_metrics_that_can_not_be_used(host: str | None, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = 0 if host else taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"worker.{setting}: cannot .*; give an"):
            HealthServer(
                host or "127.0.0.1",
                port,
                CollectorRegistry(),
                unhealthy=lambda: None,
                unready=lambda: None,
            )


def test_ends_of_processes_are_told_and_a_storm_reads_them() -> None:
    assert describe_exit(70) == "exit code 70"
    assert describe_exit(-signal.SIGSEGV) == "signal SIGSEGV"
    assert describe_exit(-(signal.SIGRTMIN + 1)) == f"signal {signal.SIGRTMIN + 1}"
    lines = [
        f"error   edge process ended ({describe_exit(code)}); restarting in 0.1 s"
        for code in (70, -signal.SIGSEGV, -signal.SIGKILL)
    ]
    assert find_crashes(lines) == lines[:2]


def test_a_deadly_request_keeps_the_others_waiting_for_seconds() -> None:
    """A worker that cannot start backs off to half a minute; one that had work is soon back."""
    idle = [restart_pause_s(failures, returned=0) for failures in range(9)]
    busy = [restart_pause_s(failures, returned=3) for failures in range(9)]
    assert idle == sorted(idle)
    assert (idle[0], idle[-1]) == (0.1, 30.0)
    assert (busy[:4], max(busy)) == (idle[:4], 2.0)
