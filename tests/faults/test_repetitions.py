"""The long form of directed tests: races and bounds, as often as it takes to meet the rare case."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis.asyncio
from delivery import test_admission, test_ends, test_fairness, test_guards, test_round_trips
from delivery.fleet import Shard

Directed = Callable[[Shard], Awaitable[None]]


def url_of(shard: Shard) -> str:
    return "redis://{host}:{port}/{db}".format(**shard.redis.connection_pool.connection_kwargs)


async def race(shard: Shard) -> None:
    await test_ends.test_cancel_against_finish_ends_once(shard, url_of(shard))


async def flush(shard: Shard) -> None:
    await test_round_trips.test_script_flush_under_load_is_invisible(shard, url_of(shard))


async def duplicates(shard: Shard) -> None:
    async with crowd(shard) as many:
        await test_admission.test_a_hundred_concurrent_duplicates_run_once(many)


async def bounds(shard: Shard) -> None:
    for bound in test_admission.BOUNDS:
        await shard.redis.flushall()
        async with crowd(shard) as many:
            await test_admission.test_bounds_are_never_exceeded_by_one(many, bound)


@contextlib.asynccontextmanager
async def crowd(shard: Shard) -> AsyncIterator[Shard]:
    """The same shard through 16 connections at once."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(url_of(shard), max_connections=16)
    async with redis.asyncio.Redis(connection_pool=pool) as client:
        yield shard.with_client(client)
    await pool.aclose()


TIMES: dict[Directed, int] = {
    test_guards.test_zombie_is_fenced_in_its_successors_prefill: 15,  # 20 zombies each
    race: 10,  # 1,000 races each
    duplicates: 10,  # 100 each
    bounds: 7,  # 400 submits for each of four bounds
    test_ends.test_deadline_of_queued_and_running: 100,
    flush: 3,  # 100 flushes at least each
    test_admission.test_drained_shard_takes_work_again: 10,
    test_fairness.test_a_flood_does_not_delay_others: 5,
}


@pytest.mark.slow
@pytest.mark.parametrize("test", TIMES, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_again_and_again(redis_client: redis.asyncio.Redis, test: Directed) -> None:
    for _ in range(TIMES[test]):
        await redis_client.flushall()
        try:
            await test(Shard(redis_client))
        finally:
            await redis_client.config_set("maxmemory", 0)
