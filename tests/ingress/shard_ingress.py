"""An ingress on a real server: entries added by hand, and taken in step by step or by loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from delivery.fleet import Shard
from redis.asyncio import Redis

from penstock.gpu_worker.edge.ingress import Ingress
from penstock.gpu_worker.monitoring.heartbeat import HeartbeatWatch
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.keys import GROUP
from penstock.shared.protocol.plain_entry import Entry, read_entry
from penstock.shared.scripts.ingress_operations import IngressOperations, IngressPoll, IngressReply
from penstock.shared.scripts.operations import Bounds
from penstock.shared.scripts.script_loader import Script, load_script

MINUTE_MS = 60_000


@dataclass
class ShardIngress:
    """The ingress of one shard, and shortcuts to look into it."""

    redis: Redis
    bounds: Bounds = field(default_factory=Bounds)
    load: Callable[[str], Script] = load_script

    def __post_init__(self) -> None:
        self.shard = Shard(self.redis, load=self.load)
        self.keys = self.shard.keys
        self.ops = IngressOperations(
            self.redis,
            self.keys,
            bounds=self.bounds,
            default_deadline_ms=MINUTE_MS,
            load=self.load,
        )

    def with_bounds(self, **bounds: int) -> ShardIngress:
        return ShardIngress(self.redis, Bounds(**bounds), self.load)

    async def add(self, tenant: str | None = None, **fields: object) -> str:
        """XADD as any client does it; returns the entry's name."""
        return await self.add_raw(*(x for pair in fields.items() for x in pair), tenant=tenant)

    async def add_raw(self, *fields: Any, tenant: str | None = None, name: str = "*") -> str:
        entry: bytes = await self.redis.execute_command(
            "XADD", self.keys.ingress(tenant), name, *fields
        )
        return entry.decode()

    async def lease(self, worker: str) -> None:
        """Let a worker live for a minute."""
        await self.shard.worker(worker).claim(0)

    async def poll(self, worker: str, entries: int = 64) -> IngressPoll:
        return self.ops.read_poll(await self.shard.call(self.ops.poll(worker, entries=entries)))

    async def read(self, worker: str, tenant: str | None = None, count: int = 64) -> list[Entry]:
        """What a worker is given that no other was; it does not act on it."""
        reply = await self.redis.xreadgroup(GROUP, worker, {self.keys.ingress(tenant): ">"}, count)
        return [
            Entry(tenant, name.decode(), [part for pair in fields.items() for part in pair])
            for _, entries in reply
            for name, fields in entries
        ]

    async def resolve(self, entry: Entry) -> IngressReply:
        """Act on an entry."""
        call = self.ops.resolve(entry, read_entry(entry))
        return self.ops.read_resolved(await self.shard.call(call))

    async def resolve_all(self, entries: Sequence[Entry]) -> list[str]:
        return [(await self.resolve(entry)).verdict for entry in entries]

    async def take_in(self, worker: str = "w") -> list[IngressReply]:
        """What a live worker does with everything that lies there."""
        await self.lease(worker)
        poll = await self.poll(worker)
        entries = [
            *poll.entries,
            *[entry for tenant in poll.tenants for entry in await self.read(worker, tenant)],
        ]
        return [await self.resolve(entry) for entry in entries]

    async def submit_plainly(self, **fields: object) -> IngressReply:
        """Add one entry, and have it taken in."""
        await self.add(**fields)
        (admitted,) = await self.take_in()
        return admitted

    async def left(self, tenant: str | None = None) -> tuple[int, int]:
        """Entries in an ingress stream, and those of them that some worker has read."""
        stream = self.keys.ingress(tenant)
        pending = await self.redis.xpending(stream, GROUP)
        return await self.redis.xlen(stream), pending["pending"]

    @asynccontextmanager
    async def loop(self, worker: str, *, interval_s: float = 0.05) -> AsyncIterator[Ingress]:
        """A worker's own loop at the ingress, with a connection of its own and a lease."""
        await self.lease(worker)
        client = Redis(
            connection_pool=type(self.redis.connection_pool)(
                **self.redis.connection_pool.connection_kwargs
            )
        )
        ingress = Ingress(
            client,
            IngressOperations(
                client, self.keys, bounds=self.bounds, default_deadline_ms=MINUTE_MS,
                load=self.load,
            ),
            worker,
            metrics=WorkerMetrics(),
            watch=HeartbeatWatch(60),
            admitted=lambda: None,
            interval_s=interval_s,
        )  # fmt: skip
        ingress.start()
        try:
            yield ingress
        finally:
            await ingress.close()
            await client.connection_pool.disconnect()

    async def until(self, done: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
        """Poll until ``await done()`` is true."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await done():
            assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what}"
            await asyncio.sleep(0.005)
