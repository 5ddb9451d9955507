"""The compose files and images, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.shared.local.server_binary import find_server
from penstock.shared.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "deploy" / "compose.gpu.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(BASE.read_text())["services"]


def compose_command() -> list[str] | None:
    """The compose program of this machine: the plugin, or the older separate one."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            run = subprocess.run([*command, "version"], capture_output=True, check=False)
            if run.returncode == 0:
                return command
    return None


@pytest.mark.parametrize("files", [[BASE], [BASE, GPU]], ids=["base", "gpu"])
def test_compose_accepts_the_files(files: list[Path]) -> None:
    command = compose_command()
    if command is None:
        pytest.skip("no docker compose here: apt-get install docker-compose")
    given = [part for file in files for part in ("-f", str(file))]
    run = subprocess.run([*command, *given, "config", "-q"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not run.stderr


def test_redis_keeps_data_and_evicts_nothing(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "redis-server"
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in options
    assert services["redis"]["volumes"] == ["redis-data:/data"]


def test_the_server_accepts_the_options_of_the_service(
    services: dict[str, Any], tmp_path: Path
) -> None:
    program = find_server().path
    options = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in services["redis"]["command"][1:]]
    # Port 0 and no socket: the server reads its options, finds nothing to listen on, and ends.
    run = subprocess.run(
        [program, *options, "--port", "0", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "Configured to not listen anywhere" in run.stdout, run.stdout + run.stderr


def test_workers_can_be_scaled(services: dict[str, Any]) -> None:
    worker = services["gpu_worker"]
    assert "container_name" not in worker
    assert all(re.fullmatch(r"127\.0\.0\.1::\d+", port) for port in worker["ports"])


def test_no_port_is_open_to_the_network(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_environments_are_valid_settings(services: dict[str, Any]) -> None:
    override = yaml.safe_load(GPU.read_text())["services"]
    for name in ("gpu_worker", "submit"):
        environment = services[name]["environment"]
        environment |= override.get(name, {}).get("environment", {})
        settings = load_settings(environment=environment)
        assert settings.redis.url == "redis://redis:6379/0"
    assert settings.redis.embedded == "never"


def test_drain_fits_into_the_grace_period(services: dict[str, Any]) -> None:
    grace = services["gpu_worker"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > load_settings(environment={}).worker.drain_timeout_s + 10


def test_metrics_port_is_the_same_everywhere(services: dict[str, Any]) -> None:
    worker = services["gpu_worker"]
    port = worker["environment"]["PENSTOCK_WORKER__METRICS_PORT"]
    assert worker["ports"] == [f"127.0.0.1::{port}"]
    assert f":{port}/readyz" in worker["healthcheck"]["test"][-1]
    assert f"EXPOSE {port}" in (ROOT / "deploy" / "Dockerfile.worker").read_text()


@pytest.mark.parametrize("name", ["worker", "client"])
def test_images_copy_what_exists_and_is_let_through(name: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    lines = (ROOT / "deploy" / f"Dockerfile.{name}").read_text().splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ")]
    assert copied
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore
