"""Readers that come and go, of requests that are cancelled when the last one has left."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from delivery.fleet import FakeWorker, Shard
from log_writer import eventually
from redis.asyncio import Redis
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer import Producer, Reason, RequestFailed, State, TokenStream
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import load_settings

GRACE_MS = 1000
LONGER_MS = 3 * GRACE_MS // 2
"""Without heartbeats the grace would be over."""


def client(url: str, grace_ms: int = GRACE_MS) -> Producer:
    return Producer(settings=load_settings({"redis.url": url, "queue.reader_grace_ms": grace_ms}))


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Producer]:
    async with client(redis_url) as connected:
        yield connected


async def start(shard: Shard, producer: Producer, name: str = "x") -> FakeWorker:
    """A running request with two tokens."""
    await producer.submit("hi", id=name, on_disconnect="cancel")
    worker = shard.worker("w")
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    return worker


def attended(shard: Shard, name: str = "x") -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await shard.redis.zscore(shard.keys.readers, name) is not None

    return look


async def sweep_for(shard: Shard, milliseconds: int) -> None:
    """Sweep as a worker does, and cancel nobody."""
    until = await shard.now_ms() + milliseconds
    while await shard.now_ms() < until:
        assert (await shard.sweep()).abandoned == 0
        await asyncio.sleep(0.01)


async def sweep_away(shard: Shard, name: str = "x") -> None:
    """Sweep until the request is cancelled."""
    await shard.sweep_until(lambda swept: swept.abandoned == 1)
    assert (await shard.end(name)).reason is Reason.DISCONNECTED
    await shard.check(ended=True)


async def read_elsewhere(redis_url: str, name: str = "x") -> asyncio.subprocess.Process:
    """A reader in a process of its own, that has read the first chunk."""
    grace = {"PENSTOCK_QUEUE__READER_GRACE_MS": str(GRACE_MS), "REDIS_URL": redis_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.producer.cli", "stream", name, "--json",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **grace},
    )  # fmt: skip
    assert process.stdout is not None
    assert b'"chunk"' in await asyncio.wait_for(process.stdout.readline(), 120)
    return process


async def read_and_wait(stream: TokenStream) -> None:
    """Its first chunk, however late it comes, and then a wait that ends by the stream's limit."""

    async def has_begun() -> bool:
        with suppress(TimeoutError):
            await anext(stream)
            return True
        return False

    await eventually(has_begun, "the first chunk")
    with pytest.raises(TimeoutError):
        await anext(stream)


async def test_a_reader_that_is_killed(
    newest_shard: Shard, producer: Producer, redis_url: str
) -> None:
    shard = newest_shard
    worker = await start(shard, producer)
    reader = await read_elsewhere(redis_url)
    await eventually(attended(shard), "the reader says that it is there")
    await sweep_for(shard, LONGER_MS)
    assert await worker.send_one(worker.tokens(worker.claims["x"], 2, 1)) == (0, 3)
    reader.kill()
    await reader.wait()
    until = await shard.redis.zscore(shard.keys.readers, "x")
    assert until is not None
    assert until - await shard.now_ms() <= GRACE_MS
    await sweep_away(shard)
    assert (await worker.send_one(worker.tokens(worker.claims["x"], 3, 1)))[0] == 2


async def test_another_reader_that_comes_in_time(
    newest_shard: Shard, producer: Producer, redis_url: str
) -> None:
    shard = newest_shard
    worker = await start(shard, producer)
    reader = await read_elsewhere(redis_url)
    await eventually(attended(shard), "the reader says that it is there")
    reader.kill()
    await reader.wait()
    async with producer.stream("x") as stream:
        assert (await anext(stream)).start == 0
        pending = asyncio.create_task(anext(stream))
        await sweep_for(shard, LONGER_MS)
        await worker.send(worker.ending(worker.claims["x"], 2, 2))
        assert (await pending).start == 2
        assert [chunk async for chunk in stream] == []
    assert stream.end is not None
    assert stream.end.state is State.COMPLETED
    await shard.check(ended=True)


async def test_of_two_readers_one_leaves(
    newest_shard: Shard, producer: Producer, redis_url: str
) -> None:
    shard = newest_shard
    await start(shard, producer)
    reader = await read_elsewhere(redis_url)
    async with producer.stream("x") as stream:
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await eventually(attended(shard), "readers say that they are there")
        reader.kill()
        await reader.wait()
        await sweep_for(shard, LONGER_MS)
        waiting.cancel()
    await sweep_away(shard)


@pytest.mark.parametrize("how", ["closed", "dropped", "producer closed"])
async def test_a_stream_that_is_left(
    newest_shard: Shard, producer: Producer, redis_url: str, how: str
) -> None:
    shard = newest_shard
    await start(shard, producer)
    async with client(redis_url) as other:
        stream = other.stream("x", timeout=0.2)
        await read_and_wait(stream)
        await eventually(attended(shard), "the reader says that it is there")
        if how == "closed":
            await stream.aclose()
        elif how == "producer closed":
            await other.aclose()
        else:
            del stream
            gc.collect()
        await sweep_away(shard)


