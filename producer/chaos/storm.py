"""A storm: requests without pause, faults at random times, and a look at every request's end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError, RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.operations import Operations

from ..client import Producer
from ..link import Link
from .faults import FaultMaker
from .fleet import Fleet
from .ledger import Invariant, Ledger
from .options import StormOptions, storm_settings, worker_arguments, worker_environment
from .proxy import Proxy
from .recount import recount
from .run_case import CaseRunner
from .schedule import Fault, draw_schedule
from .server import OwnServer, Server, given_server, through
from .workload import Oracle, RecordedOracle, SyntheticOracle, Workload

__all__ = ["Storm", "StormResult"]

_RECOUNT_EVERY_S = 1.0
_SETTLE_S = 90.0
_OUTAGE_S = 60.0


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


@dataclass
class _Parts:
    """Everything that runs during a storm."""

    server: Server
    keys: Keys
    workers_proxy: Proxy
    clients_proxy: Proxy
    slow_proxy: Proxy
    fleet: Fleet
    client: Producer
    slow_client: Producer
    link: Link
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


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
        self._began = 0.0
        self._submitted = 0

    async def run(self) -> StormResult:
        """Run it to its end. Whatever happens, nothing it started is left.

        Raises:
            ConfigurationError: the server is not on loopback.
            RedisUnavailable: there is no server.
            PenstockError: workers do not start.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
            async with self._open(Path(name)) as parts:
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
                await self._settle(parts)
                await self._look(parts)
        return StormResult(self._options, self._ledger, maker.figures(), time.monotonic() - began)

    # -- putting together ------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _open(self, folder: Path) -> AsyncIterator[_Parts]:
        options = self._options
        async with contextlib.AsyncExitStack() as stack:
            server: Server
            if options.redis is None:
                server = await stack.enter_async_context(OwnServer(folder / "redis"))
            else:
                server = await stack.enter_async_context(given_server(options.redis))
            if Fault.SLOW_READERS in options.faults:
                await server.limit_subscribers()
            workers_proxy, clients_proxy, slow_proxy = [
                await stack.enter_async_context(Proxy(server.host, server.port, narrow=narrow))
                for narrow in (False, False, True)
            ]
            settings = storm_settings(options)
            fleet = Fleet(
                options.workers,
                worker_arguments(settings),
                worker_environment(settings, through(server.url, workers_proxy.port)),
                folder / "workers",
            )
            await stack.enter_async_context(fleet)
            client, slow_client = [
                Producer(through(server.url, proxy.port), settings=settings, outage_s=_OUTAGE_S)
                for proxy in (clients_proxy, slow_proxy)
            ]
            stack.push_async_callback(client.aclose)
            stack.push_async_callback(slow_client.aclose)
            link = Link(server.url, socket_timeout_s=2.0, outage_s=_OUTAGE_S)
            stack.push_async_callback(link.aclose)
            keys = Keys(settings.queue.model, settings.queue.shard)
            if options.redis is not None:
                stack.push_async_callback(_remove_keys, link, keys)
            yield _Parts(
                server=server,
                keys=keys,
                workers_proxy=workers_proxy,
                clients_proxy=clients_proxy,
                slow_proxy=slow_proxy,
                fleet=fleet,
                client=client,
                slow_client=slow_client,
                link=link,
            )

    async def _prepare(self, parts: _Parts) -> Oracle:
        """The right outputs: by function, or read from workers that nothing is done to."""
        options = self._options
        if options.model == "synthetic":
            return SyntheticOracle(options.tokens)
        oracle = RecordedOracle(options.tokens)
        self._show("recording undisturbed outputs", 0, 0)
        await oracle.record(parts.client)
        return oracle

    # -- the storm -------------------------------------------------------------------------------

    async def _rage(self, parts: _Parts, oracle: Oracle, maker: FaultMaker) -> None:
        options = self._options
        typical_s = options.tokens * 0.7 * options.step_ms / 1000
        workload = Workload(
            oracle, options.seed, typical_s, slow=Fault.SLOW_READERS in options.faults
        )
        runner = CaseRunner(
            parts.client,
            parts.slow_client,
            parts.link,
            parts.keys,
            self._ledger,
            late_ms=lambda: options.lease_ms + 3000 + 2 * int(1000 * maker.longest_outage_s),
        )
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._watch_fleet(parts.fleet)),
                group.create_task(self._recount_often(parts)),
                group.create_task(self._tell(maker)),
            ]
            await asyncio.gather(
                self._load(parts, workload, runner),
                self._hurt(maker),
            )
            await self._wait_for_ends(parts)
            for task in background:
                task.cancel()

    async def _load(self, parts: _Parts, workload: Workload, runner: CaseRunner) -> None:
        places = asyncio.Semaphore(self._options.in_flight)

        async def one(number: int) -> None:
            try:
                await runner.run(workload.case(number))
            except PenstockError as error:
                self._ledger.violated(
                    Invariant.ONE_END, f"c{number}", f"{type(error).__name__}: {error}"
                )
            finally:
                places.release()

        while time.monotonic() - self._began < self._options.seconds:
            await places.acquire()
            task = asyncio.create_task(one(self._submitted), name=f"c{self._submitted}")
            self._submitted += 1
            parts.tasks.add(task)
            task.add_done_callback(parts.tasks.discard)

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

    async def _recount_often(self, parts: _Parts) -> None:
        """Have the server compare its counters with the records, in one atomic script."""
        operations = Operations(parts.link.redis, parts.keys)
        while True:
            await asyncio.sleep(_RECOUNT_EVERY_S)
            with contextlib.suppress(RedisUnavailable, RedisError, OSError):
                _, wrong = await operations.recount()
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

    async def _wait_for_ends(self, parts: _Parts) -> None:
        """Until every request has ended; those that do not are violations."""
        deadline = time.monotonic() + _SETTLE_S
        while parts.tasks and time.monotonic() < deadline:
            await asyncio.wait(parts.tasks, timeout=0.5)
        late = list(parts.tasks)
        for task in late:
            self._ledger.violated(
                Invariant.ONE_END,
                task.get_name(),
                f"is not done {_SETTLE_S:g} s after the last fault",
            )
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    # -- after the storm -------------------------------------------------------------------------

    async def _settle(self, parts: _Parts) -> None:
        """Let the leases of lost workers end, then send the others home."""
        self._show("the last requests have ended; sending the workers home", 0, 0)
        await parts.fleet.wait_until_ready()
        living = {machine.worker_id for machine in parts.fleet.machines}
        deadline = time.monotonic() + _SETTLE_S
        leases: set[str | None] = set()
        while time.monotonic() < deadline:
            names = await parts.link.redis.zrange(parts.keys.leases, 0, -1)
            leases = {name.decode() for name in names}
            if leases <= living:
                break
            await asyncio.sleep(0.05)
        for name in leases - living:
            self._ledger.violated(Invariant.COUNTERS, str(name), "is gone and keeps its lease")
        await parts.fleet.finish()

    async def _look(self, parts: _Parts) -> None:
        self._show("recounting", 0, 0)
        await recount(
            parts.link.redis, parts.keys, self._ledger, exclusive=self._options.redis is None
        )
        for complaint in parts.fleet.complaints:
            self._ledger.violated(Invariant.WORKERS_SOUND, "fleet", complaint)
        for crash in parts.fleet.crashes():
            self._ledger.violated(Invariant.WORKERS_SOUND, "fleet", crash)


async def _remove_keys(link: Link, keys: Keys) -> None:
    names = [name async for name in link.redis.scan_iter(match=_literal(keys.prefix) + "*")]
    for at in range(0, len(names), 500):
        await link.redis.unlink(*names[at : at + 500])


def _literal(prefix: str) -> str:
    """A prefix as a pattern: braces mean themselves."""
    return "".join(f"\\{c}" if c in "*?[]\\{}" else c for c in prefix)
