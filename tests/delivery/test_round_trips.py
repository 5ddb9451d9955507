"""Pipelines of scripts: one round trip, forgotten scripts, servers that come back empty."""

from __future__ import annotations

import asyncio

import pytest
from delivery.fleet import MINUTE_MS, FakeWorker, Shard
from redis.asyncio import Redis

from penstock.shared.errors import RedisUnavailable
from penstock.shared.scripts.script_loader import load_script, run_commands, script_names


async def step(worker: FakeWorker, start: int) -> None:
    """What a worker sends in one step: tokens of all it runs, a claim, a sweep."""
    items = [worker.tokens(claim, start, 1) for claim in worker.claims.values()]
    calls = [worker.append_call(*items), worker.claim_call(0)]
    calls.append(worker.shard.ops.sweep(lease_ms=worker.lease_ms))
    append, claim, sweep = await worker.shard.ops.run(calls)
    assert append == [], "everything was written"
    assert worker.shard.ops.read_claim(claim).claims == ()
    assert worker.shard.ops.read_sweep(sweep).reaped == 0


async def two_running(shard: Shard) -> FakeWorker:
    worker = shard.worker("a")
    for name in ("x", "y"):
        await shard.submit(name)
    await worker.claim(2)
    return worker


async def test_script_flush_under_load_is_invisible(shard: Shard, any_redis_url: str) -> None:
    worker = await two_running(shard)
    flushes = 0
    stop = asyncio.Event()

    async def flush() -> None:
        nonlocal flushes
        async with Redis.from_url(any_redis_url) as other:
            while not stop.is_set():
                await other.script_flush()
                flushes += 1

    flushing = asyncio.create_task(flush())
    for start in range(300):
        await step(worker, start)
    stop.set()
    await flushing
    assert flushes > 100
    assert len(await shard.tokens("x")) == 300
    await shard.check()


@pytest.mark.parametrize("known", [(), ("append",), ("claim", "sweep")])
async def test_what_the_server_forgot_is_sent_again_and_nothing_else(
    shard: Shard, known: tuple[str, ...]
) -> None:
    worker = await two_running(shard)
    await shard.redis.script_flush()
    for name in known:
        await shard.redis.script_load(load_script(name).source)
    await step(worker, 0)
    digests = [load_script(name).digest for name in ("append", "claim", "sweep")]
    assert await shard.redis.script_exists(*digests) == [True] * 3
    await step(worker, 1)
    await shard.check()


async def test_a_step_is_one_round_trip(shard: Shard) -> None:
    """One pipeline, one packet: the server sees the three scripts in one read."""
    worker = await two_running(shard)
    await step(worker, 0)
    before = await shard.redis.info("stats")
    for start in range(1, 51):
        await step(worker, start)
    after = await shard.redis.info("stats")
    reads = after["total_reads_processed"] - before["total_reads_processed"]
    assert reads <= 51, "50 steps and one INFO"


async def test_every_script_loads_under_its_digest(shard: Shard) -> None:
    """Every script loads on every server, and its digest is the server's own."""
    for name in script_names():
        script = load_script(name)
        assert await shard.redis.script_load(script.source) == script.digest


async def test_a_big_step_is_bounded(shard: Shard) -> None:
    """256 requests in one call, as many as a worker may send."""
    worker = shard.worker("a")
    for i in range(256):
        await shard.submit(f"x{i}")
    claims = await worker.claim(256)
    assert len(claims) == 256
    assert await worker.send(*(worker.tokens(claim, 0, 4) for claim in claims)) == [(0, 4)] * 256
    assert await worker.send(*(worker.ending(claim, 4, 1) for claim in claims)) == [(0, 5)] * 256
    await shard.check(ended=True)


async def test_a_server_that_lost_everything_is_a_clean_start(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.flushall()
    claim = worker.claims["x"]
    assert (await worker.send_one(worker.tokens(claim, 0, 1)))[0] == 4
    assert await worker.claim(5) == ()
    await shard.submit("x")
    assert (await worker.claim_one()).epoch == 1
    await shard.check()


async def test_plain_commands_report_errors_as_replies(shard: Shard) -> None:
    await shard.redis.set("text", "x")
    length, error = await run_commands(shard.redis, [("STRLEN", "text"), ("XLEN", "text")])
    assert length == 1
    assert "WRONGTYPE" in str(error)


async def test_a_refused_reply_is_an_error_that_says_what_to_do(shard: Shard) -> None:
    await shard.redis.set(shard.keys.leases, "text")
    (reply,) = await shard.ops.run([shard.worker("a").claim_call(1)])
    with pytest.raises(RedisUnavailable, match="claim"):
        shard.ops.read_claim(reply)
    (reply,) = await shard.ops.run([shard.ops.sweep(lease_ms=MINUTE_MS)])
    with pytest.raises(RedisUnavailable, match="sweep"):
        shard.ops.read_sweep(reply)
