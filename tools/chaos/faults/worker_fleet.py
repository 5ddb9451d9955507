"""The workers of a storm: real ones, each a supervisor with its edge and engine processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.errors import PenstockError
from penstock.shared.local.children import spawn_bound

from .process_table import children, identity, is_running

__all__ = ["Fleet", "FleetCounts", "Machine", "find_crashes"]

_READY_TIMEOUT_S = 120.0
_DRAIN_TIMEOUT_S = 30.0
_EARLY_ENDS = 25
"""After this many consecutive unexpected exits the fleet gives up."""

_KILLS_PER_MACHINE = 2
"""A supervisor waits longer after each death of its child; after this many it is replaced."""


@dataclass
class FleetCounts:
    """Counts of what happened to workers.

    Attributes:
        engine_kills: edge and engine processes killed under a living supervisor.
        machine_kills: supervisors killed, together with their engines.
        stops: machines stopped for longer than their lease, and continued.
        drains: machines ended with SIGTERM and replaced.
        restarts: machines that exited by themselves and were replaced.
        slowest_drain_s: longest time from SIGTERM to the exit.
    """

    engine_kills: int = 0
    machine_kills: int = 0
    stops: int = 0
    drains: int = 0
    restarts: int = 0
    slowest_drain_s: float = 0.0


@dataclass(eq=False)
class Machine:
    """A supervisor with its edge and engine processes.

    Attributes:
        name: unique in the storm.
        process: the supervisor.
        ready_file: exists while its engine serves.
        log: output of all its processes.
        stopped: its processes are stopped.
        leaving: it is being ended.
        kills: number of kills of its edge or engine.
    """

    name: str
    process: subprocess.Popen[bytes]
    ready_file: Path
    log: Path
    stopped: bool = False
    leaving: bool = False
    kills: int = 0
    pids: set[tuple[int, str]] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        """Whether its engine serves and no fault affects it."""
        return (
            not (self.stopped or self.leaving)
            and self.ready_file.exists()
            and self.process.poll() is None
        )

    @property
    def worker_id(self) -> str | None:
        """The worker id of its present engine."""
        try:
            worker_id: str = json.loads(self.ready_file.read_text())["worker_id"]
        except (OSError, ValueError):
            return None
        return worker_id

    def processes(self) -> list[int]:
        """Process ids of its edge and engine that run now."""
        edges = children(self.process.pid)
        found = edges + [engine for edge in edges for engine in children(edge)]
        self.pids |= {identity(pid) for pid in found}
        return found


class Fleet:
    """A number of machines, each replaced when it has ended.

    Args:
        size: number of machines.
        arguments: of ``penstock worker``.
        environment: settings for it, on top of this process's environment without settings.
        folder: for logs and ready files.
    """

    def __init__(
        self, size: int, arguments: list[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._size = size
        self._arguments = arguments
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PENSTOCK_") and name != "REDIS_URL"
        }
        self._environment = {**inherited, **environment}
        self._folder = folder
        self._started = 0
        self._early_ends = 0  # since a machine became ready for the first time
        self._have_served: set[str] = set()
        self._all: list[Machine] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.machines: list[Machine] = []
        self.counts = FleetCounts()
        self.complaints: list[str] = []

    async def __aenter__(self) -> Fleet:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self.machines = [self._start() for _ in range(self._size)]
            await self.wait_until_ready()
        except BaseException:
            await self._end_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_all()

    async def wait_until_ready(self) -> None:
        """Wait until every machine serves.

        Raises:
            PenstockError: a machine does not become ready.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not all(machine.ready for machine in self.machines):
            self.replace_ended()
            if time.monotonic() > deadline:
                late = next(machine for machine in self.machines if not machine.ready)
                raise PenstockError(
                    f"worker {late.name} is not ready after {_READY_TIMEOUT_S:g} s; "
                    f"it last said: {_tail(late.log)}"
                )
            await asyncio.sleep(0.02)

    def replace_ended(self) -> None:
        """Start a new machine for each that exited by itself.

        Raises:
            PenstockError: it happens repeatedly.
        """
        for machine in list(self.machines):
            if machine.leaving or machine.process.poll() is None:
                continue
            self.counts.restarts += 1
            self._early_ends += 1
            if self._early_ends > _EARLY_ENDS:
                raise PenstockError(f"workers end by themselves; the last: {_tail(machine.log)}")
            self._replace(machine)
        ready = {machine.name for machine in self.machines if machine.ready}
        if ready - self._have_served:
            self._early_ends = 0
        self._have_served |= ready

    def pick(self, rng: random.Random, *, leave: int = 1) -> Machine | None:
        """A ready machine; None if at most ``leave`` are ready."""
        ready = [machine for machine in self.machines if machine.ready]
        return rng.choice(ready) if len(ready) > leave else None

    # -- what can be done to one -----------------------------------------------------------------

    def kill(self, machine: Machine) -> bool:
        """Kill its edge and its engine in turn; its supervisor restarts both.

        Returns False if neither runs now.
        """
        if machine.kills >= _KILLS_PER_MACHINE:
            self.kill_machine(machine)
            return True
        found = machine.processes()
        if not found or not _signal(found[machine.kills % len(found)], signal.SIGKILL):
            return False
        machine.ready_file.unlink(missing_ok=True)
        machine.kills += 1
        self.counts.engine_kills += 1
        return True

    def kill_machine(self, machine: Machine) -> None:
        """Kill its supervisor, and thereby its engine; a new machine replaces it."""
        machine.processes()
        machine.leaving = True
        machine.process.kill()
        self.counts.machine_kills += 1
        self._replace(machine)

    def stop(self, machine: Machine, seconds: float) -> bool:
        """Stop its edge and its engine for a while. False if neither runs now."""
        if not [pid for pid in machine.processes() if _signal(pid, signal.SIGSTOP)]:
            return False
        machine.stopped = True
        self.counts.stops += 1
        self._run(self._continue(machine, seconds))
        return True

    def drain(self, machine: Machine) -> None:
        """End it as a rolling restart does; a new machine replaces it."""
        machine.processes()
        machine.leaving = True
        self.counts.drains += 1
        machine.process.terminate()
        self._run(self._wait_for_exit(machine))
        self._replace(machine)

    async def finish(self) -> None:
        """End every machine with SIGTERM, and check that no process is left."""
        for task in list(self._tasks):
            await task
        for machine in self.machines:
            machine.processes()
            machine.leaving = True
            machine.process.terminate()
        await asyncio.gather(*(self._wait_for_exit(machine) for machine in self.machines))
        self.machines = []
        self.complaints += [
            f"process {pid} of {machine.name} still runs"
            for machine in self._all
            for pid, start in machine.pids | {identity(machine.process.pid)}
            if is_running(pid) and identity(pid) == (pid, start)
        ]

    def crashes(self) -> list[str]:
        """Unexpected exits and errors in the workers' logs."""
        return [
            f"{machine.name}: {complaint}"
            for machine in self._all
            for complaint in find_crashes(machine.log.read_text(errors="replace").splitlines())
        ]

    # -- inside ----------------------------------------------------------------------------------

    def _start(self) -> Machine:
        self._started += 1
        name = f"w{self._started}"
        ready, log = self._folder / f"{name}.ready", self._folder / f"{name}.log"
        argv = [sys.executable, "-m", "penstock.gpu_worker", "worker", *self._arguments]
        with log.open("wb") as out:
            process = spawn_bound(
                [*argv, "--ready-file", str(ready)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self._environment, "PENSTOCK_WORKER__NAME": name},
                cwd=self._folder,  # no settings file of the user's
                new_session=True,
            )
        machine = Machine(name, process, ready, log)
        self._all.append(machine)
        return machine

    def _replace(self, machine: Machine) -> None:
        self.machines[self.machines.index(machine)] = self._start()

    async def _continue(self, machine: Machine, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in machine.processes():
                _signal(pid, signal.SIGCONT)
            machine.stopped = False

    async def _wait_for_exit(self, machine: Machine) -> None:
        began = time.monotonic()
        while machine.process.poll() is None:
            if time.monotonic() - began > _DRAIN_TIMEOUT_S:
                machine.process.kill()
                self.complaints.append(
                    f"{machine.name} did not end within {_DRAIN_TIMEOUT_S:g} s of SIGTERM; "
                    f"it last said: {_tail(machine.log)}"
                )
                return
            await asyncio.sleep(0.01)
        self.counts.slowest_drain_s = max(self.counts.slowest_drain_s, time.monotonic() - began)
        if machine.process.returncode != 0:
            self.complaints.append(
                f"{machine.name} ended with {machine.process.returncode} after SIGTERM; "
                f"it last said: {_tail(machine.log)}"
            )

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for machine in self._all:
            if machine.process.poll() is None:
                machine.process.kill()
        for machine in self._all:
            machine.process.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(nothing)"


def find_crashes(lines: list[str]) -> list[str]:
    """Exits of the edge process other than SIGKILL, and the last line of each traceback.

    The edge exits as its engine does, so its exit covers both.
    """
    found = []
    frame: str | None = None
    for line in lines:
        text = line.lstrip(" |+-")  # the margin of exception groups
        if "Traceback (most recent call last)" in text:
            frame = ""
        elif frame is not None and text.startswith("File "):
            frame = text  # the last one is nearest to the cause
        elif frame and text and line.rstrip() == text:
            found.append(f"{text} ({frame})")
            frame = None
        if "edge process ended (" in line and "SIGKILL" not in line:
            found.append(line)
    return found


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
