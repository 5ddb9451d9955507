"""Workers that die, drain or hang: what they owned is continued, and who is to blame."""

from __future__ import annotations

import pytest
from delivery.fleet import Shard

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Lane, Reason, State


async def crash(shard: Shard, name: str) -> int:
    """A supervisor reports its dead child."""
    return await shard.ops.release_all(name, blame=True)


async def test_a_sweep_takes_over_from_a_worker_whose_lease_ended(shard: Shard) -> None:
    dead, alive = shard.worker("dead", lease_ms=1), shard.worker("alive")
    for i in range(5):
        await shard.submit(f"x{i}")
    claims = await dead.claim(3)
    await dead.send(*(dead.tokens(claim, 0, 2) for claim in claims))
    await alive.claim(2)
    swept = await shard.reap()
    assert (swept.reaped, swept.workers) == (3, 1)
    assert await shard.redis.exists(shard.keys.owned("dead")) == 0
    continued = await alive.claim(10)
    assert sorted(claim.id for claim in continued) == sorted(claim.id for claim in claims)
    assert {(claim.n, claim.epoch) for claim in continued} == {(2, 2)}
    await shard.check()


async def test_a_worker_that_goes_on_keeps_its_work(shard: Shard) -> None:
    """Its lease ended and it came back before anybody swept."""
    worker = shard.worker("a", lease_ms=1)
    await shard.submit("x")
    claim = await worker.claim_one()
    await shard.wait_ms(2)
    worker.lease_ms = 60_000
    assert await worker.send_one(worker.tokens(claim, 0, 1)) == (0, 1)
    assert (await shard.sweep()).workers == 0
    assert await worker.send_one(worker.ending(claim, 1)) == (0, 1)
    await shard.check(ended=True)


async def test_after_an_outage_only_those_that_stay_silent_are_reaped(shard: Shard) -> None:
    """Nobody could renew a lease. Whoever sweeps first knows nothing of the others yet."""
    living, dead = shard.worker("living", lease_ms=1), shard.worker("dead", lease_ms=1)
    for name in ("x", "y"):
        await shard.submit(name)
    mine = await living.claim_one()
    await dead.claim_one()
    await shard.wait_ms(2)
    await shard.let_pass(100)
    assert (await shard.sweep(lease_ms=100)).workers == 0
    living.lease_ms = 60_000
    assert await living.send_one(living.tokens(mine, 0, 1)) == (0, 1)
    swept = await shard.sweep_until(lambda swept: swept.workers > 0, lease_ms=100)
    assert (swept.reaped, swept.workers) == (1, 1)
    assert await shard.state(mine.id) == "running"
    other = next(iter(dead.claims))
    assert [(await shard.record(rid)).get("deaths") for rid in (mine.id, other)] == [None, "1"]
    await shard.check()


async def test_outage_upon_outage_spares_the_dead_once(shard: Shard) -> None:
    """As where the only worker left sweeps late each time."""
    await shard.submit("x")
    await shard.worker("dead", lease_ms=1).claim_one()
    for reaped in (0, 1):
        await shard.wait_ms(2)
        await shard.let_pass(100)
        assert (await shard.sweep(lease_ms=1)).reaped == reaped
    await shard.check()


