"""``make deploy-test``: the images and the compose file, really run.

Needs a Docker engine. ``PENSTOCK_DEPLOY_BUILD`` holds options for ``docker build``, such as
``--network=host``; ``off`` takes the images that are there.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "penstock-deploy-test"
GATEWAY_PORT, REDIS_PORT = "18000", "16379"
STREAMS, TOKENS = 12, 400

pytestmark = pytest.mark.slow


def run(*command: str, timeout_s: float = 600, check: bool = True) -> str:
    environment = {
        **os.environ, "GATEWAY_PORT": GATEWAY_PORT, "REDIS_PORT": REDIS_PORT,
        "DOCKER_BUILDKIT": "1", "COMPOSE_PROJECT_NAME": PROJECT,
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{shlex.join(command)}:\n{done.stderr[-3000:]}"
    return done.stdout


def docker_program() -> str:
    """A Docker program with an engine; the test is skipped where there is none."""
    for program in ("docker", "/usr/bin/docker"):
        if shutil.which(program):
            run_ = subprocess.run([program, "info"], capture_output=True, check=False, timeout=30)
            if run_.returncode == 0:
                return program
    pytest.skip("no Docker engine here: neither docker nor its engine answers `docker info`")


def compose_program(docker: str) -> list[str]:
    plugin = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return [docker, "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("no docker compose here: apt-get install docker-compose")


class Deployment:
    """The compose project."""

    def __init__(self, docker: str) -> None:
        self.docker = docker
        self.compose_command = compose_program(docker)
        self.kills = 0

    def compose(self, *arguments: str, check: bool = True) -> str:
        return run(*self.compose_command, *arguments, check=check)

    def build(self) -> None:
        options = shlex.split(os.environ.get("PENSTOCK_DEPLOY_BUILD", ""))
        if options == ["off"]:
            return
        for name in ("client", "worker"):
            run(
                self.docker, "build", *options, "--tag", f"penstock-{name}:0.1.0",
                "--file", f"deploy/Dockerfile.{name}", ".", timeout_s=900,
            )  # fmt: skip

    def scale(self, workers: int) -> None:
        self.compose("up", "--detach", "--no-build", "--scale", f"gpu_worker={workers}")
        wait_until(lambda: self.healthy("gpu_worker") == workers, f"{workers} workers", 420)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--quiet", service).split()

    def healthy(self, service: str) -> int:
        form = "{{.State.Health.Status}}"
        ids = self.containers(service)
        states = [run(self.docker, "inspect", "--format", form, one, check=False) for one in ids]
        return sum(state.strip() == "healthy" for state in states)

    def kill_worker(self) -> None:
        run(self.docker, "kill", "--signal", "KILL", self.containers("gpu_worker")[0])
        self.kills += 1

    def in_gateway(self, *command: str) -> str:
        return run(self.docker, "exec", self.containers("gateway")[0], *command)

    def attempts(self, read: Read) -> int:
        """How many workers a stream's request has had."""
        found = json.loads(self.in_gateway("penstock", "result", read.id, "--json"))
        return int(found["usage"]["attempts"])

    def inspect(self, service: str, form: str) -> str:
        return run(self.docker, "inspect", "--format", form, self.containers(service)[0]).strip()

    def size_mb(self, image: str) -> int:
        return int(run(self.docker, "image", "inspect", "--format", "{{.Size}}", image)) // 10**6


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    deployment = Deployment(docker_program())
    deployment.build()
    try:
        deployment.scale(3)
        wait_until(lambda: deployment.healthy("gateway") == 1, "the gateway", 60)
        yield deployment
    finally:
        deployment.compose("down", "--volumes", "--timeout", "5", check=False)


