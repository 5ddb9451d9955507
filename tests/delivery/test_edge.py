"""A worker's edge against a real server: what it finds out about what it owns, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from delivery.fleet import Shard
from log_writer import eventually
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.tools.bench.queue.edge_harness import WorkerSide

LONG_AGO = 1


@pytest.fixture
async def side(redis_url: str, newest_shard: Shard) -> AsyncIterator[WorkerSide]:
    """A worker that owns nothing yet, with room for 4."""
    async with WorkerSide(redis_url, newest_shard.keys, requests=4) as side:
        yield side


async def claim(side: WorkerSide) -> None:
    side.redis_loop.expect_work()
    await side.redis_loop.exchange()


async def test_a_lost_claim_of_what_it_owned_before_is_given_back(
    newest_shard: Shard, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapsed unnoticed, and it has nothing to say of the request while that computes."""
    shard, run = newest_shard, side.operations.run
    await shard.submit("x")
    await side.claim_all(1)
    await side.redis_loop.exchange()  # answers the question with which a sweep ends
    (worker,) = await shard.redis.zrange(shard.keys.leases, 0, -1)
    await shard.redis.zadd(shard.keys.leases, {worker: LONG_AGO})
    assert (await shard.sweep()).reaped == 1

    async def cut(calls: object) -> None:
        monkeypatch.undo()
        await run(calls)  # type: ignore[arg-type]
        raise RedisConnectionError("cut after it was executed")

    monkeypatch.setattr(side.operations, "run", cut)
    await claim(side)
    assert (await shard.record("x"))["epoch"] == "2"
    assert await shard.state("x") == "queued"
    await claim(side)
    assert side.runs == ["x#1", "x#3"]
    await shard.check()


async def test_after_an_outage_no_worker_takes_the_others_work(
    newest_shard: Shard, side: WorkerSide, redis_url: str
) -> None:
    """The leases of all have ended meanwhile; one of them comes first."""
    shard = newest_shard
    async with WorkerSide(redis_url, shard.keys, requests=4) as other:
        for name, worker in (("x", side), ("y", other)):
            await shard.submit(name)
            await worker.claim_all(1)
        leases = await shard.redis.zrange(shard.keys.leases, 0, -1)
        await shard.redis.zadd(shard.keys.leases, dict.fromkeys(leases, LONG_AGO))
        await shard.let_pass(5_000)
        outage = int(await shard.redis.hget(shard.keys.sweep, "swept_at") or 0)

        async def swept() -> bool:
            await side.redis_loop.exchange()
            return int(await shard.redis.hget(shard.keys.sweep, "swept_at") or 0) > outage

        await eventually(swept, "the first one sweeps")
        await other.step(other.updates("t"))
    records = [await shard.record(name) for name in ("x", "y")]
    found = [
        [record.get(field, "0") for field in ("state", "blames", "epoch", "tokens")]
        for record in records
    ]
    assert found == [["running", "0", "1", "0"], ["running", "0", "1", "1"]]


async def test_many_requests_with_one_deadline_end_soon_after_it(
    newest_shard: Shard, side: WorkerSide
) -> None:
    """One sweep ends no more than 64 of them. The worker is full, so no claim meets them."""
    shard, count = newest_shard, 2560
    for n in range(4):
        await shard.submit(f"running-{n}")
    await side.claim_all(4)
    for n in range(count):
        await shard.submit(f"x{n}", deadline_ms=1)
    working = asyncio.create_task(side.redis_loop.run())

    async def all_ended() -> bool:
        return await shard.counter("ended:expired") == count

    await eventually(all_ended, "no pause between 40 sweeps", timeout_s=20)  # with pauses: 26 s
    side.redis_loop.stop()
    assert await working
    await shard.check()


async def test_a_worker_sweeps_when_a_readers_grace_ends(
    newest_shard: Shard, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would after a second, so long would the device work for a reader that has left."""
    sweeps, read = [0], side.operations.read_sweep

    def counted(reply: Any) -> Any:
        sweeps[0] += 1
        return replace(read(reply), grace_ms=20)

    monkeypatch.setattr(side.operations, "read_sweep", counted)
    running = asyncio.create_task(side.redis_loop.run())
    try:

        async def often() -> bool:
            return sweeps[0] > 40

        await eventually(often, "sweeps as asked for", timeout_s=20)  # at a second each: 40 s
    finally:
        side.redis_loop.stop()
        await running


async def test_a_restart_of_redis_ends_no_request_whose_reader_it_kept_away(
    newest_shard: Shard, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grace ended meanwhile, and the worker comes back first."""
    shard, run = newest_shard, side.operations.run
    await shard.submit("x", on_disconnect="cancel")
    await side.claim_all(1)
    await shard.ops.reader_heartbeat(["x"], grace_ms=1)
    await shard.wait_ms(2)

    async def away(calls: object) -> None:
        monkeypatch.undo()
        raise RedisConnectionError("restarting")

    async def spared() -> bool:
        return float(await shard.redis.hget(shard.keys.sweep, "readers_spared_until") or 0) > 0

    while not await spared():
        monkeypatch.setattr(side.operations, "run", away)
        await claim(side)  # with a sweep when its time has come
        assert side.operations.run == run
        assert await shard.state("x") == "running"


async def test_one_claim_asks_for_no_more_than_can_be_parsed_between_two_exchanges(
    newest_shard: Shard, side: WorkerSide
) -> None:
    """However much the engine could take: a prompt of 262,144 ids takes a tenth of a second."""
    side.redis_loop.expect_work()
    asked: list[int] = []
    claim_of_worker = side.operations.claim

    def claim(*args: Any, **asks: Any) -> Any:
        asked.append(asks["tokens"])
        return claim_of_worker(*args, **asks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side.operations, "claim", claim)
        await side.redis_loop.exchange()
    assert asked == [1 << 18]
