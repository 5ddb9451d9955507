"""The cost of a step: CPU of worker and Redis, round trips, time, bytes in the log."""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.protocol.events import Chunk
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions

from ...rounds import Rounds, percentile
from .edge_harness import WorkerSide, submit_all

__all__ = ["measure_steps"]

_TEXT = " token"
_WARM_UP_STEPS = 20


async def measure_steps(
    url: str, keys: Keys, rounds: Rounds, *, running: int, repeats: int, steps: int
) -> None:
    """Publish one token of each of ``running`` requests per step, as the worker does.

    Each round also sends tokens the plain way: one awaited XADD and one awaited PUBLISH per token
    with plain redis-py.
    """
    async with (
        WorkerSide(url, keys, requests=running) as side,
        Redis.from_url(url) as plain,
        Redis.from_url(url) as observer,
    ):
        options = SamplingOptions(max_tokens=100_000)
        requests = [
            Request(id=f"step.{index}", prompt=tuple(range(16)), options=options)
            for index in range(running)
        ]
        await submit_all(side.operations, requests, at_once=1)
        await side.claim_all(running)
        updates = side.updates(_TEXT)
        for _ in range(_WARM_UP_STEPS):
            await side.step(updates)
        await _send_unpipelined(plain, keys, running, 1)
        for _ in range(repeats):
            ours = await _measure_steps(side, updates, observer, rounds, running, steps)
            began = time.process_time()
            tokens = await _send_unpipelined(plain, keys, running, max(1, steps // 50))
            theirs = 1e6 * (time.process_time() - began) / tokens
            rounds.add(f"unpipelined_cpu_us_per_token_{running}", theirs)
            rounds.add(f"unpipelined_ratio_{running}", theirs / ours)


async def _measure_steps(
    side: WorkerSide, updates: Any, observer: Redis, rounds: Rounds, running: int, steps: int
) -> float:
    tokens = running * steps
    memory, redis_cpu = await _memory_and_cpu(observer)
    sent, cpu = side.round_trips, time.process_time()
    took_ms = []
    for _ in range(steps):
        began = time.perf_counter()
        await side.step(updates)
        took_ms.append(1e3 * (time.perf_counter() - began))
    worker_us = 1e6 * (time.process_time() - cpu) / tokens
    sent = side.round_trips - sent
    memory_after, redis_cpu_after = await _memory_and_cpu(observer)
    rounds.add(f"worker_cpu_us_per_token_{running}", worker_us)
    rounds.add(f"redis_cpu_us_per_token_{running}", 1e6 * (redis_cpu_after - redis_cpu) / tokens)
    rounds.add("round_trips_per_step", sent / steps)
    rounds.add(f"step_ms_p50_{running}", percentile(took_ms, 50))
    rounds.add(f"step_ms_p99_{running}", percentile(took_ms, 99))
    rounds.add("bytes_per_streamed_token", (memory_after - memory) / tokens)
    return worker_us


async def _send_unpipelined(redis: Redis, keys: Keys, running: int, steps: int) -> int:
    """Returns the number of tokens sent."""
    for step in range(steps):
        for index in range(running):
            request_id = f"plain.{index}"
            chunk = Chunk(step, (1000 + index,), _TEXT, 0).pack()
            await redis.xadd(keys.log(request_id), {"d": chunk})
            await redis.publish(keys.channel(request_id), chunk)
    return steps * running


async def _memory_and_cpu(redis: Redis) -> tuple[int, float]:
    """Bytes in use, and CPU seconds the server has used."""
    memory, cpu = await redis.info("memory"), await redis.info("cpu")
    return memory["used_memory"], cpu["used_cpu_user"] + cpu["used_cpu_sys"]
