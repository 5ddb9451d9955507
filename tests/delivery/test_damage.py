"""Keys deleted, overwritten or evicted under a request: it ends with a reason, others go on."""

from __future__ import annotations

import pytest
from delivery.fleet import FakeWorker, Shard
from redis.exceptions import ResponseError

from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Lane, Reason
from penstock.shared.scripts.operations import AppendStatus
from penstock.shared.scripts.script_loader import Call


async def two_running(shard: Shard) -> FakeWorker:
    worker = shard.worker("a")
    for name in ("hurt", "well"):
        await shard.submit(name)
    claims = await worker.claim(2)
    assert await worker.send(*(worker.tokens(claim, 0, 2) for claim in claims)) == [(0, 2)] * 2
    return worker


async def step(worker: FakeWorker) -> int:
    """Both go on by one token; returns the status of the hurt one."""
    claims = [worker.claims[name] for name in ("hurt", "well")]
    (status, _), well = await worker.send(*(worker.tokens(claim, 2, 1) for claim in claims))
    assert well == (0, 3)
    return status


async def lost_record_ended(shard: Shard, n: int = 2) -> None:
    """Its readers were told; of the request itself nothing is left but what expires."""
    end = await shard.end("hurt")
    assert (end.reason, end.n) == (Reason.ENGINE_ERROR, n)
    assert "record" in end.message
    await shard.check()


