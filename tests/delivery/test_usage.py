"""The usage ledger: every end counts once, with what its event says, and nothing else counts."""

from __future__ import annotations

from typing import Any

import pytest
from delivery.fleet import FakeWorker, Shard
from delivery.recount import read_usage, today

from penstock.shared.protocol.events import End, Usage
from penstock.shared.protocol.plain_entry import Entry, Refusal
from penstock.shared.protocol.states import Answer, Lane, Reason
from penstock.shared.scripts.ingress_operations import IngressOperations
from penstock.shared.scripts.operations import DAY_MS, Bounds, Operations
from penstock.shared.scripts.replies import Used
from penstock.shared.scripts.usage_ledger import UsageCounts, day_number

USAGE = Usage(
    prompt_tokens=7, output_tokens=5, cached_tokens=3, queue_ms=11, ttft_ms=13, attempts=1,
    drafted_tokens=17, device_us=19,
)  # fmt: skip
COUNTED = UsageCounts(1, 7, 3, 5, 17, 11, 19)


async def ledger(shard: Shard) -> dict[tuple[str, str, str], UsageCounts]:
    """By lane, state and tenant."""
    return await read_usage(shard.redis, shard.keys)


async def ledger_key(shard: Shard) -> str:
    return shard.keys.usage(day_number(await today(shard.redis)))


async def complete(worker: FakeWorker, usage: Usage | None = USAGE) -> None:
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    await worker.send(worker.ending(claim, 2, 3, usage=usage))


async def test_an_end_counts_what_its_event_says(shard: Shard) -> None:
    worker = shard.worker("a")
    for name, lane, tenant in (
        ("x", Lane.BATCH, "t"),
        ("y", Lane.BATCH, "t"),
        ("z", "normal", "u"),
    ):
        await shard.submit(name, lane=lane, tenant=tenant)
        await complete(worker)
    assert await ledger(shard) == {
        ("batch", "completed", "t"): COUNTED.plus(COUNTED),
        ("normal", "completed", "u"): COUNTED,
    }


async def test_a_json_end_counts_the_same(shard: Shard) -> None:
    await shard.submit("x", answer="json")
    worker = shard.worker("a")
    claim = await worker.claim_one()
    end = End(n=0, reason=Reason.STOP, usage=USAGE)
    item = worker.ending(claim, 0, reason=Reason.STOP)
    await worker.send(item._replace(end=end.pack(Answer.JSON)))
    assert await ledger(shard) == {("normal", "completed", "default"): COUNTED}


async def test_repeats_and_former_owners_count_nothing(shard: Shard) -> None:
    worker, other = shard.worker("a"), shard.worker("b")
    await shard.submit("x")
    lost = await worker.claim_one()
    await shard.ops.release_all("a", blame=False)
    claim = await other.claim_one()
    zombie = worker.ending(lost, 0, 1, usage=USAGE)
    item = other.ending(claim, 0, 1, usage=USAGE)
    assert await worker.send_one(zombie) == (2, 0)
    for _ in range(3):
        assert await other.send_one(item) == (0, 1)
    assert await worker.send_one(zombie) != (0, 0)
    assert not (await shard.ops.cancel("x")).changed
    assert await ledger(shard) == {("normal", "completed", "default"): COUNTED}


async def test_an_end_without_its_worker_has_what_the_worker_told(shard: Shard) -> None:
    """A client that leaves is charged for its prompt, too."""
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    told = Used(7, 3, 0, 40)
    await worker.send(worker.tokens(claim, 0, 2)._replace(used=told.pack()))
    await worker.send(worker.tokens(claim, 2, 1))
    await worker.send(worker.tokens(claim, 3, 1)._replace(used=Used(7, 3, 9, 60).pack()))
    await shard.ops.cancel("x")
    end = await shard.end("x")
    assert end.usage == Usage(
        prompt_tokens=7, output_tokens=4, cached_tokens=3, queue_ms=claim.queue_ms,
        ttft_ms=end.usage.ttft_ms if end.usage else None, attempts=1, drafted_tokens=9,
        device_us=60,
    )  # fmt: skip
    counted = UsageCounts(1, 7, 3, 4, 9, claim.queue_ms, 60)
    assert await ledger(shard) == {("normal", "cancelled", "default"): counted}
    assert "usage" not in await shard.record("x")


