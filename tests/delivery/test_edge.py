"""A worker's edge against a real server: what it finds out about what it owns, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from delivery.fleet import Shard
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.gpu_worker.bench.worker_side import WorkerSide

LONG_AGO = 1


@pytest.fixture
async def side(redis_url: str, newest_shard: Shard) -> AsyncIterator[WorkerSide]:
    """A worker that owns nothing yet, with room for 4."""
    async with WorkerSide(redis_url, newest_shard.keys, requests=4) as side:
        yield side


async def claim(side: WorkerSide) -> None:
    side.edge.expect_work()
    await side.edge.exchange()


async def test_a_lost_claim_of_what_it_owned_before_is_given_back(
    newest_shard: Shard, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapsed unnoticed, and it has nothing to say of the request while that computes."""
    shard, run = newest_shard, side.operations.run
    await shard.submit("x")
    await side.claim_all(1)
    await side.edge.exchange()  # answers the question with which a sweep ends
    (worker,) = await shard.redis.zrange(shard.keys.leases, 0, -1)
    await shard.redis.zadd(shard.keys.leases, {worker: LONG_AGO})
    assert (await shard.sweep()).reaped == 1

    async def cut(calls: object) -> None:
        monkeypatch.undo()
        await run(calls)  # type: ignore[arg-type]
        raise RedisConnectionError("cut after it was executed")

    monkeypatch.setattr(side.operations, "run", cut)
    await claim(side)
    assert (await shard.record("x"))["ep"] == "2"
    assert await shard.state("x") == "queued"
    await claim(side)
    assert side.runs == ["x#1", "x#3"]
    await shard.check()
