"""The worker's parts around Redis, put together as in a worker, but with no engine running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from penstock.shared.keys import Keys
from penstock.shared.operations import Bounds, Claim, Operations
from penstock.shared.protocol import Request, SamplingOptions

from ..connection import Link, connect
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.plan import Plan, StepOutput
from ..engine.requests import EngineRequest, Update
from ..engine.text import TextStream
from ..intake import Intake
from ..metrics import WorkerMetrics
from ..outbox import Outbox
from ..redis_edge import Capacity, RedisEdge
from ..worker import Worker

__all__ = ["WorkerSide", "submit_all"]

_TIMEOUT_S = 30.0
_BLOCK_SIZE = 16


class WorkerSide:
    """Outbox, intake and Redis edge of one worker; what the engine would do, the caller does.

    An asynchronous context manager. Everything runs on the caller's event loop.

    Args:
        url: address of Redis.
        keys: names of the shard.
        requests: how many it may own.
        claimed: told the claims of each exchange, as soon as they are there.
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
        self._pool = ThreadPoolExecutor(1)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._link = _CountedLink(self._url, timeout_s=_TIMEOUT_S)
        self._listener = connect(self._url, timeout_s=_TIMEOUT_S)
        self.operations = Operations(self._link, self._keys)
        metrics = WorkerMetrics()
        self.outbox = Outbox(metrics, lambda: self._loop.call_soon_threadsafe(self._wake.set))
        engine = Engine(_config(self._requests), _no_text)
        self.edge = RedisEdge(
            self._listener,
            self.operations,
            f"bench-{time.monotonic_ns():x}",
            Capacity(
                max_sequences=self._requests,
                claim_batch=min(self._requests, 128),
                lease_ms=2_000,
                heartbeat_ms=500,
            ),
            worker=Worker(engine, _NoRunner(), self.outbox, metrics),
            outbox=self.outbox,
            intake=_Intake(
                self._claimed, _encode, _any_form, self._take, self.outbox, metrics, self._pool
            ),
            metrics=metrics,
            wake=self._wake,
            hang_timeout_s=_TIMEOUT_S,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._link.aclose()
        await self._listener.aclose()
        self._pool.shutdown()

    def _take(self, request: EngineRequest) -> None:
        self.runs.append(request.id)

    @property
    def round_trips(self) -> int:
        """How often something was sent and its answer awaited, so far."""
        return self._link.exchanges

    async def claim_all(self, count: int) -> None:
        """Exchange until ``count`` requests are owned; they must be waiting."""
        while len(self.runs) < count:
            self.edge.expect_work()
            await self.edge.exchange()
            await asyncio.sleep(0)

    def updates(self, text: str) -> list[Update]:
        """What the engine would produce in a step in which every run gets one token."""
        return [
            Update(run, 0, (1000 + index,), text, None, 16, 0)
            for index, run in enumerate(self.runs)
        ]

    async def step(self, updates: Sequence[Update]) -> None:
        """Publish one step's tokens and wait until Redis has confirmed them."""
        self.outbox.post(updates)
        await self._wake.wait()
        self._wake.clear()
        await self.edge.exchange()


class _CountedLink(Link):
    exchanges = 0

    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        self.exchanges += 1
        return await super().exchange(commands)


class _Intake(Intake):
    """Tells of claims before it does anything with them."""

    def __init__(self, claimed: Callable[[Sequence[Claim]], None], *args: Any) -> None:
        super().__init__(*args)
        self._claimed = claimed

    def accept(self, claims: Sequence[Claim]) -> None:
        self._claimed(claims)
        super().accept(claims)


class _NoRunner:
    def run(self, plan: Plan) -> StepOutput:
        raise AssertionError(f"nothing runs here, but {plan} was planned")


def _config(requests: int) -> EngineConfig:
    return EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=1 << 20,  # room for all that is claimed
        max_batch_tokens=requests,
        max_sequences=requests,
        chunk_size=requests,
        max_model_len=1 << 16,
        eos_token_ids=frozenset(),
    )


def _no_text(prompt_ids: tuple[int, ...]) -> TextStream:
    raise AssertionError(f"nothing runs here, but text was asked for after {prompt_ids}")


def _encode(prompt: object) -> Sequence[int]:
    assert isinstance(prompt, tuple)
    return prompt


def _any_form(options: SamplingOptions) -> None:
    del options


async def submit_all(operations: Operations, requests: Sequence[Request], *, at_once: int) -> None:
    """Submit requests in their order, ``at_once`` at a time."""
    pending = iter(requests)

    async def submit_some() -> None:
        for request in pending:
            await operations.submit(request, bounds=Bounds(), default_deadline_ms=600_000)

    await asyncio.gather(*(submit_some() for _ in range(at_once)))
