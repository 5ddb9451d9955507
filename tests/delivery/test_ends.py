"""How requests end: by a cancel, by their worker, by time. Always once."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from delivery.fleet import Shard
from log_writer import eventually
from redis.asyncio import Redis

from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason, State

RACES = 1000


async def test_cancel_against_finish_ends_once(shard: Shard, any_redis_url: str) -> None:
    """Thousands of races through two connections; who wins, wins alone, and both are told."""
    async with Redis.from_url(any_redis_url) as second:
        canceller = shard.with_client(second)
        worker = shard.worker("a")
        for start in range(0, RACES, 100):
            names = [f"x{i}" for i in range(start, start + 100)]
            for name in names:
                await shard.submit(name)
            claims = await worker.claim(100)
            sent, *replies = await asyncio.gather(
                worker.send(*(worker.ending(claim, 0, 1) for claim in claims)),
                *(canceller.ops.cancel(name) for name in names),
            )
            for (
                claim,
                (status, _),
            ) in zip(claims, sent, strict=True):
                reply = replies[names.index(claim.id)]
                end = await shard.end(claim.id)
                assert reply.changed == (status == 2), (reply, status)
                assert end.reason is (Reason.CLIENT if reply.changed else Reason.LENGTH)
                assert reply.state == end.state == await shard.state(claim.id)
    assert await shard.counter("ended:completed") + await shard.counter("ended:cancelled") == RACES
    await shard.check(ended=True)


async def test_both_sides_win_some_races(shard: Shard, any_redis_url: str) -> None:
    """Or the test above would race nothing."""
    worker = shard.worker("a")
    won: Counter[bool] = Counter()
    async with Redis.from_url(any_redis_url) as second:
        canceller = shard.with_client(second)
        for i in range(2000):
            await shard.submit(f"x{i}")
            claim = await worker.claim_one()
            ending, cancel = (
                worker.send_one(worker.ending(claim, 0)),
                canceller.ops.cancel(claim.id),
            )
            pair = (ending, cancel) if i % 2 else (cancel, ending)
            replies = await asyncio.gather(*pair)
            won[replies[i % 2].changed] += 1
            if min(won[True], won[False]) >= 20:
                return
    pytest.fail(f"one side always won: {won}")


async def test_cancel_while_queued_running_and_ended(shard: Shard) -> None:
    worker = shard.worker("a")
    for name in ("ended", "running", "queued"):
        await shard.submit(name)
    await worker.claim(2)
    await worker.send(worker.ending(worker.claims["ended"], 0))
    reply = await shard.ops.cancel("ended")
    assert (reply.changed, reply.state) == (False, State.COMPLETED)
    assert (await shard.ops.cancel("running")).changed
    assert (await shard.ops.cancel("queued", Reason.DISCONNECTED)).changed
    reply = await shard.ops.cancel("queued")
    assert (reply.changed, reply.state) == (False, State.CANCELLED)
    reply = await shard.ops.cancel("never")
    assert (reply.changed, reply.state) == (False, None)
    assert (await shard.end("running")).reason is Reason.CLIENT
    assert (await shard.end("queued")).reason is Reason.DISCONNECTED
    await shard.check(ended=True)


async def test_readers_end_what_is_overdue_and_nothing_else(shard: Shard) -> None:
    """What a sweep would do, by name: for a server without a living worker."""
    worker = shard.worker("a")
    await shard.submit("running", deadline_ms=300)
    await worker.claim_one()
    await shard.submit("waited", max_queue_ms=1)
    await shard.submit("early")
    assert not await shard.ops.expire("never")
    for name in ("running", "waited"):
        await eventually(partial(shard.ops.expire, name), f"{name} has expired")
        assert await shard.ops.expire(name)  # it has ended
    assert not await shard.ops.expire("early")
    assert (await shard.end("running")).reason is Reason.DEADLINE
    assert (await shard.end("waited")).reason is Reason.QUEUE_TIMEOUT
    assert (await shard.ops.cancel("early")).changed
    await shard.check(ended=True)


async def test_ends_are_published(shard: Shard) -> None:
    await shard.submit("x")
    async with shard.redis.pubsub() as channel:
        await channel.subscribe(shard.keys.channel("x"))
        assert (await channel.get_message(timeout=60))["type"] == "subscribe"
        await shard.ops.cancel("x")
        message = await channel.get_message(timeout=10)
    event = unpack_event(message["data"])
    assert isinstance(event, End)
    assert event == await shard.end("x")


async def test_deadline_of_queued_and_running(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("running", deadline_ms=300)
    claim = await worker.claim_one()
    assert await worker.send_one(worker.tokens(claim, 0, 3)) == (0, 3)
    await shard.submit("queued", deadline_ms=2)
    await shard.submit("later")
    expired = 0
    while expired < 2:
        expired += (await shard.sweep_until(lambda swept: swept.expired > 0)).expired
    assert await worker.send_one(worker.tokens(claim, 3, 1)) == (2, 3)
    for name, n in (("queued", 0), ("running", 3)):
        end = await shard.end(name)
        assert (end.reason, end.n) == (Reason.DEADLINE, n)
    assert await shard.state("later") == "queued"
    await shard.check()


async def test_claim_hands_out_nothing_past_its_deadline(shard: Shard) -> None:
    """No sweep has run yet: the claim itself ends it."""
    worker = shard.worker("a")
    await shard.submit("late", deadline_ms=1)
    await shard.submit("too-long-queued", max_queue_ms=1)
    await shard.submit("x")
    await shard.wait_ms(2)
    assert [claim.id for claim in await worker.claim(3)] == ["x"]
    assert (await shard.end("late")).reason is Reason.DEADLINE
    assert (await shard.end("too-long-queued")).reason is Reason.QUEUE_TIMEOUT
    await shard.check()


async def test_continued_work_past_its_deadline_is_not_handed_out(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x", deadline_ms=300)
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    await shard.ops.release_all("a", blame=False)
    await shard.wait_ms(claim.deadline_in_ms)
    assert await worker.claim(1) == ()
    end = await shard.end("x")
    assert (end.reason, end.n) == (Reason.DEADLINE, 2)
    await shard.check(ended=True)


async def test_time_in_the_queue_counts_until_the_first_claim_only(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x", max_queue_ms=300)
    await shard.submit("y", max_queue_ms=300, tenant="other")
    taken = await worker.claim_one()
    await shard.ops.release_all("a", blame=False)
    await shard.wait_ms(300)
    assert (await shard.sweep()).expired == 1
    other = "y" if taken.id == "x" else "x"
    assert (await shard.end(other)).reason is Reason.QUEUE_TIMEOUT
    claim = await worker.claim_one()
    assert claim.id == taken.id
    assert claim.queue_ms <= 300 < claim.age_ms
    await shard.check()


async def test_deadline_before_the_end_of_the_queue_time(shard: Shard) -> None:
    await shard.submit("x", deadline_ms=2, max_queue_ms=10_000)
    await shard.sweep_until(lambda swept: swept.expired == 1)
    assert (await shard.end("x")).reason is Reason.DEADLINE


async def test_a_sweep_is_bounded_and_the_next_goes_on(shard: Shard) -> None:
    for i in range(150):
        await shard.submit(f"x{i}", deadline_ms=1)
    await shard.wait_ms(2)
    swept = [await shard.sweep() for _ in range(4)]
    assert [s.expired for s in swept] == [64, 64, 22, 0]
    assert [s.more for s in swept] == [True, True, False, False]
    await shard.check(ended=True)


async def test_records_and_logs_expire_with_their_retention(shard: Shard) -> None:
    brief = shard.with_retention(5)
    worker = brief.worker("a")
    for i in range(4):
        await brief.submit(f"x{i}")
    claims = await worker.claim(2)
    await worker.send(worker.ending(claims[0], 0, 2), worker.ending(claims[1], 0))
    await brief.ops.cancel("x2")
    assert await shard.redis.pttl(shard.keys.request("x3")) > 0
    await brief.wait_ms(10)
    for name in ("x0", "x1", "x2"):
        assert await shard.redis.exists(shard.keys.request(name), shard.keys.log(name)) == 0
    assert await shard.state("x3") == "queued"
    await brief.ops.cancel("x3")
    await brief.wait_ms(10)
    await shard.check(ended=True)


async def test_answer_is_kept_as_long_as_its_submitter_asked(shard: Shard) -> None:
    """Whatever the retention of the worker that ends it."""
    await shard.submit("long", retention_ms=3_600_000)
    await shard.submit("other")
    worker = shard.with_retention(60_000).worker("a")
    for claim in await worker.claim(2):
        await worker.send_one(worker.ending(claim, 0, 1))
    for key in (shard.keys.request, shard.keys.log):
        assert 3_500_000 < await shard.redis.pttl(key("long")) <= 3_600_000
        assert await shard.redis.pttl(key("other")) <= 600_000
