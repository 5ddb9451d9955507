"""A gateway and a worker without a model, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound

__all__ = ["RunningGateway", "raise_file_limit", "start_gateway", "start_worker"]

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves.

    Attributes:
        pid: of its process.
        port: where it listens.
    """

    pid: int
    port: int

    def memory_kb(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.partition("VmRSS:")[2].split()[0])


@contextlib.asynccontextmanager
async def start_gateway(
    url: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[RunningGateway]:
    """A gateway on a free port.

    Args:
        url: of its Redis server.
        environment: further variables of its environment.

    Raises:
        PenstockError: it does not start.
    """
    command = [sys.executable, "-m", "penstock.producer.cli", "gateway", "--port", "0"]
    process = spawn_bound(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(url) | dict(environment or {}),
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), _PATIENCE_S)
        if not line:
            raise PenstockError("the gateway ended instead of serving")
        address = line.decode().split()[1].removesuffix("/v1")
        yield RunningGateway(process.pid, int(address.rpartition(":")[2]))
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


@contextlib.asynccontextmanager
async def start_worker(url: str, model: str) -> AsyncIterator[None]:
    """A worker that gives tokens by a hash, without pauses.

    Raises:
        PenstockError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "penstock.gpu_worker", "worker", "--model", "synthetic"]
        process = spawn_bound(
            [*command, "--name", model, "--ready-file", str(ready), "--metrics-port", "0"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(url) | {"PENSTOCK_MODEL__SYNTHETIC_STEP_MS": "0"},
        )
        try:
            for _ in range(int(_PATIENCE_S / 0.05)):
                if ready.exists() or process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
            if not ready.exists():
                raise PenstockError("the worker did not start")
            json.loads(ready.read_text(encoding="utf-8"))
            yield
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def _environment(url: str) -> dict[str, str]:
    return os.environ | {
        "REDIS_URL": url,
        "PENSTOCK_REDIS__EMBEDDED": "never",
        "PENSTOCK_QUEUE__TENANT_SHARE": "0",  # all streams are one tenant's
    }


def raise_file_limit() -> None:
    """Let this process and its children open as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
