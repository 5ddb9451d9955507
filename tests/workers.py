"""Real worker processes for tests: started, waited for, killed, and asked for their metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from waiting import is_running, wait_until

from penstock.gpu_worker.launch import Launch
from penstock.shared.local.children import spawn_bound
from penstock.shared.settings import load_settings

START_TIMEOUT_S = 90.0


class WorkerProcess:
    """One worker process, ready to serve."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log: Path) -> None:
        self.process = process
        self.log = log
        wait_until(
            lambda: ready_file.exists() or process.poll() is not None, "ready", START_TIMEOUT_S
        )
        assert process.poll() is None, f"the worker ended:\n{self.log.read_text()}"
        facts = json.loads(ready_file.read_text())
        self.worker_id: str = facts["worker_id"]
        self.metrics_port: int = facts["metrics_port"]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def terminate(self, timeout_s: float = 60) -> int:
        self.process.terminate()
        return self.process.wait(timeout_s)

    def children(self) -> list[int]:
        """Pids of the process's children that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[1]) == self.process.pid and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP request to the worker."""
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels; 0 if it has no sample yet."""
        lines = self.get("/metrics")[1].splitlines()
        full = f"penstock_{name}"
        rows = [line for line in lines if line.split("{")[0].split(" ")[0] == full]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


class WorkerFactory:
    """Starts workers against one server and ends them all."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._redis_url = redis_url
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def engine(self, worker_id: str, **settings: Any) -> WorkerProcess:
        """The processes of :meth:`launch`, ready to serve."""
        process = self.launch(worker_id, **settings)
        return WorkerProcess(process, self._ready_file(worker_id), self._log(worker_id))

    def launch(self, worker_id: str, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a worker without a supervisor, as on a machine that is lost as a whole.

        Settings are given as ``section__name=value``.
        """
        flags = {name.replace("__", "."): value for name, value in settings.items()}
        defaults = {
            "redis.url": self._redis_url,
            "worker.metrics_port": 0,
            "engine.threads": 1,
            "engine.kv_memory": "32MiB",
        }
        line = Launch(
            load_settings({**defaults, **flags}), worker_id, self._ready_file(worker_id)
        ).to_line()
        with self._log(worker_id).open("wb") as out:
            process = spawn_bound(
                [sys.executable, "-m", "penstock.gpu_worker.edge"],
                stdin=subprocess.PIPE,
                stderr=out,
            )
        self._started.append(process)
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.close()
        return process

    def command(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """``penstock worker`` as a user starts it: a supervisor and its engine process."""
        with self._log(name).open("wb") as out:
            process = spawn_bound(
                [sys.executable, "-m", "penstock.gpu_worker", "worker", *arguments],
                stderr=out,
                env={**os.environ, "REDIS_URL": self._redis_url, **environment},
            )
        self._started.append(process)
        return process

    def supervised(self, name: str, *arguments: str, **environment: str) -> WorkerProcess:
        """The same, ready to serve."""
        ready = self._ready_file(name)
        defaults = ("--threads", "1", "--kv-memory", "32MiB", "--metrics-port", "0")
        process = self.command(
            name, *defaults, "--ready-file", str(ready), *arguments, **environment
        )
        return WorkerProcess(process, ready, self._log(name))

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(60)