async def test_a_pause_shorter_than_a_lease_spares_nobody(shard: Shard) -> None:
    await shard.submit("x")
    await shard.worker("dead", lease_ms=1).claim_one()
    await shard.wait_ms(2)
    await shard.let_pass(60_000 // 3 * 2)
    assert (await shard.sweep(lease_ms=60_000)).reaped == 1
    await shard.check()


async def test_a_sweep_of_a_big_worker_is_bounded_and_goes_on(shard: Shard) -> None:
    for i in range(300):
        await shard.submit(f"x{i}")
    await shard.worker("dead", lease_ms=1).claim(300)
    await shard.wait_ms(2)
    swept = [await shard.sweep() for _ in range(4)]
    assert [s.reaped for s in swept] == [128, 128, 44, 0]
    assert [s.workers for s in swept] == [0, 0, 1, 0]
    assert [s.more for s in swept] == [True, True, False, False]
    await shard.check()


async def test_a_sweep_of_many_workers_is_bounded_and_goes_on(shard: Shard) -> None:
    for i in range(6):
        await shard.submit(f"x{i}")
        await shard.worker(f"dead-{i}", lease_ms=1).claim_one()
    await shard.wait_ms(2)
    swept = [await shard.sweep() for _ in range(3)]
    assert [s.workers for s in swept] == [4, 2, 0]
    assert [s.more for s in swept] == [True, False, False]
    await shard.check()


async def test_release_of_a_big_worker_goes_on_until_all_is_given_back(shard: Shard) -> None:
    for i in range(600):
        await shard.submit(f"x{i}")
    await shard.worker("a").claim(600)
    assert await shard.ops.release_all("a", blame=False) == 600
    assert await shard.redis.zscore(shard.keys.leases, "a") is None
    await shard.check()


async def test_release_of_some_and_of_all_but_some(shard: Shard) -> None:
    worker = shard.worker("a")
    for i in range(6):
        await shard.submit(f"x{i}")
    await worker.claim(6)
    assert await shard.ops.release("a", ["x0", "x1", "never"]) == 2
    assert await shard.ops.audit("a", {"x2": 1, "x3": 1, "x0": 1}) == 2
    states = [await shard.state(f"x{i}") for i in range(6)]
    assert states == ["queued", "queued", "running", "running", "queued", "queued"]
    assert await shard.redis.zscore(shard.keys.leases, "a") is not None
    assert await shard.ops.release_all("a", blame=False) == 2
    assert await shard.redis.zscore(shard.keys.leases, "a") is None
    assert await shard.ops.release("nobody", ["x0"]) == 0
    await shard.check()


async def test_continued_work_goes_before_all_lanes(shard: Shard) -> None:
    await shard.submit("batch", lane=Lane.BATCH)
    await shard.worker("a").claim_one()
    await shard.submit("urgent", lane=Lane.CRITICAL)
    await shard.ops.release_all("a", blame=False)
    assert [claim.id for claim in await shard.worker("b").claim(2)] == ["batch", "urgent"]


async def test_released_work_wakes_the_others(shard: Shard) -> None:
    await shard.submit("x")
    worker, other = shard.worker("a", lease_ms=1), shard.worker("b")
    await worker.claim_one()
    bell = shard.ops.read_claim(await shard.call(other.claim_call(1))).bell
    await shard.reap()
    assert await shard.redis.xread({shard.keys.bell: bell})
    bell = shard.ops.read_claim(await shard.call(other.claim_call(1))).bell
    assert not await shard.redis.xread({shard.keys.bell: bell})
    await shard.ops.release_all("b", blame=False)
    assert await shard.redis.xread({shard.keys.bell: bell})


async def test_one_crash_makes_no_suspect_of_what_waited_there(shard: Shard) -> None:
    """A killed worker's whole waiting list would otherwise run one by one."""
    for i in range(10):
        await shard.submit(f"x{i}")
    await shard.worker("a").claim(10)
    await crash(shard, "a")
    claims = await shard.worker("b").claim(10)
    assert [claim.suspect for claim in claims] == [False] * 10


async def test_suspects_are_handed_out_one_at_a_time(shard: Shard) -> None:
    for name in ("x", "y", "z"):
        await shard.submit(name)
    for name in ("a", "b"):
        await shard.worker(name).claim(3)
        await crash(shard, name)
    worker, other = shard.worker("c"), shard.worker("d")
    await shard.submit("fresh")
    claims = await worker.claim(10)
    assert [claim.suspect for claim in claims] == [True, False]
    assert claims[1].id == "fresh"
    assert await worker.claim(10, suspect_ok=False) == ()
    assert [claim.suspect for claim in await other.claim(10)] == [True]
    assert [claim.suspect for claim in await worker.claim(10)] == [True]
    await shard.check()


async def test_progress_clears_of_blame(shard: Shard) -> None:
    await shard.submit("x")
    for n in range(12):
        worker = shard.worker(f"w{n}")
        claim = await worker.claim_one()
        assert not claim.suspect
        await worker.send(worker.tokens(claim, n, 1))
        await crash(shard, worker.name)
    assert (await shard.record("x"))["blames"] == "0"
    await shard.check()


async def test_poison_ends_dead_and_bystanders_do_not(shard: Shard) -> None:
    """Every worker that runs `poison` dies; all others complete."""
    for i in range(12):
        await shard.submit(f"good{i}", max_tokens=2)
        if i == 5:
            await shard.submit("poison", prompt="kill", max_tokens=2)
    crashes = 0
    for n in range(200):
        worker = shard.worker(f"w{n}")
        claims = await worker.claim(4)
        if not claims:
            break
        if any(claim.id == "poison" for claim in claims):
            crashes += 1
            await crash(shard, worker.name)
            continue
        await worker.send(*(worker.ending(claim, claim.n, 2) for claim in claims))
    assert crashes == 5
    assert {await shard.state(f"good{i}") for i in range(12)} == {"completed"}
    end = await shard.end("poison")
    assert (end.reason, end.n) == (Reason.POISON, 0)
    (letter,) = await shard.ops.dead_letters()
    assert (letter.id, letter.reason, letter.blames) == ("poison", Reason.POISON, 5)
    assert Request.unpack(letter.payload).prompt == "kill"
    await shard.check(ended=True)


async def test_progress_with_every_crash_ends_at_the_cap(shard: Shard) -> None:
    shard = shard.with_retry(max_attempts=4, max_blames=3)
    await shard.submit("x")
    for n in range(4):
        worker = shard.worker(f"w{n}")
        claim = await worker.claim_one()
        await worker.send(worker.tokens(claim, n, 1))
        await crash(shard, worker.name)
    end = await shard.end("x")
    assert (end.reason, end.n) == (Reason.ATTEMPTS, 4)
    (letter,) = await shard.ops.dead_letters()
    assert (letter.n, letter.attempts) == (4, 4)
    await shard.check(ended=True)


async def test_a_request_whose_workers_are_killed_ends_at_the_cap(shard: Shard) -> None:
    """As the system does for memory: SIGKILL is no crash, so nobody is ever blamed."""
    shard = shard.with_retry(max_attempts=4, max_blames=2)
    await shard.submit("x")
    for n in range(4):
        claim = await shard.worker(f"w{n}").claim_one()
        assert not claim.suspect
        await shard.ops.release_all(f"w{n}", blame=False, died=True)
    end = await shard.end("x")
    assert (end.reason, end.n) == (Reason.ATTEMPTS, 0)
    await shard.check(ended=True)


async def test_draining_is_nobodys_fault(shard: Shard) -> None:
    shard = shard.with_retry(max_attempts=2, max_blames=2)
    await shard.submit("x")
    for n in range(10):
        await shard.worker(f"w{n}").claim_one()
        await shard.ops.release_all(f"w{n}", blame=False)
    claim = await shard.worker("last").claim_one()
    assert (claim.attempts, claim.suspect) == (11, False)
    await shard.check()


async def bury(shard: Shard, name: str, **fields: object) -> str:
    """A request that is dead; returns its dead letter."""
    await shard.submit(name, **fields)
    deadly = shard.with_retry(max_blames=1)
    claim = await deadly.worker("w").claim_one()
    assert claim.id == name
    await crash(deadly, "w")
    assert await shard.state(name) == "dead"
    return (await shard.ops.dead_letters())[-1].entry


async def test_redrive_starts_a_new_life(shard: Shard) -> None:
    entry = await bury(
        shard, "x", lane=Lane.BATCH, tenant="t", prompt="p", deadline_ms=5000, max_queue_ms=4000
    )
    before = await shard.now_ms()
    reply = await shard.ops.redrive(entry)
    assert (reply.done, reply.state) == (True, None)
    record = await shard.record("x")
    assert (record["state"], record["tokens"], record["lane"], record["tenant"]) == (
        "queued",
        "0",
        "batch",
        "t",
    )
    assert before + 5000 <= int(record["deadline"]) <= await shard.now_ms() + 5000
    assert before + 4000 <= int(record["queue_deadline"]) <= await shard.now_ms() + 4000
    assert await shard.log("x") == []
    assert await shard.ops.dead_letters() == []
    # The submit that made it is still known: it is a duplicate, not a conflict.
    assert (await shard.submit(
        "x", lane=Lane.BATCH, tenant="t", prompt="p", deadline_ms=5000, max_queue_ms=4000
    )).duplicate  # fmt: skip
    worker = shard.worker("b")
    claim = await worker.claim_one()
    assert Request.unpack(claim.payload).prompt == "p"
    assert (claim.attempts, claim.suspect) == (1, False)
    await worker.send(worker.ending(claim, 0, 3))
    await shard.check(ended=True)


async def test_an_owner_in_the_former_life_is_fenced_in_the_next(shard: Shard) -> None:
    """The same worker even: it stalled, was given up, woke up, and claimed the redriven request."""
    worker = shard.worker("w")
    await bury(shard, "x")
    (letter,) = await shard.ops.dead_letters()
    await shard.ops.redrive(letter.entry)
    claim = await worker.claim_one()
    old = worker.tokens(claim, 0, 1)
    old = type(old)(old.id, 1, old.start, old.num_tokens, old.chunk)
    assert await worker.send_one(old) == (2, 0)
    assert await worker.send_one(worker.tokens(claim, 0, 1)) == (0, 1)


async def test_redrive_of_what_is_not_there_or_in_use(shard: Shard) -> None:
    entry = await bury(shard, "x")
    reply = await shard.ops.redrive("1-1")
    assert (reply.done, reply.state) == (False, None)
    await shard.redis.delete(shard.keys.request("x"), shard.keys.log("x"))
    await shard.submit("x", prompt="another")
    reply = await shard.ops.redrive(entry)
    assert (reply.done, reply.state) == (False, State.QUEUED)
    await shard.ops.cancel("x")
    assert (await shard.ops.redrive(entry)).state is State.CANCELLED
    await shard.redis.delete(shard.keys.request("x"), shard.keys.log("x"))
    assert (await shard.ops.redrive(entry)).done
    assert not (await shard.ops.redrive(entry)).done
    await shard.check()


async def test_redrive_is_refused_at_maxmemory_and_keeps_the_letter(shard: Shard) -> None:
    entry = await bury(shard, "x")
    await shard.redis.config_set("maxmemory", 1)
    with pytest.raises(Exception, match="maxmemory"):
        await shard.ops.redrive(entry)
    assert await shard.state("x") == "dead"
    assert len(await shard.ops.dead_letters()) == 1
    await shard.check(ended=True)


async def test_dead_letters_are_listed_shown_and_dropped(shard: Shard) -> None:
    entries = [await bury(shard, f"x{i}") for i in range(5)]
    first = await shard.ops.dead_letters(count=2)
    rest = await shard.ops.dead_letters(after=first[-1].entry)
    assert [letter.entry for letter in first + rest] == entries
    shown = await shard.ops.dead_letter(entries[3])
    assert shown is not None
    assert shown.id == "x3"
    assert await shard.ops.drop_dead_letter(entries[3])
    assert not await shard.ops.drop_dead_letter(entries[3])
    assert await shard.ops.dead_letter(entries[3]) is None
    with pytest.raises(InvalidRequest, match="entry"):
        await shard.ops.dead_letter("x3")
    await shard.check(ended=True)


async def test_dead_workers_leave_no_consumers_in_a_queue_that_never_empties(shard: Shard) -> None:
    for i in range(40):
        await shard.submit(f"x{i}")
    for n in range(20):
        worker = shard.worker(f"w{n}")
        claim = await worker.claim_one()
        await worker.send(worker.ending(claim, claim.n, 1))
        await worker.claim(1)
        await shard.ops.release_all(worker.name, blame=False)
    queue = shard.keys.queue(Lane.NORMAL, "default")
    assert await shard.redis.xlen(queue) > 0
    assert await shard.redis.xinfo_consumers(queue, "workers") == []
    await shard.check()


async def test_asking_for_continued_work_leaves_no_consumer(shard: Shard) -> None:
    """The queue of continued work exists, and all in it is being run by another."""
    await shard.submit("x")
    await shard.worker("a").claim_one()
    await shard.ops.release_all("a", blame=False)
    await shard.worker("b").claim_one()
    for n in range(5):
        assert await shard.worker(f"w{n}").claim(1) == ()
    (consumer,) = await shard.redis.xinfo_consumers(shard.keys.continued(Lane.NORMAL), "workers")
    assert consumer["name"] == b"b"
    await shard.check()
