"""Requests that are cancelled when their last reader has left: the scripts' part of it."""

from __future__ import annotations

import asyncio

import pytest
from delivery.fleet import MINUTE_MS, Shard
from redis.asyncio import Redis

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason, State

LONG_AGO = 1


async def readers(shard: Shard) -> list[str]:
    return [name.decode() for name in await shard.redis.zrange(shard.keys.readers, 0, -1)]


async def lapse(shard: Shard, *names: str) -> None:
    """Readers came once, and their grace is over."""
    assert await shard.ops.reader_heartbeat(names, grace_ms=1) == [True] * len(names)
    await shard.wait_ms(2)


async def test_a_running_request_ends_when_its_reader_has_left(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x", on_disconnect="cancel")
    claim = await worker.claim_one()
    assert await worker.send_one(worker.tokens(claim, 0, 3)) == (0, 3)
    await lapse(shard, "x")
    assert (await shard.sweep()).abandoned == 1
    end = await shard.end("x")
    assert (end.reason, end.n) == (Reason.DISCONNECTED, 3)
    assert await worker.send_one(worker.tokens(claim, 3, 1)) == (2, 3)
    assert await readers(shard) == []
    assert (await shard.sweep()).abandoned == 0
    await shard.check(ended=True)


async def test_a_queued_request_ends_when_its_reader_has_left(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    await shard.submit("y", on_disconnect="cancel")
    await lapse(shard, "x")
    assert (await shard.sweep()).abandoned == 1
    assert (await shard.end("x")).reason is Reason.DISCONNECTED
    assert [claim.id for claim in await shard.worker("a").claim(5)] == ["y"]
    await shard.check()


async def test_a_sweep_tells_when_the_next_grace_ends(shard: Shard) -> None:
    """Then a worker sweeps again, so that a request ends with its last reader's grace."""
    for name in "xyz":
        await shard.submit(name, on_disconnect="cancel")
    assert (await shard.sweep()).grace_ms == 0
    await shard.ops.reader_heartbeat(["x"], grace_ms=2 * MINUTE_MS)
    await shard.ops.reader_heartbeat(["y"], grace_ms=MINUTE_MS)
    await lapse(shard, "z")
    swept = await shard.sweep()
    assert swept.abandoned == 1
    (_, first), _ = await shard.redis.zrange(shard.keys.readers, 0, -1, withscores=True)
    assert 0 < swept.grace_ms <= MINUTE_MS
    assert await shard.now_ms() + swept.grace_ms >= first


async def test_readers_get_time_after_a_worker_lost_redis(shard: Shard) -> None:
    """They lost it, too, and could not say that they are there. Then they have left indeed."""
    await shard.submit("x", on_disconnect="cancel")
    await lapse(shard, "x")
    swept = await shard.sweep(spare_readers=True)
    assert swept.abandoned == 0
    spared = float(await shard.redis.hget(shard.keys.sweep, "readers_spared_until") or 0)
    # Connections that break all the time spare nobody for ever.
    ended = False
    while not ended:
        before = await shard.now_ms()
        ended = (await shard.sweep(spare_readers=True)).abandoned == 1
        assert ended or before < spared
        await asyncio.sleep(0.01)
    assert float((await shard.record("x"))["ended_at"]) >= spared
    await shard.check(ended=True)


async def test_before_its_first_reader_a_request_goes_on(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    assert await readers(shard) == []
    await shard.wait_ms(5)
    assert (await shard.sweep()).abandoned == 0
    assert await shard.state("x") == "queued"


async def test_others_go_on_without_readers(shard: Shard) -> None:
    await shard.submit("x")
    assert await shard.ops.reader_heartbeat(["x", "nobody"], grace_ms=1) == [False, False]
    # Whatever stands there: only a request that asked for it is cancelled.
    await shard.redis.zadd(shard.keys.readers, {"x": LONG_AGO, "nobody": LONG_AGO})
    assert (await shard.sweep()).abandoned == 0
    assert await shard.state("x") == "queued"
    assert await readers(shard) == []
    await shard.check()


async def test_a_reader_that_comes_back_in_time(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    await shard.ops.reader_heartbeat(["x"], grace_ms=1)
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS)
    await shard.wait_ms(5)
    assert (await shard.sweep()).abandoned == 0
    assert await shard.state("x") == "queued"
    await shard.check()


async def test_of_two_readers_the_one_that_stays_counts(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS)
    await shard.ops.reader_heartbeat(["x"], grace_ms=1)
    await shard.wait_ms(5)
    assert (await shard.sweep()).abandoned == 0
    assert await shard.state("x") == "queued"


async def test_a_submitter_ends_what_it_alone_reads(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel", inbox="here")
    await shard.submit("y", on_disconnect="cancel")
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS, inbox="here")
    await shard.ops.reader_heartbeat(["y"], grace_ms=MINUTE_MS)
    for name in ("x", "y"):
        assert (await shard.ops.cancel(name, Reason.DISCONNECTED)).changed
    await shard.check(ended=True)


async def test_a_submitter_does_not_end_what_is_read_elsewhere(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel", inbox="here")
    await shard.ops.reader_heartbeat(["x"], grace_ms=1, inbox="here")
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS, inbox="there")
    reply = await shard.ops.cancel("x", Reason.DISCONNECTED)
    assert (reply.changed, reply.state) == (False, State.QUEUED)
    assert await shard.state("x") == "queued"
    assert (await shard.ops.cancel("x", Reason.CLIENT)).changed
    await shard.check(ended=True)


async def test_a_request_that_finished_meanwhile_stays_finished(shard: Shard) -> None:
    worker = shard.worker("a")
    await shard.submit("x", on_disconnect="cancel")
    claim = await worker.claim_one()
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS)
    await worker.send(worker.ending(claim, 0, 2))
    assert await readers(shard) == []
    assert await shard.ops.reader_heartbeat(["x"], grace_ms=1) == [False]
    assert await readers(shard) == []
    # A script that was cut short may have left it there.
    await shard.redis.zadd(shard.keys.readers, {"x": LONG_AGO})
    assert (await shard.sweep()).abandoned == 0
    assert await readers(shard) == []
    assert (await shard.end("x")).reason is Reason.LENGTH
    await shard.check(ended=True)


async def test_after_an_outage_readers_get_time_to_come_back(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    await shard.submit("gone", on_disconnect="cancel")
    assert (await shard.sweep()).abandoned == 0
    await lapse(shard, "x", "gone")
    await shard.let_pass(MINUTE_MS)
    for _ in range(3):
        assert (await shard.sweep()).abandoned == 0
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS)
    reprieve = int(await shard.redis.hget(shard.keys.sweep, "readers_spared_until") or 0)
    assert 10_000 < reprieve - await shard.now_ms() <= 15_000
    await shard.redis.hset(shard.keys.sweep, "readers_spared_until", LONG_AGO)  # and it passes
    assert (await shard.sweep()).abandoned == 1
    assert await shard.state("x") == "queued"
    assert (await shard.end("gone")).reason is Reason.DISCONNECTED
    await shard.check()


async def test_a_sweep_cancels_boundedly_and_the_next_goes_on(shard: Shard) -> None:
    names = [f"x{i}" for i in range(150)]
    for name in names:
        await shard.submit(name, on_disconnect="cancel")
    await lapse(shard, *names)
    swept = [await shard.sweep() for _ in range(4)]
    assert [s.abandoned for s in swept] == [64, 64, 22, 0]
    assert [s.more for s in swept] == [True, True, False, False]
    await shard.check(ended=True)


async def test_a_handover_and_a_redrive_keep_it(shard: Shard) -> None:
    deadly = shard.with_retry(max_blames=2)
    await deadly.submit("x", on_disconnect="cancel")
    await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS)
    for i in range(2):
        await deadly.worker(f"w{i}").claim_one()
        await deadly.ops.release_all(f"w{i}", blame=True)
    assert await shard.state("x") == "dead"
    assert await readers(shard) == []
    (letter,) = await shard.ops.dead_letters()
    assert (await shard.ops.redrive(letter.entry)).done
    assert (await shard.sweep()).abandoned == 0
    await lapse(shard, "x")
    assert (await shard.sweep()).abandoned == 1
    await shard.check(ended=True)


async def test_attend_runs_at_maxmemory(shard: Shard) -> None:
    await shard.submit("x", on_disconnect="cancel")
    await shard.redis.config_set("maxmemory", 1)
    assert await shard.ops.reader_heartbeat(["x"], grace_ms=MINUTE_MS) == [True]
    assert await readers(shard) == ["x"]


async def test_broken_keys_hurt_nobody_else(shard: Shard) -> None:
    for name in ("x", "y", "late"):
        await shard.submit(name, on_disconnect="cancel", deadline_ms=1 if name == "late" else None)
    await shard.redis.set(shard.keys.request("y"), "text")
    assert await shard.ops.reader_heartbeat(["y", "x"], grace_ms=1) == [False, True]
    await shard.redis.delete(shard.keys.request("y"))
    await shard.redis.set(shard.keys.readers, "text")
    await shard.wait_ms(2)
    assert (await shard.sweep()).expired == 1
    await shard.redis.delete(shard.keys.readers)


async def test_what_happens_on_disconnect_is_part_of_the_request(redis_client: Redis) -> None:
    request = Request.build(id="x", prompt="hi", on_disconnect="cancel")
    assert Request.unpack(request.pack()) == request
    assert b"on_disconnect" not in Request.build(id="x", prompt="hi").pack()
    with pytest.raises(InvalidRequest, match="on_disconnect: got 'explode'; allowed: continue or"):
        Request.build(id="x", prompt="hi", on_disconnect="explode")
    shard = Shard(redis_client)
    await shard.submit("x", on_disconnect="cancel")
    assert (await shard.record("x"))["on_disconnect"] == "cancel"
    await shard.submit("y")
    assert "on_disconnect" not in await shard.record("y")
