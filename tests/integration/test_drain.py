"""Drains that meet something slow: nobody is blamed, nothing is lost, the worker ends in time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")


async def test_a_step_longer_than_the_lease_is_not_waited_for(
    redis_url: str, workers: WorkerFactory
) -> None:
    slow = await asyncio.to_thread(
        workers.engine, "slow", model__path="synthetic", model__synthetic_step_ms=25_000
    )
    async with Producer(redis_url) as producer, Redis.from_url(redis_url) as client:
        ids = [
            (await producer.submit([n], seed=n, max_tokens=20, ignore_eos=True)).id
            for n in range(1, 6)
        ]
        for request_id in ids:
            while await client.hget(KEYS.request(request_id), "state") != b"running":
                await asyncio.sleep(0.01)
        began = time.monotonic()
        assert await asyncio.to_thread(slow.terminate) == 0
        assert time.monotonic() - began < 20
        for request_id in ids:
            state, blames, deaths = await client.hmget(
                KEYS.request(request_id), "state", "blames", "deaths"
            )
            assert (state, blames, deaths or b"0") == (b"queued", b"0", b"0")
        await asyncio.to_thread(workers.engine, "quick", model__path="synthetic")
        for n, request_id in enumerate(ids, 1):
            result = await asyncio.wait_for(producer.stream(request_id).collect(), 30)
            assert result.token_ids == synthetic_tokens(n, [n], 20)
            assert result.usage is not None
            assert result.usage.attempts == 2


@pytest.mark.parametrize("how", ["stopped", "gone"])
async def test_redis_does_not_answer(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path, how: str
) -> None:
    """The worker ends when the drain timeout has passed; what it ran is left to its lease."""
    server = start_redis(password="")
    workers = WorkerFactory(server.url, tmp_path)
    try:
        leaver = await asyncio.to_thread(
            workers.engine,
            "leaver",
            model__path="synthetic",
            model__synthetic_step_ms=10,
            redis__socket_timeout_s=0.4,
            worker__drain_timeout_s=1,
        )
        async with Producer(server.url) as producer:
            await producer.submit([7], id="r", seed=1, max_tokens=2000, ignore_eos=True)
            await anext(producer.stream("r"))
        os.kill(server.pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: leaver.metric("redis_errors_total"), "the outage was noticed"
        )
        began = time.monotonic()
        assert await asyncio.to_thread(leaver.terminate) == 0
        assert 1 <= time.monotonic() - began < 30
    finally:
        os.kill(server.pid, signal.SIGCONT)
        workers.close()
    assert "could not hand over (Redis did not answer in time)" in leaver.log.read_text()
