"""What submit accepts, and what it refuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from delivery.fleet import NO_BOUNDS, FakeWorker, Shard, request
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import OutOfMemoryError

from penstock.shared.errors import IdConflict, QueueFull, RedisUnavailable
from penstock.shared.protocol.states import Lane, Reason, State
from penstock.shared.scripts.operations import Bounds, request_arguments


@pytest.fixture
async def crowd(shard: Shard, any_redis_url: str) -> AsyncIterator[Shard]:
    """The same shard through 16 connections at once."""
    pool = BlockingConnectionPool.from_url(any_redis_url, max_connections=16)
    async with Redis(connection_pool=pool) as client:
        yield shard.with_client(client)
    await pool.aclose()


async def test_a_hundred_concurrent_duplicates_run_once(crowd: Shard) -> None:
    replies = await asyncio.gather(*(crowd.submit("x") for _ in range(100)))
    assert Counter(reply.duplicate for reply in replies) == {False: 1, True: 99}
    assert [claim.id for claim in await crowd.worker("a").claim(10)] == ["x"]
    await crowd.check()


async def test_a_duplicate_is_told_the_state(shard: Shard) -> None:
    worker = shard.worker("a")
    assert (await shard.submit("x")).waiting == 1
    assert (await shard.submit("x")).state is State.QUEUED
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 3))
    reply = await shard.submit("x")
    assert (reply.duplicate, reply.state, reply.n) == (True, State.RUNNING, 3)
    await worker.send(worker.ending(claim, 3))
    reply = await shard.submit("x")
    assert (reply.duplicate, reply.state, reply.n) == (True, State.COMPLETED, 3)
    assert await shard.worker("b").claim(1) == ()
    await shard.check(ended=True)


async def test_another_payload_under_the_same_id_is_a_conflict(crowd: Shard) -> None:
    prompts = ["one", "two"] * 20
    replies = await asyncio.gather(
        *(crowd.submit("x", prompt=prompt) for prompt in prompts), return_exceptions=True
    )
    conflicts = [reply for reply in replies if isinstance(reply, IdConflict)]
    assert len(conflicts) == 20
    assert not [r for r in replies if isinstance(r, BaseException) and r not in conflicts]
    await crowd.check()


async def test_a_request_of_no_cost_and_no_bytes(shard: Shard) -> None:
    """It once stopped a claim half way: the counters went down by -0, which Redis refuses."""
    await shard.submit("beside")
    values = request_arguments(request("x"), b"", NO_BOUNDS, 60_000)
    values |= {"cost": 0, "output_cost": 0, "retention_ms": 60_000, "inbox": "", "note": ""}
    submit = shard.load("submit")
    keys = submit.header.key_names(shard.keys.prefix, values)
    await shard.redis.eval(submit.source, len(keys), *keys, *submit.header.argument_values(values))
    worker = shard.worker("a")
    claims = await worker.claim(2)
    assert [claim.id for claim in claims] == ["beside", "x"]
    await shard.check()
    await worker.send(*(worker.ending(claim, 0, 1) for claim in claims))
    await shard.check(ended=True)


async def test_an_id_is_free_again_after_its_retention(shard: Shard) -> None:
    short = shard.with_retention(1)
    await short.submit("x", prompt="one")
    worker = short.worker("a")
    claim = await worker.claim_one()
    await worker.send(worker.ending(claim, 0, 2))
    await short.wait_ms(3)
    # As if the log had outlived its record: the new life starts on an empty one.
    await shard.redis.xadd(shard.keys.log("x"), {"chunk": b"old"}, id="9-0")
    assert not (await shard.submit("x", prompt="two")).duplicate
    claim = await shard.worker("b").claim_one()
    assert await shard.worker("b").send_one(shard.worker("b").ending(claim, 0, 1)) == (0, 1)
    await shard.check(ended=True)


COST = request("x").cost_estimate
SIZE = len(request("r000").pack())

BOUNDS = {
    "requests": Bounds(requests=37),
    "tokens": Bounds(tokens=37 * COST + COST - 1),
    "bytes": Bounds(bytes=37 * SIZE + SIZE - 1),
    "tenant_requests": Bounds(tenant_requests=37),
}


@pytest.mark.parametrize("bound", BOUNDS)
async def test_bounds_are_never_exceeded_by_one(crowd: Shard, bound: str) -> None:
    """200 at once through 16 connections; then as many again as have left the queue."""
    bounds = BOUNDS[bound]

    async def flood(start: int) -> list[QueueFull]:
        replies = await asyncio.gather(
            *(crowd.submit(f"r{i:03}", bounds=bounds) for i in range(start, start + 200)),
            return_exceptions=True,
        )
        refused = [reply for reply in replies if isinstance(reply, QueueFull)]
        assert not [r for r in replies if isinstance(r, BaseException) and r not in refused]
        return refused

    refused = await flood(0)
    assert len(refused) == 163
    assert {(error.bound, error.limit) for error in refused} == {(bound, getattr(bounds, bound))}
    assert await crowd.counter("requests") == 37
    assert len(await crowd.worker("a").claim(20)) == 20
    assert len(await flood(200)) == 180
    assert await crowd.counter("requests") == 37
    await crowd.check()


async def wait_for(shard: Shard, tenant: str, ms: int) -> None:
    """As if a tenant's waiting entries had been accepted so long ago."""
    queue = shard.keys.queue(Lane.NORMAL, tenant)
    entries = await shard.redis.xrange(queue)
    await shard.redis.delete(queue)
    await shard.redis.xgroup_create(queue, "workers", "0", mkstream=True)
    for entry, values in entries:
        at, _, number = entry.decode().partition("-")
        moved = f"{int(at) - ms}-{number}"
        await shard.redis.xadd(queue, values, id=moved)
        await shard.redis.hset(shard.keys.request(values[b"id"].decode()), "entry", moved)


