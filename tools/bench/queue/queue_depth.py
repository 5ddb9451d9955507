"""A long queue: cost of submits and claims, memory of a waiting request, order of service."""

from __future__ import annotations

import time
from collections.abc import Sequence

from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.operations import Operations

from ...rounds import Rounds, percentile
from .edge_harness import submit_all

__all__ = ["measure_depth", "measure_fairness"]

_PROMPT_BYTES = 200
_TENANTS = 20
_CLAIM = 32
_LEASE_MS = 60_000


async def measure_depth(url: str, keys: Keys, rounds: Rounds, *, queued: int) -> None:
    """Submit ``queued`` requests from one process, then claim them, 32 at a time."""
    async with Redis.from_url(url) as redis:
        operations = Operations(redis, keys)
        requests = [
            Request(id=f"deep.{i}", prompt="x" * _PROMPT_BYTES, tenant=f"tenant-{i % _TENANTS}")
            for i in range(queued)
        ]
        payload = len(requests[0].pack())
        await submit_all(operations, requests[:1], at_once=1)  # loads the scripts
        before = (await redis.info("memory"))["used_memory"]
        began = time.perf_counter()
        await submit_all(operations, requests[1:], at_once=32)
        submits_per_s = (queued - 1) / (time.perf_counter() - began)
        memory = (await redis.info("memory"))["used_memory"] - before
        claims_ms: list[float] = []
        while await _claim(operations, _CLAIM, claims_ms):
            pass
    rounds.add("bytes_per_queued_request", memory / (queued - 1))
    rounds.add("bytes_per_queued_request_payload", payload)
    name = f"{queued // 1000}k"
    rounds.add(f"submits_per_s_{name}", submits_per_s)
    rounds.add(f"claim_{_CLAIM}_ms_p50_{name}", percentile(claims_ms, 50))
    rounds.add(f"claim_{_CLAIM}_ms_p99_{name}", percentile(claims_ms, 99))


async def _claim(operations: Operations, count: int, took_ms: list[float]) -> list[str]:
    """Claim up to ``count`` requests; returns them as ``lane:tenant``."""
    call = operations.claim(
        "bench-claims", lease_ms=_LEASE_MS, requests=count, tokens=1 << 40, suspect_ok=True
    )
    began = time.perf_counter()
    (reply,) = await operations.run([call])
    took_ms.append(1e3 * (time.perf_counter() - began))
    requests = [Request.unpack(claim.payload) for claim in operations.read_claim(reply).claims]
    return [f"{request.lane.value}:{request.tenant}" for request in requests]


async def measure_fairness(
    url: str, tenants: Keys, lanes: Keys, rounds: Rounds, *, flood: int, others: int
) -> None:
    """Compare the order of claims with the ideal shares.

    First tenant A queues ``flood`` requests, then B and C ``others`` each, all of the same cost. B
    and C should be through after three times ``others``. Then the three lanes get ``10 * others``
    each: until the urgent lane is empty, shares should be 8:4:1.
    """
    async with Redis.from_url(url) as redis:
        order = await _order(
            Operations(redis, tenants),
            [("normal", "A")] * flood + [("normal", "B")] * others + [("normal", "C")] * others,
            3 * others + 10,
        )
        for tenant in "BC":
            served = [place for place, who in enumerate(order, 1) if who.endswith(tenant)]
            done = served[-1] if len(served) == others else len(order)
            rounds.add(f"tenant_{tenant.lower()}_done_after_pulls", done)
        rounds.add("tenant_done_after_pulls_ideal", 3 * others)
        each = 10 * others
        pulls = each * 13 // 8
        order = await _order(
            Operations(redis, lanes),
            [(lane.value, "A") for lane in Lane for _ in range(each)],
            pulls,
        )
        for lane, share in ((Lane.CRITICAL, 8), (Lane.NORMAL, 4), (Lane.BATCH, 1)):
            count = sum(who.startswith(lane.value) for who in order)
            rounds.add(f"lane_{lane.value}_share_of_ideal", count / (pulls * share / 13))


async def _order(
    operations: Operations, wanted: Sequence[tuple[str, str]], pulls: int
) -> list[str]:
    options = SamplingOptions(max_tokens=84)
    requests = [
        Request(id=f"fair.{i}", prompt=tuple(range(16)), lane=Lane(lane), tenant=t, options=options)
        for i, (lane, t) in enumerate(wanted)
    ]
    await submit_all(operations, requests, at_once=1)
    order: list[str] = []
    while len(order) < pulls:
        order += await _claim(operations, 1, [])
    return order