async def test_the_next_worker_goes_on_with_what_was_told(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    assert claim.used == Used()
    await worker.send(worker.tokens(claim, 0, 1)._replace(used=Used(7, 3, 0, 40).pack()))
    await shard.ops.release_all("a", blame=False)
    assert (await shard.worker("b").claim_one()).used == Used(7, 3, 0, 40)


async def test_usage_that_is_none_is_refused(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x")
    claim = await worker.claim_one()
    for packed in ("1 2 3", "1 2 3 -4", "1 2 3 x"):
        item = worker.tokens(claim, 0, 1)._replace(used=packed)
        assert await worker.send_one(item) == (9, 0)
    assert await worker.send_one(worker.tokens(claim, 0, 1)) == (0, 1)


async def test_every_way_to_end_counts_once(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("cancelled", tenant="t")
    await shard.ops.cancel("cancelled")
    await shard.submit("late", deadline_ms=1)
    await shard.wait_ms(2)
    await shard.sweep()
    await shard.submit("later", max_queue_ms=1)
    await shard.wait_ms(2)
    assert await worker.claim(1) == ()
    await shard.submit("left", on_disconnect="cancel")
    await shard.ops.reader_heartbeat(["left"], grace_ms=1)
    await shard.sweep_until(lambda swept: swept.abandoned == 1)
    await shard.submit("dead", lane=Lane.CRITICAL)
    deadly = shard.with_retry(max_blames=1)
    await deadly.worker("w").claim_one()
    await deadly.ops.release_all("w", blame=True)
    await shard.submit("failed")
    claim = await worker.claim_one()
    await worker.send(worker.ending(claim, 0, reason=Reason.ENGINE_ERROR, usage=None))
    assert {place: counts.requests for place, counts in (await ledger(shard)).items()} == {
        ("normal", "cancelled", "t"): 1,
        ("normal", "expired", "default"): 2,
        ("normal", "cancelled", "default"): 1,
        ("critical", "dead", "default"): 1,
        ("normal", "failed", "default"): 1,
    }


async def test_a_lost_record_counts_once(shard: Shard) -> None:
    worker = shard.worker("a")
    for name in ("running", "waiting"):
        await shard.submit(name, lane=Lane.BATCH, tenant="t")
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    await shard.redis.delete(shard.keys.request("running"), shard.keys.request("waiting"))
    for _ in range(2):
        assert await worker.send_one(worker.tokens(claim, 2, 1)) == (4, 0)
        assert await worker.claim(1) == ()
        await shard.sweep()
    counted = UsageCounts(requests=2, output_tokens=2)
    assert await ledger(shard) == {("batch", "failed", "t"): counted}


async def test_a_lost_record_that_a_sweep_finds_counts_for_nobody_known(shard: Shard) -> None:
    await shard.submit("hurt", lane=Lane.BATCH, tenant="t")
    await shard.redis.delete(shard.keys.request("hurt"), shard.keys.queue(Lane.BATCH, "t"))
    assert (await shard.sweep()).repaired == 1
    await shard.sweep()
    assert await ledger(shard) == {("(unknown)", "failed", "(unknown)"): UsageCounts(1)}


def ingress(shard: Shard) -> IngressOperations:
    return IngressOperations(
        shard.redis, shard.keys, retention_ms=shard.retention_ms, bounds=Bounds(requests=1),
        default_deadline_ms=60_000, load=shard.load,
    )  # fmt: skip


async def add_entry(shard: Shard, tenant: str | None) -> Entry:
    name = await shard.redis.xadd(shard.keys.ingress(tenant), {"prompt": "x"})
    return Entry(tenant, name.decode(), (b"prompt", b"x"))


async def test_a_refused_entry_of_the_ingress_counts_once(shard: Shard) -> None:
    operations = ingress(shard)
    for tenant in (None, "acme"):
        entry = await add_entry(shard, tenant)
        refusal = Refusal(entry.own_id, Answer.MSGPACK, Reason.INVALID, "no")
        for _ in range(3):
            await shard.call(operations.resolve(entry, refusal))
    assert await ledger(shard) == {
        ("(unknown)", "failed", "(unknown)"): UsageCounts(1),
        ("(unknown)", "failed", "acme"): UsageCounts(1),
    }


async def test_a_full_days_ledger_counts_new_tenants_together(shard: Shard) -> None:
    """Names of tenants come from outside: who may submit could fill the memory with them."""
    worker = shard.worker("a")
    await shard.submit("x", tenant="known")
    await complete(worker)
    await shard.redis.hset(await ledger_key(shard), "rows", 10_000)
    for name, tenant in (("y", "known"), ("z", "new"), ("w", "newer")):
        await shard.submit(name, tenant=tenant)
        await complete(worker)
    await shard.submit("v", tenant="known", lane=Lane.BATCH)
    await complete(worker)
    assert await ledger(shard) == {
        ("normal", "completed", "known"): COUNTED.plus(COUNTED),
        ("normal", "completed", "(other)"): COUNTED.plus(COUNTED),
        ("batch", "completed", "(other)"): COUNTED,
    }


async def test_rows_are_counted(shard: Shard) -> None:
    worker = shard.worker("a")
    for name in ("x", "y", "z"):
        await shard.submit(name, tenant="t" if name == "x" else "u")
        await complete(worker)
    assert await shard.redis.hget(await ledger_key(shard), "rows") == b"2"


@pytest.mark.parametrize("damage", ["type", "row"])
async def test_a_damaged_ledger_begins_anew(shard: Shard, damage: str) -> None:
    key = await ledger_key(shard)
    if damage == "type":
        await shard.redis.set(key, "text")
    else:
        await shard.redis.hset(key, "normal completed default", "1 2 three")
    await shard.submit("x")
    await complete(shard.worker("a"))
    assert await ledger(shard) == {("normal", "completed", "default"): COUNTED}


async def test_no_count_of_an_event_is_worse_than_none(shard: Shard) -> None:
    """Whatever a worker of another make writes, the sums stay sums."""
    worker = shard.worker("a")
    for name, wrong in (("x", -1), ("y", 1.5), ("z", "many")):
        await shard.submit(name)
        claim = await worker.claim_one()
        fields: dict[str, Any] = {"prompt_tokens": wrong, "output_tokens": 2}
        await worker.send(worker.ending(claim, 0, usage=Usage(**fields)))
    counted = UsageCounts(requests=3, output_tokens=6)
    assert await ledger(shard) == {("normal", "completed", "default"): counted}


async def test_a_ledger_lives_as_long_as_a_sweep_says(shard: Shard) -> None:
    await shard.submit("x")
    await shard.ops.cancel("x")
    key = await ledger_key(shard)
    left = await shard.redis.pttl(key)
    assert 399 * DAY_MS < left <= 401 * DAY_MS
    for days in (2, 30):
        brief = Operations(
            shard.redis, shard.keys, usage_retention_ms=days * DAY_MS, load=shard.load
        )
        await shard.call(brief.sweep(lease_ms=60_000))
        left = await shard.redis.pttl(key)
        assert (days - 1) * DAY_MS < left <= (days + 1) * DAY_MS


async def test_a_ledger_is_written_at_maxmemory(shard: Shard) -> None:
    await shard.submit("x")
    await shard.redis.config_set("maxmemory", 1)
    await shard.ops.cancel("x")
    assert await ledger(shard) == {("normal", "cancelled", "default"): UsageCounts(1)}


async def test_a_redriven_request_counts_for_each_of_its_ends(shard: Shard) -> None:
    worker = shard.worker("w")
    await shard.submit("x")
    await worker.send(worker.tokens(await worker.claim_one(), 0, 1))
    deadly = shard.with_retry(max_attempts=1)
    await deadly.ops.release_all("w", blame=True)
    (letter,) = await shard.ops.dead_letters()
    await shard.ops.redrive(letter.entry)
    await complete(worker)
    found = await ledger(shard)
    assert {place[1]: counts.requests for place, counts in found.items()} == {
        "dead": 1,
        "completed": 1,
    }
    assert found["normal", "dead", "default"].output_tokens == 1


async def test_the_sum_is_that_of_the_events(shard: Shard) -> None:
    """A hundred requests, each with another usage and one of several ends."""
    worker = shard.worker("a")
    for i in range(100):
        await shard.submit(f"x{i}", tenant=f"t{i % 7}", lane=list(Lane)[i % 3])
    for i, claim in enumerate(await worker.claim(80)):
        await worker.send(worker.tokens(claim, 0, 2))
        if i % 2:
            usage = Usage(prompt_tokens=i, output_tokens=2 + i, device_us=i, queue_ms=3 * i)
            await worker.send(worker.ending(claim, 2, i, usage=usage))
    for i in range(100):
        await shard.ops.cancel(f"x{i}")
    await shard.check(ended=True, ledger=True)
    assert sum(counts.requests for counts in (await ledger(shard)).values()) == 100