async def test_a_refusal_says_when_there_may_be_room(shard: Shard) -> None:
    """Ten requests have waited for 50 s: one place is free after 5 s, all that one tenant holds
    after as long as it has waited."""
    bounds = Bounds(requests=10)

    async def refusal(bounds: Bounds, tenant: str = "other") -> int:
        with pytest.raises(QueueFull) as refused:
            await shard.submit("late", tenant=tenant, bounds=bounds)
        return refused.value.retry_after_ms

    for i in range(10):
        await shard.submit(f"r{i}", bounds=bounds)
    assert await refusal(bounds) == 1000, "nothing has waited for long"
    await wait_for(shard, "default", 50_000)
    assert 5000 <= await refusal(bounds) < 7000
    assert 10_000 <= await refusal(Bounds(tokens=9 * COST)) < 12_000
    assert 50_000 <= await refusal(Bounds(tenant_requests=1), "default") < 80_000
    assert len(await shard.worker("a").claim(10)) == 10
    for i in range(10):
        await shard.submit(f"s{i}", bounds=bounds)
    assert await refusal(bounds) == 1000, "those that run do not wait"


async def test_the_bound_per_tenant_is_each_tenants_own(shard: Shard) -> None:
    bounds = Bounds(tenant_requests=2)
    for i in range(2):
        await shard.submit(f"a{i}", tenant="a", lane=list(Lane)[i], bounds=bounds)
    with pytest.raises(QueueFull):
        await shard.submit("a2", tenant="a", lane=Lane.BATCH, bounds=bounds)
    await shard.submit("b0", tenant="b", bounds=bounds)
    assert await shard.redis.exists(shard.keys.request("a2")) == 0
    await shard.check()


async def test_a_requeue_is_not_refused_by_a_full_queue(shard: Shard) -> None:
    bounds = Bounds(requests=1)
    await shard.submit("x", bounds=bounds)
    await shard.worker("a").claim_one()
    await shard.submit("y", bounds=bounds)
    await shard.ops.release_all("a", blame=False)
    assert await shard.counter("requests") == 2
    with pytest.raises(QueueFull):
        await shard.submit("z", bounds=bounds)
    await shard.check()


async def test_shortest_deadline_still_ends_with_an_event(shard: Shard) -> None:
    await shard.submit("x", deadline_ms=1)
    await shard.sweep_until(lambda swept: swept.expired == 1)
    assert (await shard.end("x")).reason is Reason.DEADLINE
    await shard.check(ended=True)