async def test_deleted_record_of_a_running_request(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.delete(shard.keys.request("hurt"))
    assert await step(worker) == AppendStatus.GONE
    await lost_record_ended(shard)
    assert await step_again(worker) == AppendStatus.GONE
    assert await shard.counter("ended:failed") == 1


async def step_again(worker: FakeWorker) -> int:
    (status, _) = await worker.send_one(worker.tokens(worker.claims["hurt"], 2, 1))
    return status


async def test_overwritten_record_of_a_running_request(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.set(shard.keys.request("hurt"), "text")
    assert await step(worker) == AppendStatus.BROKEN
    assert await shard.redis.pttl(shard.keys.request("hurt")) > 0
    await shard.redis.delete(shard.keys.request("hurt"))
    await lost_record_ended(shard)


@pytest.mark.parametrize("overwrite", [False, True])
async def test_record_lost_while_queued(shard: Shard, overwrite: bool) -> None:
    await shard.submit("hurt")
    await shard.submit("well")
    if overwrite:
        await shard.redis.set(shard.keys.request("hurt"), "text")
    else:
        await shard.redis.delete(shard.keys.request("hurt"))
    assert [claim.id for claim in await shard.worker("a").claim(5)] == ["well"]
    await shard.redis.delete(shard.keys.request("hurt"))
    await lost_record_ended(shard, n=0)


async def test_record_lost_while_its_worker_dies(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.delete(shard.keys.request("hurt"))
    assert await shard.ops.release_all("a", blame=True) == 1
    await lost_record_ended(shard)
    assert await shard.redis.exists(shard.keys.owned(worker.name)) == 0


async def test_record_lost_is_found_by_the_sweep(shard: Shard) -> None:
    await two_running(shard)
    await shard.redis.delete(shard.keys.request("hurt"))
    assert (await shard.sweep()).repaired == 1
    assert (await shard.end("hurt")).n == 2
    await shard.redis.zadd(shard.keys.leases, {"a": 1})
    assert (await shard.sweep()).reaped == 1
    await lost_record_ended(shard)


async def test_cancel_of_a_lost_record_is_unknown(shard: Shard) -> None:
    await two_running(shard)
    await shard.redis.delete(shard.keys.request("hurt"))
    assert (await shard.ops.cancel("hurt")).state is None
    assert (await shard.ops.cancel("well")).changed


async def test_overwritten_log_of_a_running_request(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.set(shard.keys.log("hurt"), "text")
    assert await step(worker) == AppendStatus.BROKEN
    end = await shard.end("hurt")
    assert (end.reason, end.n) == (Reason.ENGINE_ERROR, 2)
    assert "log" in end.message
    assert await shard.state("hurt") == "failed"
    assert await step_again(worker) == AppendStatus.FENCED


async def test_log_lost_before_a_continuation(shard: Shard) -> None:
    """It can not be continued: nobody knows what was said already."""
    await two_running(shard)
    await shard.redis.delete(shard.keys.log("hurt"))
    await shard.ops.release_all("a", blame=False)
    (claim,) = await shard.worker("b").claim(5)
    assert (claim.id, claim.intact) == ("well", True)
    end = await shard.end("hurt")
    assert (end.reason, end.n) == (Reason.ENGINE_ERROR, 2)
    assert await shard.state("hurt") == "failed"


async def test_entry_damaged_in_the_middle_of_a_log(shard: Shard) -> None:
    """The worker is told by `intact`; the other claim in the same reply is whole."""
    worker = await two_running(shard)
    await step(worker)
    await shard.redis.xdel(shard.keys.log("hurt"), "2-0")
    await shard.ops.release_all("a", blame=False)
    claims = {claim.id: claim for claim in await shard.worker("b").claim(5)}
    assert (claims["hurt"].n, claims["hurt"].intact) == (3, False)
    assert (claims["well"].n, claims["well"].intact) == (3, True)


async def test_bytes_that_are_no_chunk_in_a_log(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.xadd(shard.keys.log("hurt"), {"chunk": b"\xc1"}, id="2-1")
    await step(worker)
    await shard.ops.release_all("a", blame=False)
    claims = {claim.id: claim for claim in await shard.worker("b").claim(5)}
    assert claims["hurt"].intact  # the tokens are all there; what is not ours is passed over
    assert claims["well"].intact


async def test_deleted_queue_of_waiting_requests_is_made_anew(shard: Shard) -> None:
    for i in range(5):
        await shard.submit(f"x{i}", tenant=f"t{i % 2}")
    record = await shard.record("x0")
    await shard.redis.delete(
        record["queue"], f"{shard.keys.prefix}tenants:normal", shard.keys.lanes
    )
    assert (await shard.sweep()).repaired == 3
    assert (await shard.sweep()).repaired == 0
    await shard.check()
    assert len(await shard.worker("a").claim(9)) == 5


async def test_deleted_ownership_gives_the_request_to_others(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.delete(shard.keys.owned("a"))
    assert (await shard.sweep()).repaired == 2
    await shard.check()
    assert await step_again(worker) == AppendStatus.FENCED
    assert {(claim.n, claim.suspect) for claim in await shard.worker("b").claim(9)} == {(2, False)}


async def test_deleted_lease_gives_the_requests_to_others(shard: Shard) -> None:
    await two_running(shard)
    await shard.redis.delete(shard.keys.leases)
    assert (await shard.sweep()).repaired == 2
    await shard.check()


async def test_deleted_queue_of_running_requests_hurts_nobody(shard: Shard) -> None:
    worker = await two_running(shard)
    await shard.redis.delete((await shard.record("hurt"))["queue"])
    claims = [worker.claims[name] for name in ("hurt", "well")]
    assert await worker.send(*(worker.ending(claim, 2) for claim in claims)) == [(0, 2)] * 2
    await shard.check(ended=True)


async def test_overwritten_queue_of_continued_work_gives_way(shard: Shard) -> None:
    await two_running(shard)
    await shard.redis.set(shard.keys.continued(Lane.NORMAL), "text")
    assert await shard.ops.release_all("a", blame=False) == 2
    assert len(await shard.worker("b").claim(5)) == 2
    await shard.check()


async def test_foreign_entry_in_a_queue_is_dropped(shard: Shard) -> None:
    await shard.submit("x")
    queue = (await shard.record("x"))["queue"]
    await shard.redis.xadd(queue, {"hello": "world"})
    await shard.redis.xadd(queue, {"id": "x"})  # a second entry of the same request
    worker = shard.worker("a")
    assert [claim.id for claim in await worker.claim(5)] == ["x"]
    assert await worker.claim(5) == ()
    await shard.check()


async def test_wrong_counters_are_recounted(shard: Shard) -> None:
    for i in range(4):
        await shard.submit(f"x{i}", tenant=f"t{i % 2}")
    await shard.worker("a").claim(1)
    await shard.redis.hset(shard.keys.counters, mapping={"requests": 77, "tenant:gone": 3})
    await shard.redis.hdel(shard.keys.counters, "bytes")
    assert await shard.ops.rebuild_counters() == (3, 3)
    assert await shard.ops.rebuild_counters() == (3, 0)
    await shard.check()


async def test_malformed_arguments_are_an_error_before_any_write(shard: Shard) -> None:
    worker = await two_running(shard)
    good = worker.append_call(worker.tokens(worker.claims["well"], 2, 1))
    for blob in (b"\xc1", b"", b"\x93\x01\x02", b"\xc4\x01x"):
        call = Call(good.script, good.keys, [*good.args[:-1], blob])
        with pytest.raises(ResponseError):
            await shard.call(call)
    await shard.check()


async def test_malformed_item_hurts_no_other(shard: Shard) -> None:
    worker = await two_running(shard)
    hurt, well = (worker.claims[name] for name in ("hurt", "well"))
    item = worker.tokens(hurt, 2, 1)
    item = type(item)(hurt.id, hurt.epoch, "two", 1, item.chunk)  # type: ignore[arg-type]
    (status, _), other = await worker.send(item, worker.tokens(well, 2, 1))
    assert status in (AppendStatus.MISMATCH, AppendStatus.BROKEN)
    assert other == (0, 3)
    await shard.check()


async def test_every_end_packed_by_a_script_is_readable(shard: Shard) -> None:
    """Long messages too: msgpack writes those with another head."""
    worker = await two_running(shard)
    await shard.redis.set(shard.keys.log("hurt"), "text")
    await step(worker)
    await shard.ops.cancel("well")
    end = await shard.end("well")
    assert end.usage is not None
    assert end == End(n=3, reason=Reason.CLIENT, usage=end.usage)
    assert (end.usage.output_tokens, end.usage.attempts) == (3, 1)
    assert len((await shard.end("hurt")).message) > 31
