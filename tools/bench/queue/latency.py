"""Latencies of the ways between two processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.scripts.operations import Claim

from ...rounds import Rounds, percentile
from .client_process import Peer, stamp
from .edge_harness import WorkerSide, submit_all

__all__ = ["measure_claims", "measure_tokens"]

_STREAMS = 250
_PAUSE_MS = 10.0


async def measure_claims(url: str, keys: Keys, rounds: Rounds, *, submits: int) -> None:
    """Time from the start of a submit in another process to its claim in an idle worker."""
    claimed: dict[str, int] = {}

    def note(claims: Sequence[Claim]) -> None:
        now = time.monotonic_ns()
        claimed.update((claim.id, now) for claim in claims)

    async with WorkerSide(url, keys, requests=4096, claimed=note) as side, _serving(side):
        peer = Peer("submit", url=url, model=keys.model, count=submits, pause_ms=_PAUSE_MS)
        began: dict[str, int] = await peer.answer()

        async def all_claimed() -> bool:
            return began.keys() <= claimed.keys()

        await _until(all_claimed)
    took_ms = [(claimed[request_id] - at) / 1e6 for request_id, at in began.items()]
    rounds.add("submit_to_claim_ms_p50", percentile(took_ms, 50))
    rounds.add("submit_to_claim_ms_p99", percentile(took_ms, 99))


async def measure_tokens(
    url: str, keys: Keys, rounds: Rounds, *, per_s: int, seconds: float
) -> None:
    """Time from the end of a step to its tokens in a subscriber, at ``per_s`` tokens a second.

    250 streams, all read by one process on one connection.
    """
    steps = max(1, round(per_s * seconds / _STREAMS))
    ids = [f"stream.{time.monotonic_ns():x}.{index}" for index in range(_STREAMS)]
    async with (
        WorkerSide(url, keys, requests=_STREAMS) as side,
        Redis.from_url(url) as observer,
    ):
        options = SamplingOptions(max_tokens=100_000)
        requests = [Request(id=i, prompt=tuple(range(16)), options=options) for i in ids]
        await submit_all(side.operations, requests, at_once=1)
        await side.claim_all(_STREAMS)
        peer = Peer("subscribe", url=url, model=keys.model, ids=ids, tokens=_STREAMS * steps)
        last = keys.channel(ids[-1])

        async def subscribed() -> bool:
            return bool(dict(await observer.pubsub_numsub(last))[last.encode()])

        await _until(subscribed)
        async with _serving(side):
            begin = asyncio.get_running_loop().time()
            for step in range(steps):
                side.outbox.post(side.updates(stamp()))
                due = begin + (step + 1) * _STREAMS / per_s
                await asyncio.sleep(due - asyncio.get_running_loop().time())
            ages: list[int] = await peer.answer()
    name = f"{per_s // 1000}k"
    rounds.add(f"token_to_subscriber_ms_p50_{name}", percentile(ages, 50) / 1e6)
    rounds.add(f"token_to_subscriber_ms_p99_{name}", percentile(ages, 99) / 1e6)


@asynccontextmanager
async def _serving(side: WorkerSide) -> AsyncIterator[None]:
    """Run the edge's own exchange loop, as in a worker."""
    edge = asyncio.create_task(side.redis_loop.run())
    try:
        yield
    finally:
        side.redis_loop.stop()
        await edge
        await side.redis_loop.drain()


async def _until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.005)