async def test_broken_queue_key_refuses_its_own_tenant_only(shard: Shard) -> None:
    await shard.redis.set(shard.keys.queue(Lane.NORMAL, "broken"), "text", px=600_000)
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await shard.submit("x", tenant="broken")
    await shard.submit("y", tenant="well")
    assert await shard.redis.exists(shard.keys.request("x")) == 0
    assert [claim.id for claim in await shard.worker("a").claim(5)] == ["y"]
    await shard.redis.delete(shard.keys.queue(Lane.NORMAL, "broken"))
    await shard.check()


async def fill_up(shard: Shard) -> FakeWorker:
    """One request is running, two wait, and maxmemory is reached."""
    worker = shard.worker("a")
    for name in ("running", "waiting", "other"):
        await shard.submit(name)
    claim = await worker.claim_one()
    assert await worker.send_one(worker.tokens(claim, 0, 2)) == (0, 2)
    await shard.redis.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        await shard.redis.set("ballast", "x")
    return worker


async def test_submit_is_refused_at_maxmemory_and_stores_nothing(shard: Shard) -> None:
    await fill_up(shard)
    with pytest.raises(RedisUnavailable, match="maxmemory"):
        await shard.submit("x")
    assert await shard.redis.exists(shard.keys.request("x")) == 0
    await shard.check()


async def test_append_runs_at_maxmemory(shard: Shard) -> None:
    worker = await fill_up(shard)
    claim = worker.claims["running"]
    assert await worker.send_one(worker.tokens(claim, 2, 1)) == (0, 3)
    assert await worker.send_one(worker.ending(claim, 3)) == (0, 3)
    await shard.check()


async def test_claim_runs_at_maxmemory(shard: Shard) -> None:
    await fill_up(shard)
    assert len(await shard.worker("b").claim(1)) == 1
    await shard.check()


async def test_cancel_runs_at_maxmemory(shard: Shard) -> None:
    await fill_up(shard)
    assert (await shard.ops.cancel("running")).changed
    assert (await shard.ops.cancel("waiting")).changed
    await shard.check()


async def test_release_runs_at_maxmemory(shard: Shard) -> None:
    await fill_up(shard)
    assert await shard.ops.release_all("a", blame=True) == 1
    await shard.check()


async def test_audit_runs_at_maxmemory(shard: Shard) -> None:
    await fill_up(shard)
    # At the cap of attempts, so that the first thing written is a dead letter.
    assert await shard.with_retry(max_attempts=0).ops.audit("a", {}) == 1
    assert len(await shard.ops.dead_letters()) == 1
    await shard.check()


async def test_sweep_runs_at_maxmemory(shard: Shard) -> None:
    await fill_up(shard)
    await shard.redis.config_set("maxmemory", 0)
    await shard.submit("late", deadline_ms=1)
    await shard.redis.config_set("maxmemory", 1)
    await shard.sweep_until(lambda swept: swept.expired == 1)
    await shard.check()


async def test_reaping_runs_at_maxmemory(shard: Shard) -> None:
    await shard.submit("x")
    await shard.worker("dead", lease_ms=1).claim_one()
    await shard.wait_ms(2)
    await fill_up(shard)
    assert (await shard.reap()).reaped == 1
    await shard.check()


async def test_a_death_at_maxmemory_keeps_its_letter(shard: Shard) -> None:
    await fill_up(shard)
    deadly = shard.with_retry(max_blames=1)
    claim = await deadly.worker("b").claim_one()
    assert await deadly.ops.release_all("b", blame=True) == 1
    assert (await shard.ops.dead_letters())[0].id == claim.id
    await shard.check()


async def test_drained_shard_takes_work_again(shard: Shard) -> None:
    await fill_up(shard)
    for name in ("running", "waiting", "other"):
        assert (await shard.ops.cancel(name)).changed
    await shard.redis.config_set("maxmemory", 0)
    await shard.submit("x")
    assert (await shard.worker("b").claim_one()).id == "x"
    await shard.check()
