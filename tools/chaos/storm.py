"""A storm: requests without pause, faults at random times, and a look at every request's end."""

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
from penstock.shared.scripts.operations import Operations

from .checks.final_checks import look, send_home
from .checks.storm_counts import Invariant, Ledger
from .checks.sweep_times import SweepWatch
from .environment import Parts, open_parts
from .faults.fault_schedule import Fault, draw_schedule
from .faults.injector import FaultMaker
from .faults.worker_fleet import Fleet
from .options import StormOptions
from .run_case import CaseRunner
from .storm_requests import Oracle, RecordedOracle, SyntheticOracle, Workload
from .tasks import end_tasks

__all__ = ["Storm", "StormResult"]

_RECOUNT_EVERY_S = 1.0
_SETTLE_S = 90.0
_SWEEP_MS = 1000
"""For those after it: each ends its share of many that are overdue at once."""


@dataclass(frozen=True, slots=True)
class StormResult:
    """What came of it.

    Attributes:
        options: what was asked for.
        ledger: requests counted, violations found.
        counts: faults that happened, by name.
        seconds: how long it took, with its end.
    """

    options: StormOptions
    ledger: Ledger
    counts: dict[str, float]
    seconds: float


class Storm:
    """Puts the parts together, lets them loose, and looks at what is left.

    Args:
        options: what it is to be.
        show: told a few times per second how it goes: in words, seconds gone, and seconds in all.
    """

    def __init__(
        self,
        options: StormOptions,
        show: Callable[[str, int, int], None] = lambda words, done, total: None,  # noqa: ARG005
    ) -> None:
        self._options = options
        self._show = show
        self._ledger = Ledger()
        self._sweeps = SweepWatch()
        self._began = 0.0
        self._submitted = 0
        self._cases: set[asyncio.Task[None]] = set()

    async def run(self) -> StormResult:
        """Run it to its end. Whatever happens, nothing it started is left.

        Raises:
            ConfigurationError: the server is not on loopback.
            RedisUnavailable: there is no server.
            PenstockError: workers do not start.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
            async with open_parts(self._options, Path(name)) as parts:
                oracle = await self._prepare(parts)
                maker = FaultMaker(
                    parts.server,
                    parts.fleet,
                    parts.workers_proxy,
                    parts.clients_proxy,
                    parts.slow_proxy,
                    lease_s=self._options.lease_ms / 1000,
                )
                await self._rage(parts, oracle, maker)
                self._show("the last requests have ended; sending the workers home", 0, 0)
                await send_home(parts, self._ledger)
                self._show("recounting", 0, 0)
                await look(parts, self._ledger, exclusive=self._options.redis is None)
        return StormResult(self._options, self._ledger, maker.figures(), time.monotonic() - began)

    async def _prepare(self, parts: Parts) -> Oracle:
        """The right outputs: by function, or read from workers that nothing is done to."""
        options = self._options
        if options.model == "synthetic":
            return SyntheticOracle(options.tokens)
        oracle = RecordedOracle(options.tokens)
        self._show("recording undisturbed outputs", 0, 0)
        await oracle.record(parts.client, self._ledger)
        return oracle

    # -- the storm -------------------------------------------------------------------------------

    async def _rage(self, parts: Parts, oracle: Oracle, maker: FaultMaker) -> None:
        options = self._options
        typical_s = options.tokens * 0.7 * options.step_ms / 1000
        workload = Workload(
            oracle, options.seed, typical_s, slow=Fault.SLOW_READERS in options.faults
        )
        runner = CaseRunner(
            parts,
            self._ledger,
            ends_by=self._ends_by,
        )
        self._began = time.monotonic()
        try:
            await self._run_tasks(parts, workload, runner, maker)
        except ExceptionGroup as group:
            raise _causes(group)[0] from None
        finally:
            for task in self._cases:
                task.cancel()

    def _ends_by(self, due_ms: int) -> int | None:
        """Until when a request may end: a deadline is kept by the next sweep after it."""
        self._ledger.longest_sweep_pause_ms = int(1000 * self._sweeps.longest_pause_s)
        swept_ms = self._sweeps.next_after(due_ms)
        return None if swept_ms is None else swept_ms + _SWEEP_MS

    async def _run_tasks(
        self, parts: Parts, workload: Workload, runner: CaseRunner, maker: FaultMaker
    ) -> None:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._watch_fleet(parts.fleet)),
                group.create_task(self._sweeps.run(parts)),
                group.create_task(self._recount_often(parts)),
                group.create_task(self._tell(maker)),
            ]
            await asyncio.gather(
                self._load(workload, runner),
                self._hurt(maker),
            )
            await self._wait_for_ends()
            await end_tasks(background)

    async def _load(self, workload: Workload, runner: CaseRunner) -> None:
        places = asyncio.Semaphore(self._options.in_flight)

        async def one(number: int) -> None:
            try:
                await runner.run(workload.case(number))
            except Exception as error:  # whatever it is, the client should have dealt with it
                for cause in _causes(error):
                    self._ledger.violated(
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

    async def _hurt(self, maker: FaultMaker) -> None:
        options = self._options
        for event in draw_schedule(
            options.seed, options.seconds, options.faults, pace=options.pace
        ):
            await asyncio.sleep(max(0.0, self._began + event.at_s - time.monotonic()))
            await maker.make(event.fault, random.Random(event.seed))
        await maker.finish()

    async def _watch_fleet(self, fleet: Fleet) -> None:
        while True:
            fleet.replace_ended()
            await asyncio.sleep(0.1)

    async def _recount_often(self, parts: Parts) -> None:
        """Have the server compare its counters with the records, in one atomic script."""
        operations = Operations(parts.link.redis, parts.keys)
        while True:
            await asyncio.sleep(_RECOUNT_EVERY_S)
            with contextlib.suppress(RedisUnavailable, RedisError, OSError):
                _, wrong = await operations.rebuild_counters()
                self._ledger.counts["recounts"] += 1
                if wrong:
                    self._ledger.violated(
                        Invariant.COUNTERS, "counters", f"{wrong} of them were wrong in the storm"
                    )

    async def _tell(self, maker: FaultMaker) -> None:
        while True:
            counts = self._ledger.counts
            self._show(
                f"{counts['requests']} requests ended, {counts['migrated']} migrated, "
                f"{maker.total} faults, {sum(self._ledger.found.values())} violations",
                int(time.monotonic() - self._began),
                int(self._options.seconds),
            )
            await asyncio.sleep(0.25)

    async def _wait_for_ends(self) -> None:
        """Until every request has ended; those that do not are violations."""
        deadline = time.monotonic() + _SETTLE_S
        while self._cases and time.monotonic() < deadline:
            await asyncio.wait(self._cases, timeout=0.5)
        late = list(self._cases)
        for task in late:
            self._ledger.violated(
                Invariant.ONE_END,
                task.get_name(),
                f"is not done {_SETTLE_S:g} s after the last fault",
            )
        await end_tasks(late)


def _causes(error: Exception) -> list[Exception]:
    """The errors a group consists of; the error itself if it is no group."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [cause for part in error.exceptions for cause in _causes(part)]
