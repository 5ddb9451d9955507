"""Workers of one shard serve one model, and a stream continues only on the model that began it."""

from __future__ import annotations

from delivery.fleet import FakeWorker, Shard

from penstock.shared.protocol.states import Reason

OLD, NEW = "0123456789abcdef", "fedcba9876543210"
LEASE_MS = 60_000


async def register(
    shard: Shard, model: str, *, lease_ms: int = LEASE_MS, rolling: bool = False
) -> str | None:
    return await shard.with_model(model).ops.register(lease_ms=lease_ms, rolling=rolling)


def old_and_new(shard: Shard) -> tuple[FakeWorker, FakeWorker]:
    return shard.with_model(OLD).worker("old"), shard.with_model(NEW).worker("new")


async def handed_back(shard: Shard, worker: FakeWorker, request_id: str, tokens: int) -> None:
    """A request that an old worker began and gave back."""
    await shard.submit(request_id)
    claim = await worker.claim_one()
    if tokens:
        await worker.send_one(worker.tokens(claim, 0, tokens))
    await shard.ops.release_all(worker.name, blame=False)


async def test_another_model_is_refused_while_one_is_served(shard: Shard) -> None:
    assert await register(shard, OLD) is None
    assert await register(shard, OLD) is None
    assert await register(shard, NEW) == OLD
    assert await shard.redis.zrange(shard.keys.fingerprints, 0, -1) == [OLD.encode()]


async def test_another_model_is_served_once_nobody_serves_the_old_one(shard: Shard) -> None:
    assert await register(shard, OLD, lease_ms=1) is None
    await shard.wait_ms(2)
    assert await register(shard, NEW) is None
    # A worker of the old one that was restarting is known.
    assert await register(shard, OLD) is None


async def test_a_rolling_change_has_both(shard: Shard) -> None:
    assert await register(shard, OLD) is None
    assert await register(shard, NEW, rolling=True) is None
    assert await register(shard, OLD) is None
    assert await register(shard, "another") in (OLD, NEW)


async def test_every_sweep_renews_the_word_for_a_model(shard: Shard) -> None:
    assert await register(shard, OLD, lease_ms=1) is None
    await shard.with_model(OLD).sweep(LEASE_MS)
    await shard.wait_ms(2)
    assert await register(shard, NEW) == OLD


async def test_a_stream_continues_on_its_own_model_alone(shard: Shard) -> None:
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    assert await new.claim(5) == ()
    assert await new.claim(5) == ()
    await shard.check()
    bell = await shard.redis.xrevrange(shard.keys.bell, count=1)
    moved = (await shard.record("x"))["entry"]
    assert int(bell[0][0].split(b"-")[0]) >= int(moved.split("-")[0])
    claim = await old.claim_one()
    assert (claim.id, claim.n) == ("x", 3)
    await old.send_one(old.ending(claim, 3))
    await shard.check(ended=True)


async def test_work_without_tokens_starts_anew_on_any_model(shard: Shard) -> None:
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=0)
    claim = await new.claim_one()
    await new.send_one(new.tokens(claim, 0, 2))
    await shard.ops.release_all("new", blame=False)
    assert await old.claim(5) == ()
    assert (await new.claim_one()).n == 2


async def test_tokens_of_a_claim_that_was_cut_short_count(shard: Shard) -> None:
    """The log has them and the record does not yet: the log is the truth."""
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    await shard.redis.hset(shard.keys.request("x"), "tokens", 0)
    assert await new.claim(5) == ()
    assert (await old.claim_one()).n == 3


async def test_a_worker_that_names_no_model_continues_any_stream(shard: Shard) -> None:
    old, _ = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    assert (await shard.worker("any").claim_one()).n == 3


