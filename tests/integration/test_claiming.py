"""How a worker among others takes what waits."""

from __future__ import annotations

import redis.asyncio
from log_writer import eventually
from workers import WorkerFactory

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.shared.protocol.states import State

KEYS = Keys("demo")


async def test_who_alone_has_room_takes_its_share_again_and_again(
    redis_url: str, workers: WorkerFactory
) -> None:
    """Eight others live and do not claim. All is taken within the first step, which is long."""
    async with redis.asyncio.Redis.from_url(redis_url) as client, Producer(redis_url) as producer:
        far = (await client.time())[0] * 1000 + 600_000
        await client.zadd(KEYS.leases, {f"busy-{number}": far for number in range(8)})
        workers.engine(
            "free",
            model__path="synthetic",
            model__synthetic_step_ms=60_000,
            worker__hang_timeout_s=300,
            engine__max_sequences=24,
        )
        ids = [(await producer.submit([1, 2], max_tokens=5)).id for _ in range(20)]

        async def all_run() -> bool:
            return all([(await producer.status(id)).state is State.RUNNING for id in ids])

        await eventually(all_run, "all requests run")
