"""Drains that meet something slow: nobody is blamed, nothing is lost, the worker ends in time."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from workers import WorkerFactory

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")


async def test_a_step_longer_than_the_lease_is_not_waited_for(
    redis_url: str, workers: WorkerFactory
) -> None:
    slow = await asyncio.to_thread(
        workers.engine, "slow", model__path="synthetic", model__synthetic_step_ms=9000
    )
    async with Producer(redis_url) as producer, Redis.from_url(redis_url) as client:
        ids = [
            (await producer.submit([n], seed=n, max_tokens=20, ignore_eos=True)).id
            for n in range(1, 6)
        ]
        for request_id in ids:
            while await client.hget(KEYS.request(request_id), "st") != b"running":
                await asyncio.sleep(0.01)
        began = time.monotonic()
        assert await asyncio.to_thread(slow.terminate) == 0
        assert time.monotonic() - began < 2
        for request_id in ids:
            state, blames, deaths = await client.hmget(
                KEYS.request(request_id), "st", "bad", "died"
            )
            assert (state, blames, deaths or b"0") == (b"queued", b"0", b"0")
        await asyncio.to_thread(workers.engine, "quick", model__path="synthetic")
        for n, request_id in enumerate(ids, 1):
            result = await asyncio.wait_for(producer.stream(request_id).collect(), 30)
            assert result.token_ids == synthetic_tokens(n, [n], 20)
            assert result.usage is not None
            assert result.usage.attempts == 2
