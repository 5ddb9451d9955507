"""The worker's parts around Redis, assembled as in a worker but without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from penstock.gpu_worker.edge.claim_budget import Capacity
from penstock.gpu_worker.edge.claims import ClaimReceiver
from penstock.gpu_worker.edge.engine_client import EngineClient
from penstock.gpu_worker.edge.outbox import Outbox
from penstock.gpu_worker.edge.owned_requests import OwnedRequests
from penstock.gpu_worker.edge.redis_loop import RedisLoop
from penstock.gpu_worker.engine.requests.engine_request import Update
from penstock.gpu_worker.engine.stats import Load
from penstock.gpu_worker.messages import Add
from penstock.gpu_worker.monitoring.heartbeat import HeartbeatWatch
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.keys import Keys
from penstock.shared.protocol.request import Request
from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.redis.opening import open_client
from penstock.shared.scripts.operations import Bounds, Claim, Operations

__all__ = ["WorkerSide", "submit_all"]

_TIMEOUT_S = 30.0


class WorkerSide:
    """Outbox, claims and Redis loop of one worker; the caller does what the engine would do.

    An asynchronous context manager. Everything runs on the caller's event loop.

    Args:
        url: address of Redis.
        keys: names of the shard.
        requests: the most it may own.
        claimed: called with the claims of each exchange, as soon as they arrive.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        *,
        requests: int,
        claimed: Callable[[Sequence[Claim]], None] = lambda _: None,
    ) -> None:
        self._url, self._keys = url, keys
        self.runs: list[str] = []
        self._requests = requests
        self._claimed = claimed

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._link = _CountedConnection(self._url, timeout_s=_TIMEOUT_S)
        self._listener = open_client(self._url, timeout_s=_TIMEOUT_S)
        self.operations = Operations(self._link, self._keys)
        metrics = WorkerMetrics()
        owned, watch = OwnedRequests(), HeartbeatWatch(_TIMEOUT_S)
        self.outbox = Outbox(
            owned, metrics, lambda: self._loop.call_soon_threadsafe(self._wake.set)
        )
        engine = EngineClient(owned, self.outbox, metrics, self._wake.set, watch)
        engine.load, engine.step_tokens = Load({}, 1 << 30), 1 << 30  # room for all claims
        self.redis_loop = RedisLoop(
            self._listener,
            self.operations,
            f"bench-{time.monotonic_ns():x}",
            Capacity(
                max_sequences=self._requests,
                claim_batch=min(self._requests, 128),
                lease_ms=2_000,
                heartbeat_ms=500,
            ),
            engine=engine,
            owned=owned,
            outbox=self.outbox,
            claims=_Claims(self._claimed, self._take, engine.abort, owned, self.outbox, metrics),
            metrics=metrics,
            watch=watch,
            wake=self._wake,
            drain_timeout_s=_TIMEOUT_S,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._link.aclose()
        await self._listener.aclose()

    def _take(self, order: Add) -> None:
        self.runs.append(order.run)

    @property
    def round_trips(self) -> int:
        """Round trips so far."""
        return self._link.exchanges

    async def claim_all(self, count: int) -> None:
        """Exchange until ``count`` requests are owned; they must be waiting."""
        while len(self.runs) < count:
            self.redis_loop.expect_work()
            await self.redis_loop.exchange()
            await asyncio.sleep(0)

    def updates(self, text: str) -> list[Update]:
        """The updates of a step in which each running request gets one token."""
        return [
            Update(run, 0, (1000 + index,), text, None, 16, 0)
            for index, run in enumerate(self.runs)
        ]

    async def step(self, updates: Sequence[Update]) -> None:
        """Publish one step's tokens and wait until Redis has confirmed them."""
        self.outbox.post(updates)
        await self._wake.wait()
        self._wake.clear()
        await self.redis_loop.exchange()


class _CountedConnection(BatchConnection):
    exchanges = 0

    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        self.exchanges += 1
        return await super().exchange(commands)


class _Claims(ClaimReceiver):
    """Reports claims before it processes them."""

    def __init__(self, claimed: Callable[[Sequence[Claim]], None], *args: Any) -> None:
        super().__init__(*args)
        self._claimed = claimed

    def accept(self, claims: Sequence[Claim]) -> bool:
        self._claimed(claims)
        return super().accept(claims)


async def submit_all(operations: Operations, requests: Sequence[Request], *, at_once: int) -> None:
    """Submit requests in their order, ``at_once`` at a time."""
    pending = iter(requests)

    async def submit_some() -> None:
        for request in pending:
            await operations.submit(request, bounds=Bounds(), default_deadline_ms=600_000)

    await asyncio.gather(*(submit_some() for _ in range(at_once)))