async def test_suspects_keep_to_their_model_one_at_a_time(shard: Shard) -> None:
    old, new = old_and_new(shard)
    for name in ("x", "y"):
        await shard.submit(name)
    claims = await old.claim(2)
    await old.send(*(old.tokens(claim, 0, 1) for claim in claims))
    await shard.ops.release_all("old", blame=False)
    for _ in range(2):
        assert len(await old.claim(2)) == 2
        await shard.ops.release_all("old", blame=True)
    assert await shard.redis.xlen(shard.keys.suspects) == 2
    assert await new.claim(5) == ()
    assert await shard.redis.exists(shard.keys.suspects) == 0
    claims = await old.claim(5)
    assert [claim.suspect for claim in claims] == [True]
    await shard.check()


async def gone_model(shard: Shard) -> None:
    """A stream of a model whose last worker left long ago."""
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    await handed_back(shard, old, "fresh", tokens=0)
    assert [claim.id for claim in await new.claim(5)] == ["fresh"]
    long_ago = await shard.now_ms() - 11 * LEASE_MS
    await shard.redis.zadd(shard.keys.fingerprints, {OLD: long_ago})


async def test_streams_of_a_model_that_is_gone_end_with_the_reason(shard: Shard) -> None:
    await gone_model(shard)
    swept = await shard.with_model(NEW).sweep(LEASE_MS)
    assert swept.orphans == 1
    end = await shard.end("x")
    assert (end.reason, end.n) == (Reason.MODEL_CHANGED, 3)
    assert OLD in end.message
    assert await shard.state("fresh") == "running"
    assert await shard.redis.zrange(shard.keys.fingerprints, 0, -1) == [NEW.encode()]
    assert (await shard.with_model(NEW).sweep(LEASE_MS)).orphans == 0
    await shard.check()


async def test_a_model_has_ten_leases_to_return(shard: Shard) -> None:
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    assert await new.claim(5) == ()
    await shard.redis.zadd(shard.keys.fingerprints, {OLD: await shard.now_ms() - 9 * LEASE_MS})
    assert (await shard.with_model(NEW).sweep(LEASE_MS)).orphans == 0
    assert (await old.claim_one()).n == 3


async def test_after_an_outage_a_model_has_ten_leases_again(shard: Shard) -> None:
    """Nobody swept, so nobody could say that it serves it."""
    await gone_model(shard)
    await shard.let_pass(11 * LEASE_MS)
    assert (await shard.with_model(NEW).sweep(LEASE_MS)).orphans == 0


async def test_what_runs_is_not_ended_with_its_model(shard: Shard) -> None:
    old, new = old_and_new(shard)
    await handed_back(shard, old, "x", tokens=3)
    assert await new.claim(5) == ()
    claim = await old.claim_one()
    await shard.redis.zadd(shard.keys.fingerprints, {OLD: await shard.now_ms() - 11 * LEASE_MS})
    assert (await shard.with_model(NEW).sweep(LEASE_MS)).orphans == 0
    assert await old.send_one(old.ending(claim, 3)) == (0, 3)
    await shard.check(ended=True)


async def test_one_sweep_ends_a_bounded_number_of_them(shard: Shard) -> None:
    old, new = old_and_new(shard)
    for number in range(70):
        await shard.submit(f"x{number}")
    claims = await old.claim(70)
    await old.send(*(old.tokens(claim, 0, 1) for claim in claims))
    await shard.ops.release_all("old", blame=False)
    assert await new.claim(70) == ()
    await shard.redis.zadd(shard.keys.fingerprints, {OLD: await shard.now_ms() - 11 * LEASE_MS})
    swept = [await shard.with_model(NEW).sweep(LEASE_MS) for _ in range(2)]
    assert [(one.orphans, one.more) for one in swept] == [(64, True), (6, False)]
    await shard.check()


async def test_a_redriven_request_belongs_to_no_model(shard: Shard) -> None:
    old, new = old_and_new(shard)
    await shard.submit("x")
    claim = await old.claim_one()
    await old.send_one(old.tokens(claim, 0, 1))
    strict = shard.with_retry(max_attempts=1)
    await strict.ops.release_all("old", blame=True)
    (letter,) = await shard.ops.dead_letters()
    await shard.ops.redrive(letter.entry)
    assert (await new.claim_one()).n == 0
