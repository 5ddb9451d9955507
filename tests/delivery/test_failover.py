"""A replica takes over that lacks the primary's last writes: mended, or told; never mixed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from delivery.fleet import FakeWorker, Shard
from redis.asyncio import Redis

from penstock.producer import Producer
from penstock.shared.errors import StreamDiverged
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.events import Chunk, rolling_digest
from penstock.shared.scripts.operations import Append, Claim

KEPT, SHOWN, WHOLE = 5, 10, 14
REPETITIONS = [1, pytest.param(20, marks=pytest.mark.slow)]


@dataclass
class Pair:
    """A primary and its replica."""

    primary: Shard
    replica: Shard
    urls: tuple[str, str]

    async def follow(self) -> None:
        """The replica follows the primary, which is empty."""
        await self.primary.redis.flushall()
        # These servers have no directory to write the copy to, and Redis 6.2 does so by default.
        await self.primary.redis.config_set("repl-diskless-sync", "yes")
        await self.primary.redis.config_set("repl-diskless-sync-delay", 0)
        await self.replica.redis.config_set("repl-diskless-load", "swapdb")
        port = self.primary.redis.connection_pool.connection_kwargs["port"]
        await self.replica.redis.execute_command("REPLICAOF", "127.0.0.1", port)
        deadline = time.monotonic() + 60
        while not await self.primary.redis.wait(1, 100):
            assert time.monotonic() < deadline, "the replica does not follow"
            await asyncio.sleep(0.01)

    async def promote(self) -> None:
        """The replica is cut off, and will be the primary."""
        assert await self.primary.redis.wait(1, 60_000) == 1
        await self.replica.redis.execute_command("REPLICAOF", "NO", "ONE")


@pytest.fixture
async def pair(start_redis: Callable[..., EmbeddedRedis]) -> AsyncIterator[Pair]:
    urls = start_redis(password="").url, start_redis(password="").url
    async with Redis.from_url(urls[0]) as first, Redis.from_url(urls[1]) as second:
        yield Pair(Shard(first), Shard(second), urls)


async def lose_the_tail(pair: Pair, name: str, *, lease_ms: int) -> tuple[FakeWorker, int | None]:
    """A reader has seen tokens that the new primary lacks. The owner, and the reader's digest."""
    await pair.follow()
    await pair.primary.submit(name)
    worker = pair.primary.worker(f"owner-of-{name}", lease_ms=lease_ms)
    claim = await worker.claim_one()
    await worker.send(*(worker.tokens(claim, i, 1) for i in range(KEPT)))
    await pair.promote()
    await worker.send(*(worker.tokens(claim, i, 1) for i in range(KEPT, SHOWN)))
    async with Producer(pair.urls[0]) as producer, producer.stream(name) as stream:
        while stream.index < SHOWN:
            await anext(stream)
        return worker, stream.digest


async def finish(worker: FakeWorker, claim: Claim, *items: Append) -> None:
    await worker.send(*items, worker.ending(claim, WHOLE))
    await worker.shard.compact()


@pytest.mark.parametrize("repetitions", REPETITIONS)
async def test_the_owner_lives_and_the_stream_goes_on(pair: Pair, repetitions: int) -> None:
    for number in range(repetitions):
        name, shard = f"x{number}", pair.replica
        owner, digest = await lose_the_tail(pair, name, lease_ms=60_000)
        # Its connection leads to the new primary now: it goes on where it was, and is told.
        claim, owner.shard = owner.claims[name], shard
        assert await owner.send_one(owner.tokens(claim, SHOWN, 1)) == (3, KEPT)
        assert await shard.ops.release(owner.name, [name]) == 1
        other = shard.worker(f"other{number}")
        again = await other.claim_one()
        assert (again.n, again.intact) == (KEPT, True)
        await finish(other, again, *(other.tokens(again, i, 1) for i in range(KEPT, WHOLE)))
        async with Producer(pair.urls[1]) as producer:
            stream = producer.stream(name, from_index=SHOWN, from_digest=digest)
            assert len((await stream.collect()).token_ids) == WHOLE - SHOWN
            assert len((await producer.result(name)).token_ids) == WHOLE
        await shard.check(ended=True)


@pytest.mark.parametrize("repetitions", REPETITIONS)
async def test_the_owner_is_lost_too_and_readers_are_told(pair: Pair, repetitions: int) -> None:
    for number in range(repetitions):
        name, shard = f"x{number}", pair.replica
        _, digest = await lose_the_tail(pair, name, lease_ms=300)
        await shard.reap()
        other = shard.worker(f"other{number}")
        claim = await other.claim_one()
        assert claim.n == KEPT
        # It samples without a seed, or on other hardware: other tokens follow.
        ids = [token for chunk in claim.chunks for token in chunk.token_ids]
        ids += range(100, 100 + WHOLE - KEPT)
        tail = [
            Chunk(i, (ids[i],), "?", rolling_digest(ids[: i + 1])).pack()
            for i in range(KEPT, WHOLE)
        ]
        rows = [Append(name, claim.epoch, KEPT + i, 1, packed) for i, packed in enumerate(tail)]
        await finish(other, claim, *rows)
        async with Producer(pair.urls[1]) as producer:
            with pytest.raises(StreamDiverged):
                await producer.stream(name, from_index=SHOWN, from_digest=digest).collect()
            assert list((await producer.result(name)).token_ids) == ids
