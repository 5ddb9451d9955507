"""A running gateway for tests: its process, its address, and clients of it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from gateway.openai_forms import check_event
from waiting import wait_until

from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import environment_name

START_TIMEOUT_S = 90.0


class GatewayProcess:
    """``penstock gateway`` on a free port, ready to serve.

    Settings are given as ``section__name=value``. With ``ready=False`` nothing is waited for, and
    the port must be given.
    """

    def __init__(
        self, redis_url: str, log: Path, *flags: str, ready: bool = True, **settings: object
    ) -> None:
        given = {"redis.url": redis_url, "gateway.port": "0"}
        given["batches.storage"] = str(log.parent / "files")
        given |= {name.replace("__", "."): str(value) for name, value in settings.items()}
        environment = {environment_name(name): value for name, value in given.items()}
        self.log = log
        with log.open("wb") as out:
            self.process = spawn_bound(
                [sys.executable, "-m", "penstock.producer.cli", "gateway", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )
        port = given["gateway.port"]
        self.url = self._wait_for_url() if ready else f"http://127.0.0.1:{port}"

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                if line.startswith("gateway: "):
                    return line.split()[1].removesuffix("/v1")
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"no gateway after {START_TIMEOUT_S} s: {self.log.read_text()}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: object) -> openai.OpenAI:
        """OpenAI's own client, strict about what it gets."""
        values = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(values | options))  # type: ignore[arg-type]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def terminate(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@dataclass(frozen=True)
class Event:
    """One server-sent event: its id, and its data as JSON or ``[DONE]``."""

    id: int | None
    data: Any

    @property
    def text(self) -> str:
        """What it adds to the first choice of a completion or of chat."""
        if self.data == "[DONE]" or not self.data["choices"]:
            return ""
        choice = self.data["choices"][0]
        return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def events(response: httpx.Response) -> Iterator[Event]:
    """The events of a response that is being read, each checked; comments are skipped."""
    number: int | None = None
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            data = line[6:]
            if data != "[DONE]":
                data = json.loads(data)
                check_event(data)
            yield Event(number, data)
            number = None


def trickle(connection: socket.socket) -> bytes:
    """The error that a request gets before its body came.

    It announces the end of the connection, and bytes of the body do not put that off.
    """
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(1 << 16)
    assert b"\r\nconnection: close\r\n" in answer

    def is_over() -> bool:
        try:
            connection.send(b"1")
            return bool(select.select([connection], [], [], 0.1)[0]) and not connection.recv(1)
        except (BrokenPipeError, ConnectionResetError):
            return True

    wait_until(is_over, "the end of the connection")
    return answer