def ask(key: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(
        f"http://127.0.0.1:{GATEWAY_PORT}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )


@dataclass(frozen=True)
class Read:
    """A stream as its client saw it: the text, the last event, and when that came."""

    id: str
    text: str
    end: str
    ended_at: float


def read_stream(key: str, seed: int, begun: list[int]) -> Read:
    """Read a stream; its seed is added to ``begun`` once it has text."""
    body = {
        "model": "demo", "prompt": "The list type", "max_tokens": TOKENS, "seed": seed,
        "temperature": 0.7, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, last = "", ""
    name = ""
    with urllib.request.urlopen(ask(key, body), timeout=120) as reply:
        name = reply.headers["x-request-id"]
        for line in reply:
            if line.startswith(b"data: "):
                last = line.removeprefix(b"data: ").decode().strip()
                if last != "[DONE]":
                    choices = json.loads(last)["choices"]
                    text += choices[0]["text"] if choices else ""
                    if text and seed not in begun:
                        begun.append(seed)
    return Read(name, text, last, time.monotonic())


def test_nothing_is_lost_whatever_is_killed_scaled_or_restarted(deployment: Deployment) -> None:
    began = time.monotonic()
    key = deployment.in_gateway("cat", "/secrets/api_key").strip()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(ask("wrong", {"model": "demo", "prompt": "x"}), timeout=10)
    assert refused.value.code == 401
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:

        def storm() -> list[concurrent.futures.Future[Read]]:
            """Streams that all run."""
            begun: list[int] = []
            streams = [pool.submit(read_stream, key, seed, begun) for seed in range(STREAMS)]
            wait_until(lambda: len(begun) == STREAMS, "text of every stream", 120)
            return streams

        undisturbed = [future.result() for future in storm()]
        rounds, over_at = [], []
        for disturb in (
            deployment.kill_worker,
            lambda: deployment.scale(1),
            lambda: deployment.scale(4),
            lambda: deployment.compose("restart", "redis"),
        ):
            streams = storm()
            disturb()
            over_at.append(time.monotonic())
            rounds.append([future.result() for future in streams])
    lost = sum(answer.end != "[DONE]" for answers in rounds for answer in answers)
    changed = sum(
        answer.text != same.text
        for answers in rounds
        for answer, same in zip(answers, undisturbed, strict=True)
    )
    requests = STREAMS * (1 + len(rounds))
    sizes = {name: deployment.size_mb(f"penstock-{name}:0.1.0") for name in ("client", "worker")}
    print(
        f"\nimages: client {sizes['client']} MB, worker {sizes['worker']} MB; "
        f"{requests} requests, {requests * TOKENS} tokens, {deployment.kills} kills, "
        f"3 -> 1 -> 4 workers, 1 restart of Redis; {lost} lost, {changed} changed; "
        f"{time.monotonic() - began:.0f} s"
    )
    assert all(answer.end == "[DONE]" for answer in undisturbed)
    assert (lost, changed) == (0, 0)
    assert max(map(deployment.attempts, rounds[0])) > 1, "the kill hit no running stream"
    # They had begun before, and none goes on while Redis is away.
    assert max(answer.ended_at for answer in rounds[3]) > over_at[3], "nor did the restart"


def test_containers_have_no_rights(deployment: Deployment) -> None:
    for service in ("redis", "gateway", "gpu_worker"):
        assert deployment.inspect(service, "{{.HostConfig.ReadonlyRootfs}}") == "true"
        assert deployment.inspect(service, "{{.Config.User}}") not in ("", "0", "root")
        assert deployment.inspect(service, "{{.HostConfig.CapDrop}}") == "[ALL]"
        for secret in ("requirepass ", deployment.in_gateway("cat", "/secrets/api_key").strip()):
            assert secret not in deployment.inspect(service, "{{json .Config.Env}}")
    password = deployment.in_gateway("cat", "/redis-secret/password").strip()
    assert len(password) == 32
    arguments = run(deployment.docker, "top", deployment.containers("redis")[0])
    assert password not in arguments
    for service in ("redis", "gpu_worker"):  # Redis' password is all that they see
        container = deployment.containers(service)[0]
        found = run(deployment.docker, "exec", container, "sh", "-c", "ls /secrets /redis-secret/*",
                    check=False)  # fmt: skip
        assert found.split() == ["/redis-secret/password"]
    first = deployment.in_gateway("cat", "/proc/1/comm").strip()
    assert first == "tini"
