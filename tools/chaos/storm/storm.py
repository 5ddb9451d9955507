"""A storm: requests without pause, faults at random times, and a check of each request's end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.tasks import end_tasks
from penstock.shared.scripts.operations import Operations

from ..checks.final_checks import check_end_state, drain_workers
from ..checks.storm_counts import Findings, Invariant
from ..checks.sweep_times import SweepWatch
from ..environment import Environment, OpenServer, open_environment
from ..faults.fault_schedule import Fault, draw_schedule
from ..faults.injector import FaultInjector
from ..faults.storm_server import OwnServer
from ..faults.worker_fleet import Fleet
from ..options import StormOptions
from .run_case import CaseRunner
from .storm_requests import Oracle, RecordedOracle, SyntheticOracle, Workload

__all__ = ["Storm", "StormResult"]

_RECOUNT_EVERY_S = 1.0
_SETTLE_S = 90.0
_SWEEP_MS = 1000
"""Margin for further sweeps: one sweep ends a bounded number of overdue requests."""


@dataclass(frozen=True, slots=True)
class StormResult:
    """The outcome of a storm.

    Attributes:
        options: what was asked for.
        findings: requests counted, violations found.
        counts: faults that happened, by name.
        seconds: how long it took, final checks included.
    """

    options: StormOptions
    findings: Findings
    counts: dict[str, float]
    seconds: float


class Storm:
    """Runs requests and faults side by side, and checks what is left.

    Args:
        options: of the storm.
        show: called a few times per second with words, seconds passed and seconds in all.
        open_server: makes the storm's own server in a folder, if no server is given.
    """

    def __init__(
        self,
        options: StormOptions,
        show: Callable[[str, int, int], None] = lambda words, done, total: None,  # noqa: ARG005
        open_server: OpenServer = OwnServer,
    ) -> None:
        self._options = options
        self._open_server = open_server
        self._show = show
        self._findings = Findings()
        self._sweeps = SweepWatch()
        self._began = 0.0
        self._submitted = 0
        self._cases: set[asyncio.Task[None]] = set()

    async def run(self) -> StormResult:
        """Run the storm to its end. Whatever happens, no process of it is left.

        Raises:
            ConfigurationError: the server is not on loopback.
            RedisUnavailable: there is no server.
            PenstockError: workers do not start.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
            async with open_environment(self._options, Path(name), self._open_server) as env:
                oracle = await self._prepare(env)
                injector = FaultInjector(
                    env.server,
                    env.fleet,
                    env.workers_proxy,
                    env.clients_proxy,
                    env.slow_proxy,
                    lease_s=self._options.lease_ms / 1000,
                )
                await self._run_storm(env, oracle, injector)
                self._show("the last requests have ended; sending the workers home", 0, 0)
                await drain_workers(env, self._findings)
                self._show("recounting", 0, 0)
                await check_end_state(env, self._findings, exclusive=self._options.redis is None)
        return StormResult(
            self._options, self._findings, injector.figures(), time.monotonic() - began
        )

    async def _prepare(self, env: Environment) -> Oracle:
        """The right outputs: computed, or recorded from undisturbed workers."""
        options = self._options
        if options.model == "synthetic":
            return SyntheticOracle(options.tokens)
        oracle = RecordedOracle(options.tokens)
        self._show("recording undisturbed outputs", 0, 0)
        await oracle.record(env.client, self._findings)
        return oracle

    # -- the storm -------------------------------------------------------------------------------

    async def _run_storm(self, env: Environment, oracle: Oracle, injector: FaultInjector) -> None:
        options = self._options
        typical_s = options.tokens * 0.7 * options.step_ms / 1000
        workload = Workload(
            oracle, options.seed, typical_s, slow=Fault.SLOW_READERS in options.faults
        )
        runner = CaseRunner(
            env,
            self._findings,
            ends_by=self._ends_by,
        )
        self._began = time.monotonic()
        try:
            await self._run_tasks(env, workload, runner, injector)
        except ExceptionGroup as group:
            raise _causes(group)[0] from None
        finally:
            for task in self._cases:
                task.cancel()

    def _ends_by(self, due_ms: int) -> int | None:
        """The latest end of a request due at a time: the next sweep, and a margin."""
        self._findings.longest_sweep_pause_ms = int(1000 * self._sweeps.longest_pause_s)
        swept_ms = self._sweeps.next_after(due_ms)
        return None if swept_ms is None else swept_ms + _SWEEP_MS

    async def _run_tasks(
        self,
        env: Environment,
        workload: Workload,
        runner: CaseRunner,
        injector: FaultInjector,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._watch_fleet(env.fleet)),
                group.create_task(self._sweeps.run(env)),
                group.create_task(self._recount_often(env)),
                group.create_task(self._show_progress(injector)),
            ]
            await asyncio.gather(
                self._load(workload, runner),
                self._inject(injector),
            )
            await self._wait_for_ends()
            await end_tasks(background)

    async def _load(self, workload: Workload, runner: CaseRunner) -> None:
        places = asyncio.Semaphore(self._options.in_flight)

        async def one(number: int) -> None:
            try:
                await runner.run(workload.case(number))
            except Exception as error:  # the client should have handled it
                for cause in _causes(error):
                    self._findings.violated(
                        Invariant.CLIENTS_SOUND, f"c{number}", f"{type(cause).__name__}: {cause}"
                    )
            finally:
                places.release()

        while time.monotonic() - self._began < self._options.seconds:
            await places.acquire()
            task = asyncio.create_task(one(self._submitted), name=f"c{self._submitted}")
            self._submitted += 1
            self._cases.add(task)
            task.add_done_callback(self._cases.discard)

    async def _inject(self, injector: FaultInjector) -> None:
        options = self._options
        for event in draw_schedule(
            options.seed, options.seconds, options.faults, pace=options.pace
        ):
            await asyncio.sleep(max(0.0, self._began + event.at_s - time.monotonic()))
            await injector.make(event.fault, random.Random(event.seed))
        await injector.finish()

    async def _watch_fleet(self, fleet: Fleet) -> None:
        while True:
            fleet.replace_ended()
            await asyncio.sleep(0.1)

    async def _recount_often(self, env: Environment) -> None:
        """Let the server compare its counters with the records, in one atomic script."""
        operations = Operations(env.direct.redis, env.keys)
        while True:
            await asyncio.sleep(_RECOUNT_EVERY_S)
            with contextlib.suppress(RedisUnavailable, RedisError, OSError):
                _, wrong = await operations.rebuild_counters()
                self._findings.counts["recounts"] += 1
                if wrong:
                    self._findings.violated(
                        Invariant.COUNTERS, "counters", f"{wrong} of them were wrong in the storm"
                    )

    async def _show_progress(self, injector: FaultInjector) -> None:
        while True:
            counts = self._findings.counts
            self._show(
                f"{counts['requests']} requests ended, {counts['migrated']} migrated, "
                f"{injector.total} faults, {sum(self._findings.found.values())} violations",
                int(time.monotonic() - self._began),
                int(self._options.seconds),
            )
            await asyncio.sleep(0.25)

    async def _wait_for_ends(self) -> None:
        """Wait until every request has ended; those that do not are violations."""
        deadline = time.monotonic() + _SETTLE_S
        while self._cases and time.monotonic() < deadline:
            await asyncio.wait(self._cases, timeout=0.5)
        late = list(self._cases)
        for task in late:
            self._findings.violated(
                Invariant.ONE_END,
                task.get_name(),
                f"is not done {_SETTLE_S:g} s after the last fault",
            )
        await end_tasks(late)


def _causes(error: Exception) -> list[Exception]:
    """The errors in a group; the error itself if it is none."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [cause for part in error.exceptions for cause in _causes(part)]
