"""Gateway processes that are killed and started again on their ports."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port

__all__ = ["GatewayFleet"]

_PAUSE_S = (0.1, 1.0)
_READY_TIMEOUT_S = 120.0
_LEAST_LIFE_S = 1.0


class GatewayFleet:
    """A number of gateways, each on a port of its own.

    Args:
        size: how many.
        url: address of Redis.
        folder: for their logs.

    Attributes:
        ports: where they listen while they run.
        kills: how many were killed.
        restarts: how many ended by themselves, for instance since Redis was away at their start,
            and were started again.
    """

    def __init__(self, size: int, url: str, folder: Path) -> None:
        self.ports = [free_port() for _ in range(size)]
        self.kills = 0
        self.restarts = 0
        self._folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if name[:9] != "PENSTOCK_"},
            "REDIS_URL": url,
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_at = [0.0] * size

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._processes = [self._start(number) for number in range(len(self.ports))]
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
        self._processes[number] = self._start(number)

    async def wait_until_ready(self) -> None:
        """Wait until every gateway accepts connections.

        Raises:
            PenstockError: one does not within two minutes.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        for port in self.ports:
            while not await _accepts(port):
                if time.monotonic() > deadline:
                    log = (self._folder / f"{port}.log").read_text(errors="replace")
                    raise PenstockError(
                        f"a gateway is not ready after {_READY_TIMEOUT_S:g} s; it last said: "
                        f"{log[-500:].strip() or '(nothing)'}"
                    )
                self.replace_ended()
                await asyncio.sleep(0.05)

    def replace_ended(self) -> None:
        """Start those again that ended by themselves, at most once a second each."""
        for number, process in enumerate(self._processes):
            lived_s = time.monotonic() - self._started_at[number]
            if process.poll() is not None and lived_s > _LEAST_LIFE_S:
                self.restarts += 1
                self._processes[number] = self._start(number)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        port, self._started_at[number] = self.ports[number], time.monotonic()
        with (self._folder / f"{port}.log").open("ab") as log:
            return spawn_bound(
                [sys.executable, "-m", "penstock.producer.cli", "gateway", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.transport.abort()
    return True