async def test_two_streams_of_one_process(newest_shard: Shard, producer: Producer) -> None:
    shard = newest_shard
    await start(shard, producer)
    streams = [producer.stream("x", timeout=0.1) for _ in range(2)]
    for stream in streams:
        await read_and_wait(stream)
    await streams[0].aclose()
    await streams[0].aclose()
    await sweep_for(shard, LONGER_MS)
    await streams[1].aclose()
    await sweep_away(shard)


async def test_many_streams_share_one_heartbeat(
    newest_shard: Shard, producer: Producer, redis_client: Redis
) -> None:
    shard = newest_shard
    names = [f"x{i}" for i in range(300)]
    for name in names:
        await producer.submit("hi", id=name, on_disconnect="cancel")
    streams = [producer.stream(name) for name in names]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]

    async def all_there() -> bool:
        return await shard.redis.zcard(shard.keys.readers) == 300

    await eventually(all_there, "all readers say that they are there")
    before = (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    began = time.monotonic()
    await sweep_for(shard, LONGER_MS)
    sweeps = LONGER_MS // 10 + 1
    beats = 1 + (time.monotonic() - began) / (GRACE_MS / 3000)
    calls = (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"] - before
    assert calls <= sweeps + 2 * beats + 2, "two calls of up to 256 ids, three times a grace"
    for task in tasks:
        task.cancel()
    for stream in streams:
        await stream.aclose()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_heartbeats_do_not_wait_for_the_reply_to_a_submission(
    newest_shard: Shard, redis_url: str
) -> None:
    shard = newest_shard
    settings = load_settings({"redis.url": redis_url, "queue.reader_grace_ms": GRACE_MS})
    async with Producer(settings=settings, inbox=True) as producer:
        feed = producer.feeds.open("x", attended=True)
        await producer.submit("hi", id="x", on_disconnect="cancel", attend=True)
        first = await shard.redis.zscore(shard.keys.readers, "x")
        assert first is not None
        assert first <= await shard.now_ms() + GRACE_MS

        async def beats() -> bool:
            return await shard.redis.zscore(shard.keys.readers, "x") != first

        await eventually(beats, "a heartbeat of a feed that has not started")
        feed.close()
        await sweep_away(shard)


async def test_others_are_not_attended(newest_shard: Shard, producer: Producer) -> None:
    await producer.submit("hi", id="x")
    stream = producer.stream("x", timeout=0.1)
    with pytest.raises(TimeoutError):
        await anext(stream)
    assert not await newest_shard.redis.exists(newest_shard.keys.readers)
    await stream.aclose()
    await newest_shard.wait_ms(2)
    assert (await newest_shard.sweep()).abandoned == 0


async def test_a_reader_through_an_outage(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    """The server is away for longer than the grace; reader and worker come back to it."""
    server = start_redis(password="", data_dir=tmp_path)
    async with client(server.url) as producer, Redis.from_url(server.url) as redis:
        shard = Shard(redis)
        await shard.sweep()
        worker = await start(shard, producer)
        async with producer.stream("x") as stream:
            await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            await eventually(attended(shard), "the reader says that it is there")
            # As if it had been away so long: neither sweeps nor heartbeats came through.
            await redis.client_kill_filter(_type="normal", skipme=True)
            await redis.zadd(shard.keys.readers, {"x": 1})
            await redis.hset(shard.keys.sweep, "swept_at", await shard.now_ms() - 60_000)

            async def is_back() -> bool:
                assert (await shard.sweep()).abandoned == 0
                return await redis.zscore(shard.keys.readers, "x") > await shard.now_ms()

            await eventually(is_back, "the reader says again that it is there")
            await redis.hset(shard.keys.sweep, "readers_spared_until", 0)
            await sweep_for(shard, LONGER_MS)
            await worker.send(worker.ending(worker.claims["x"], 2, 1))
            assert (await waiting).start == 2


async def test_a_real_worker_stops(redis_url: str, producer: Producer, tmp_path: Path) -> None:
    factory = WorkerFactory(redis_url, tmp_path)
    try:
        worker = factory.engine("w", model__path="synthetic", worker__lease_ms=500)
        stream = await producer.generate(
            "hi", id="x", on_disconnect="cancel", max_tokens=100_000, ignore_eos=True
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGER_MS / 1000
        async for _ in stream:
            if loop.time() > until:
                break
        assert (await producer.status("x")).state is State.RUNNING
        await stream.aclose()

        async def ended() -> bool:
            return (await producer.status("x")).end is not None

        await eventually(ended, "the request is cancelled")
        with pytest.raises(RequestFailed, match=r"cancelled \(disconnected\)"):
            await producer.result("x")
        # It counts what a sweep has ended when the answer arrives, a moment after the end.
        wait_until(lambda: worker.metric("swept_requests_total") >= 1, "the sweep is counted")
    finally:
        factory.close()
