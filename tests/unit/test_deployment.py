"""The compose files and images, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
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


def redis_options(services: dict[str, Any]) -> list[str]:
    """The options of the server, behind the shell that writes its password to a file."""
    shell, script, name, *options = services["redis"]["command"][1:]
    assert (shell, name) == ("-c", "redis-server")
    assert "requirepass" in script
    return options


def test_redis_keeps_data_and_evicts_nothing(services: dict[str, Any]) -> None:
    given = redis_options(services)
    options = dict(zip(given[::2], given[1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in options
    assert "redis-data:/data" in services["redis"]["volumes"]


def test_the_server_accepts_the_options_of_the_service(
    services: dict[str, Any], tmp_path: Path
) -> None:
    program = find_server().path
    given = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in redis_options(services)]
    options = [str(tmp_path) if word == "/data" else word for word in given]
    # Port 0 and no socket: the server reads its options, finds nothing to listen on, and ends.
    run = subprocess.run(
        [program, *options, "--port", "0", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
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


def test_environments_are_valid_settings(services: dict[str, Any], tmp_path: Path) -> None:
    override = yaml.safe_load(GPU.read_text())["services"]
    secret = tmp_path / "redis_password"
    secret.write_text("se/cret\n")
    for name in ("gpu_worker", "gateway", "first_key", "submit"):
        environment = dict(services[name]["environment"])
        environment |= override.get(name, {}).get("environment", {})
        assert environment["PENSTOCK_REDIS__PASSWORD_FILE"] == "/redis-secret/password"
        environment |= {"PENSTOCK_REDIS__PASSWORD_FILE": str(secret)}
        settings = load_settings(environment=environment)
        assert settings.redis.url == "redis://default:se%2Fcret@redis:6379/0"
    assert settings.redis.embedded == "never"


def test_a_key_is_made_at_the_first_start_and_where_redis_lost_it(
    services: dict[str, Any], redis_url: str, tmp_path: Path
) -> None:
    (script,) = services["first_key"]["command"]
    script = script.replace("/secrets/", f"{tmp_path}/").replace("/tmp/key", f"{tmp_path}/made")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PENSTOCK_REDIS__URL": redis_url}

    def start() -> str:
        subprocess.run(["sh", "-c", script], env=environment, check=True, timeout=100)
        return (tmp_path / "api_key").read_text()

    def keys_in_redis() -> int:
        with redis.Redis.from_url(redis_url) as client:
            return int(client.hlen("ps:{gateway}:keys"))  # type: ignore[arg-type]

    first = start()
    assert first.startswith("sk-penstock-")
    assert start() == first
    assert keys_in_redis() == 1
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    second = start()
    assert second.startswith("sk-penstock-")
    assert second != first
    assert keys_in_redis() == 1


def test_drains_fit_into_the_grace_periods(services: dict[str, Any]) -> None:
    settings = load_settings(environment={})
    for name, drain_s in (
        ("gpu_worker", settings.worker.drain_timeout_s),
        ("gateway", settings.gateway.drain_timeout_s),
    ):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > drain_s + 10


def test_containers_have_no_rights_and_no_secrets_in_sight(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        volumes = {volume.removesuffix(":ro") for volume in service["volumes"]}
        assert "redis-secret:/redis-secret" in volumes, name
        # The API key is seen by whom it is made, and by whom it is shown.
        assert ("secrets:/secrets" in volumes) == (name in ("first_key", "gateway")), name
        writers = {volume for volume in service["volumes"] if re.search("secrets?$", volume)}
        assert len(writers) == (name in ("password", "first_key")), name
        assert not any(
            "PASSWORD" in key and "FILE" not in key for key in service.get("environment", {})
        )


def test_metrics_port_is_the_same_everywhere(services: dict[str, Any]) -> None:
    worker = services["gpu_worker"]
    port = worker["environment"]["PENSTOCK_WORKER__METRICS_PORT"]
    assert worker["ports"] == [f"127.0.0.1::{port}"]
    image = (ROOT / "deploy" / "Dockerfile.worker").read_text()
    assert f"EXPOSE {port}" in image


@pytest.mark.parametrize("name", ["worker", "client"])
def test_images_are_pinned_and_run_without_rights_under_an_init(name: str) -> None:
    lines = (ROOT / "deploy" / f"Dockerfile.{name}").read_text().splitlines()
    assert any(
        re.fullmatch(r"ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-bookworm", x) for x in lines
    )
    assert [x for x in lines if x.startswith("FROM")] == [
        "FROM ${PYTHON_IMAGE} AS build", "FROM ${PYTHON_IMAGE}",
    ]  # fmt: skip
    assert "USER 10001:10001" in lines
    assert 'ENTRYPOINT ["tini", "--", "penstock"]' in lines


@pytest.mark.parametrize("name", ["worker", "client"])
def test_images_copy_what_exists_and_is_let_through(name: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    lines = (ROOT / "deploy" / f"Dockerfile.{name}").read_text().splitlines()
    copied = [
        shlex.split(line)[1:-1]
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
    ]
    assert copied
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore
