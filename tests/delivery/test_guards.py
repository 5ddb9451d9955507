"""One test per guard of the scripts; ``test_mutants.py`` shows that each notices its loss."""

from __future__ import annotations

from delivery.fleet import MINUTE_MS, FakeWorker, Shard

from penstock.shared.protocol.states import Reason
from penstock.shared.scripts.operations import AppendStatus

LONG_AGO = 1


async def take_over(shard: Shard, old: FakeWorker, new: FakeWorker) -> None:
    """The old worker's lease ends; the new one claims its only request and is in prefill."""
    await shard.redis.zadd(shard.keys.leases, {old.name: LONG_AGO})
    assert (await shard.sweep()).reaped == 1
    await new.claim_one()


async def test_epoch_fences_a_worker_that_claimed_its_own_request_again(shard: Shard) -> None:
    """Its earlier steps are still under way: same worker, and the index fits, in prefill."""
    worker = shard.worker("a")
    await shard.submit("x")
    first = await worker.claim_one()
    assert await worker.send_one(worker.tokens(first, 0, 2)) == (0, 2)
    await take_over(shard, worker, worker)
    assert await worker.send_one(worker.tokens(first, 2, 3)) == (2, 2)
    assert await worker.send_one(worker.ending(first, 2)) == (2, 2)
    assert await worker.send_one(worker.tokens(worker.claims["x"], 2, 1)) == (0, 3)
    await shard.check()


async def test_zombie_is_fenced_in_its_successors_prefill(shard: Shard) -> None:
    """The index guard cannot see it: the successor has published nothing yet."""
    zombie, successor = shard.worker("zombie"), shard.worker("successor")
    for _ in range(20):
        await shard.submit("x")
        claim = await zombie.claim_one()
        assert await zombie.send_one(zombie.tokens(claim, 0, 2)) == (0, 2)
        await take_over(shard, zombie, successor)
        late = [
            zombie.tokens(claim, 2, 3),
            zombie.ending(claim, 2),
            zombie.ending(claim, 2, 3),
        ]
        assert await zombie.send(*late) == [(2, 2)] * 3
        assert await shard.ops.release("zombie", ["x"]) == 0
        assert await shard.ops.release_all("zombie", blame=True) == 0
        assert await shard.state("x") == "running"
        mine = successor.claims["x"]
        assert await successor.send_one(successor.tokens(mine, 2, 1)) == (0, 3)
        assert await successor.send_one(successor.ending(mine, 3)) == (0, 3)
        assert (await shard.end("x")).n == 3
        await shard.check(ended=True)
        await shard.redis.delete(shard.keys.request("x"))


async def test_owner_is_compared_too(shard: Shard) -> None:
    """A failover that lost a claim gave two workers the same epoch."""
    first, second = shard.worker("first"), shard.worker("second")
    await shard.submit("x")
    lost = await first.claim_one()
    await take_over(shard, first, second)
    # What the old primary knew and the new one does not: that `second` is at epoch 1 again.
    await shard.redis.hset(shard.keys.request("x"), "epoch", lost.epoch)
    assert await first.send_one(first.tokens(lost, 0, 1)) == (2, 0)
    assert await shard.log("x") == []


