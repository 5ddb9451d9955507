"""Injects faults, and counts those that happened."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.tasks import end_tasks
from penstock.shared.scripts.script_loader import load_script

from .fault_schedule import Fault
from .storm_server import KillableServer, Server
from .tcp_proxy import Proxy
from .worker_fleet import Fleet

__all__ = ["FaultInjector"]

_RESTART_PAUSE_S = (0.0, 0.6)
_FLUSH_TIMEOUT_S = 5.0

_CUT_SCRIPTS = ("append", "audit", "cancel", "claim", "release", "submit", "sweep")
"""Those that workers and clients run in a storm."""

_PATIENCE_S = 2.0
_MOST_WAITING = 6
"""How long, and how many at a time, faults wait for a worker that can be hurt."""


class FaultInjector:
    """Applies the scheduled faults to workers, connections and Redis.

    Args:
        server: of the storm.
        fleet: the workers.
        workers_proxy: between workers and Redis.
        clients_proxy: between clients and Redis.
        slow_proxy: between slow readers and Redis.
        lease_s: the workers' lease.

    Attributes:
        skipped: faults that had no victim at their time, by kind.
    """

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        workers_proxy: Proxy,
        clients_proxy: Proxy,
        slow_proxy: Proxy,
        *,
        lease_s: float,
    ) -> None:
        self._server = server
        self._fleet = fleet
        self._workers = workers_proxy
        self._clients = clients_proxy
        self._slow = slow_proxy
        self._lease_s = lease_s
        # Over TLS a reply to anything is cut.
        self._digests = (
            [b""]
            if server.encrypted
            else [load_script(name).digest.encode() for name in _CUT_SCRIPTS]
        )
        self._restart: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._done: Counter[str] = Counter()
        self.skipped: Counter[Fault] = Counter()

    @property
    def total(self) -> int:
        """Faults that happened."""
        counts = self._fleet.counts
        return sum(self._done.values()) + counts.engine_kills + counts.machine_kills + counts.stops

    async def make(self, fault: Fault, rng: random.Random) -> None:
        """Inject one fault now, into a randomly chosen victim."""
        happened = False
        if fault in (Fault.KILL, Fault.STOP, Fault.DRAIN):
            happened = len(self._waiting) < _MOST_WAITING
            if happened:
                task = asyncio.create_task(self._hit_worker_when_possible(fault, rng))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
        elif fault is Fault.REDIS_KILL:
            happened = self._kill_server(rng)
        elif fault is Fault.FLUSH:
            happened = await self._flush()
        else:
            happened = self._hit_connections(fault, rng)
        if not happened:
            self.skipped[fault] += 1

    async def finish(self) -> None:
        """Undo what can be undone, and wait until the server is back.

        Raises:
            RedisUnavailable: it did not come back.
        """
        await end_tasks(self._waiting)
        for proxy in (self._workers, self._clients, self._slow):
            proxy.heal()
        if self._restart is not None:
            await self._restart

    def figures(self) -> dict[str, float]:
        """Counts of what happened, by name."""
        counts = self._fleet.counts
        proxies = (self._workers, self._clients, self._slow)
        return {
            "worker_kills": counts.engine_kills + counts.machine_kills,
            "machine_kills": counts.machine_kills,
            "worker_stops": counts.stops,
            "worker_drains": counts.drains,
            "worker_restarts": counts.restarts,
            "slowest_drain_s": round(counts.slowest_drain_s, 3),
            "redis_kills": self._server.kills if isinstance(self._server, KillableServer) else 0,
            "redis_down_s": (
                round(self._server.down_s, 3) if isinstance(self._server, KillableServer) else 0
            ),
            "connection_resets": sum(proxy.resets for proxy in proxies),
            "replies_cut": sum(proxy.cuts for proxy in proxies),
            "half_opens": self._done["half_opens"],
            "late_deliveries": self._done["late"],
            "delays": self._done["delays"],
            "script_flushes": self._done["flushes"],
            "connections_choked": self._done["slow"],
            "slow_reader_cuts": self._slow.server_cuts,
            "faults_skipped": sum(self.skipped.values()),
        }

    # -- kinds -----------------------------------------------------------------------------------

    async def _hit_worker_when_possible(self, fault: Fault, rng: random.Random) -> None:
        """Hit a worker as soon as enough others are ready to continue its work."""
        until = asyncio.get_running_loop().time() + _PATIENCE_S
        while not self._hit_worker(fault, rng):
            if asyncio.get_running_loop().time() > until:
                self.skipped[fault] += 1
                return
            await asyncio.sleep(0.03)

    def _hit_worker(self, fault: Fault, rng: random.Random) -> bool:
        machine = self._fleet.pick(rng)
        if machine is None:
            return False
        if fault is Fault.STOP:
            return self._fleet.stop(machine, self._lease_s * rng.uniform(1.2, 2.0))
        if fault is Fault.DRAIN:
            self._fleet.drain(machine)
            return True
        return self._fleet.kill(machine)

    def _kill_server(self, rng: random.Random) -> bool:
        assert isinstance(self._server, KillableServer)
        if self._restart is not None and not self._restart.done():
            return False
        pause_s = rng.uniform(*_RESTART_PAUSE_S)
        self._restart = asyncio.create_task(self._server.kill_and_restart(pause_s))
        return True

    async def _flush(self) -> bool:
        # Not waited for longer than a storm can bear: the server may be down just now.
        with contextlib.suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._server.command("SCRIPT", "FLUSH")
            self._done["flushes"] += 1
            return True
        return False

    def _hit_connections(self, fault: Fault, rng: random.Random) -> bool:
        if fault is Fault.SLOW_READERS:
            choked = self._slow.choke(rng.uniform(2.0, 5.0))
            self._done["slow"] += choked
            return choked > 0
        proxy = rng.choice((self._workers, self._workers, self._clients))
        share = rng.choice((0.2, 0.5, 1.0))

        def chosen() -> bool:
            return rng.random() < share

        if fault is Fault.RESET:
            return proxy.reset(chosen) > 0
        if fault is Fault.CUT:
            proxy.cut_replies(rng.choice(self._digests), rng.choice((1, 2, 4)))
            return True
        if fault is Fault.HALF_OPEN:
            happened = proxy.deafen(self._lease_s * rng.uniform(1.0, 3.0), chosen)
            self._done["half_opens"] += happened
        elif rng.random() < 0.5:
            happened = proxy.hold_back(self._lease_s * rng.uniform(1.0, 2.5), chosen)
            self._done["late"] += happened
        else:
            happened = proxy.delay(rng.uniform(0.01, 0.1), chosen)
            self._done["delays"] += happened
        return happened > 0
