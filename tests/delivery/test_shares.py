"""How much one claim takes: no more than its worker's share of what waits."""

from __future__ import annotations

from delivery.fleet import Shard

from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.operations import ClaimReply


async def wait_for_claim(shard: Shard, count: int, lane: Lane = Lane.NORMAL) -> None:
    for i in range(count):
        await shard.submit(f"{lane.value}{i}", lane=lane)


def brought(reply: ClaimReply) -> tuple[int, bool]:
    return len(reply.claims), reply.more


async def test_a_burst_is_spread_over_all_workers(shard: Shard) -> None:
    """Each takes what waits over three, rounded up, until nothing is left."""
    workers = [shard.worker(name) for name in "abc"]
    for worker in workers:
        assert brought(await worker.claim_share(16)) == (0, False)
    await wait_for_claim(shard, 10)
    replies = [await worker.claim_share(16) for worker in workers]
    assert [brought(reply) for reply in replies] == [(4, True), (2, True), (2, True)]
    replies = [await worker.claim_share(16) for worker in workers]
    assert [brought(reply) for reply in replies] == [(1, True), (1, False), (0, False)]
    await shard.check()


async def test_a_lone_worker_takes_all(shard: Shard) -> None:
    """Those whose leases have ended have no share."""
    gone, worker = shard.worker("gone", lease_ms=1), shard.worker("w")
    await gone.claim_share(1)
    await shard.wait_ms(2)
    await wait_for_claim(shard, 10)
    assert brought(await worker.claim_share(16)) == (10, False)


async def test_what_ends_a_claim_before_its_share_leaves_no_more_to_ask_for(shard: Shard) -> None:
    other, worker = shard.worker("other"), shard.worker("w")
    await other.claim_share(1)
    await wait_for_claim(shard, 10)
    assert brought(await worker.claim_share(3)) == (3, False)
    assert brought(await worker.claim_share(16, tokens=1)) == (1, False)
    assert brought(await worker.claim_share(0)) == (0, False)


async def test_a_claim_of_urgent_work_shares_that_alone(shard: Shard) -> None:
    other, worker = shard.worker("other"), shard.worker("w")
    await other.claim_share(1)
    await wait_for_claim(shard, 9, Lane.BATCH)
    await wait_for_claim(shard, 4, Lane.CRITICAL)
    reply = await worker.claim_share(16, least_urgent=Lane.CRITICAL)
    assert brought(reply) == (2, True)
    assert {claim.id for claim in reply.claims} == {"critical0", "critical1"}


async def test_wrong_counters_hold_nothing_up(shard: Shard) -> None:
    worker = shard.worker("w")
    await wait_for_claim(shard, 5)
    await shard.redis.hset(shard.keys.counters, "requests:normal", 2)
    assert brought(await worker.claim_share(16)) == (2, False)
    await shard.redis.delete(shard.keys.counters)
    assert brought(await worker.claim_share(16)) == (1, False)
    assert [len((await worker.claim_share(16)).claims) for _ in range(3)] == [1, 1, 0]