async def test_state_fences_between_release_and_the_next_claim(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    await shard.ops.release_all("a", blame=False)
    assert await worker.send_one(worker.tokens(claim, 0, 1)) == (2, 0)
    assert await worker.send_one(worker.ending(claim, 0)) == (2, 0)
    await shard.check()


async def test_terminal_state_fences_its_own_owner(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    assert (await shard.ops.cancel("x")).changed
    assert await worker.send_one(worker.tokens(claim, 0, 1)) == (2, 0)
    assert await worker.send_one(worker.ending(claim, 0)) == (2, 0)
    assert (await shard.end("x")).reason is Reason.CLIENT
    await shard.check(ended=True)


async def test_index_refuses_gap_overlap_and_early_end(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 3))
    assert await worker.send_one(worker.tokens(claim, 4, 1)) == (3, 3)  # gap
    assert await worker.send_one(worker.tokens(claim, 2, 2)) == (3, 3)  # overlap
    assert await worker.send_one(worker.tokens(claim, 0, 2)) == (3, 3)  # older than the last
    assert await worker.send_one(worker.ending(claim, 2)) == (3, 3)
    assert await worker.send_one(worker.ending(claim, 4)) == (3, 3)
    assert await worker.send_one(worker.tokens(claim, 3, 1)) == (0, 4)
    assert len(await shard.tokens("x")) == 4
    await shard.check()


async def test_repeat_after_a_lost_reply_changes_nothing(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    for item in (worker.tokens(claim, 0, 2), worker.tokens(claim, 2, 1)):
        first = await worker.send_one(item)
        assert [await worker.send_one(item) for _ in range(3)] == [first] * 3
        assert first[0] == AppendStatus.WRITTEN
    last = worker.ending(claim, 3, 2)
    assert [await worker.send_one(last) for _ in range(3)] == [(0, 5)] * 3
    assert await shard.counter("ended:completed") == 1
    assert len(await shard.log("x")) == 4
    await shard.check(ended=True)


async def test_repeat_of_a_bare_end_changes_nothing(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    last = worker.ending(claim, 0)
    assert [await worker.send_one(last) for _ in range(3)] == [(0, 0)] * 3
    # Another end than the one that is there is no repeat.
    assert await worker.send_one(worker.ending(claim, 0, reason=Reason.STOP)) == (2, 0)
    await shard.check(ended=True)


async def test_every_step_renews_the_lease(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    for call in (worker.append_call(worker.tokens(claim, 0, 1)), worker.claim_call(0)):
        await shard.redis.zadd(shard.keys.leases, {"a": LONG_AGO})
        before = await shard.now_ms()
        await shard.call(call)
        lease = await shard.redis.zscore(shard.keys.leases, "a")
        assert lease is not None
        assert before + MINUTE_MS <= lease <= await shard.now_ms() + MINUTE_MS
        assert (await shard.sweep()).workers == 0
    assert await shard.state("x") == "running"


async def test_audit_gives_back_a_claim_whose_reply_was_lost(shard: Shard) -> None:
    worker, other = shard.worker("a"), shard.worker("b")
    for name in ("known", "orphan-1", "orphan-2"):
        await shard.submit(name)
    await worker.claim(1)
    await shard.call(worker.claim_call(2))  # the reply is lost
    assert await shard.ops.audit("a", {"known": 1}) == 2
    assert await shard.state("known") == "running"
    assert {(await shard.record(name)).get("deaths") for name in ("orphan-1", "orphan-2")} == {"0"}
    assert {claim.id for claim in await other.claim(5)} == {"orphan-1", "orphan-2"}
    assert await shard.ops.audit("a", {"known": 1}) == 0
    await shard.check()


async def test_audit_gives_back_a_lost_claim_of_what_the_worker_owned_before(
    shard: Shard,
) -> None:
    """Its lease lapsed unnoticed; the reply to its next claim of the same request is lost."""
    worker, other = shard.worker("a"), shard.worker("b")
    await shard.submit("x")
    first = await worker.claim_one()
    await take_over(shard, worker, worker)
    assert await shard.ops.audit("a", {"x": first.epoch}) == 1
    await other.claim_one()
    assert await shard.ops.audit("b", {"x": other.claims["x"].epoch}) == 0
    await shard.check()


async def test_end_acknowledges_and_deletes_the_entry(shard: Shard) -> None:
    worker = shard.worker("a")
    for name in ("x", "y"):
        await shard.submit(name)
    await worker.claim(2)
    queue = (await shard.record("x"))["queue"]
    assert (await shard.redis.xpending(queue, "workers"))["pending"] == 2
    await worker.send(worker.ending(worker.claims["x"], 0))
    assert (await shard.redis.xpending(queue, "workers"))["pending"] == 1
    assert await shard.redis.xlen(queue) == 1
    await worker.send(worker.ending(worker.claims["y"], 0))
    assert await shard.redis.exists(queue) == 0
    await shard.check(ended=True)


async def test_a_claim_hands_each_request_out_once(shard: Shard) -> None:
    for i in range(30):
        await shard.submit(f"x{i}", tenant=f"t{i % 3}")
    claimed = []
    for i in range(40):
        claimed += await shard.worker(f"w{i % 4}").claim(1)
    assert sorted(claim.id for claim in claimed) == sorted(f"x{i}" for i in range(30))
    await shard.check()


async def test_claim_of_continued_work_carries_the_log(shard: Shard) -> None:
    first, second = shard.worker("a"), shard.worker("b")
    await shard.submit("x")
    claim = await first.claim_one()
    await first.send(first.tokens(claim, 0, 2))
    await first.send(first.tokens(claim, 2, 3))
    await shard.ops.release_all("a", blame=False)
    claim = await second.claim_one()
    assert (claim.n, claim.epoch, claim.attempts, claim.intact) == (5, 2, 2, True)
    assert [c.start for c in claim.chunks] == [0, 2]
    assert claim.ttft_ms is not None
    assert claim.payload
