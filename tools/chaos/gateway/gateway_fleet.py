"""Gateway processes that are killed and started again on their ports."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.shared.local.children import spawn_bound

__all__ = ["GatewayFleet"]

_PAUSE_S = (0.1, 1.0)


class GatewayFleet:
    """A number of gateways, each on a port of its own.

    Args:
        size: how many.
        url: address of Redis.
        folder: for their logs.

    Attributes:
        ports: where they listen while they run.
        kills: how many were killed.
    """

    def __init__(self, size: int, url: str, folder: Path) -> None:
        self.ports = [_free_port() for _ in range(size)]
        self.kills = 0
        self._folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if name[:9] != "PENSTOCK_"},
            "REDIS_URL": url,
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._processes = [self._start(port) for port in self.ports]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    async def kill(self, rng: random.Random) -> None:
        """Kill one (-9), and start it again after a pause."""
        number = rng.randrange(len(self.ports))
        process = self._processes[number]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        self._processes[number] = self._start(self.ports[number])

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        with (self._folder / f"{port}.log").open("ab") as log:
            return spawn_bound(
                [sys.executable, "-m", "penstock.producer.cli", "gateway", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
