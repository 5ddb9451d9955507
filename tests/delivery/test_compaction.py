"""Logs of ended requests become one entry: same tokens, same text, same life, less memory."""

from __future__ import annotations

import pytest
from delivery.fleet import MINUTE_MS, FakeWorker, Shard, chunk, token

from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.compaction import compacted
from penstock.shared.scripts.operations import Claim

LONG = 40


async def generate(shard: Shard, name: str, count: int = LONG, **fields: str) -> FakeWorker:
    """A running request with so many tokens, published one by one."""
    worker = shard.worker(f"worker-of-{name}")
    await shard.submit(name, **fields)
    claim = await worker.claim_one()
    await worker.send(*(worker.tokens(claim, i, 1) for i in range(count)))
    return worker


async def complete(shard: Shard, name: str, count: int = LONG, **fields: str) -> Claim:
    """The same, ended."""
    worker = await generate(shard, name, count, **fields)
    claim = worker.claims[name]
    await worker.send(worker.ending(claim, count))
    return claim


async def noted(shard: Shard) -> list[str]:
    return [name.decode() for name in await shard.redis.zrange(shard.keys.ended, 0, -1)]


async def raw(shard: Shard, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    entries: list[tuple[bytes, dict[bytes, bytes]]] = await shard.redis.xrange(shard.keys.log(name))
    return entries


async def size(shard: Shard, name: str) -> int:
    return int(await shard.redis.memory_usage(shard.keys.log(name), samples=0))


async def holds_room(shard: Shard) -> bool:
    """Whether the server holds 4 kB ready for a stream that begins, as Redis did before 8.6."""
    await shard.redis.xadd("room", {"chunk": b"x"})
    size: int = await shard.redis.memory_usage("room", samples=0)
    await shard.redis.delete("room")
    return size > 2000


async def test_one_entry_with_the_chunk_and_the_end(shard: Shard) -> None:
    await complete(shard, "x")
    before, bytes_before = await raw(shard, "x"), await size(shard, "x")
    assert len(before) == LONG + 1
    assert await shard.compact() == 1
    ((entry, fields),) = await raw(shard, "x")
    assert entry == f"{LONG}-1".encode()
    assert list(fields) == [b"chunk", b"end"]
    assert fields[b"end"] == before[-1][1][b"end"]
    one = (await shard.log("x"))[0]
    assert isinstance(one, Chunk)
    assert one.token_ids == tuple(token("x", i) for i in range(LONG))
    assert one.digest == rolling_digest(one.token_ids)
    assert one.text == chunk("x", 0, LONG).text
    assert await size(shard, "x") <= bytes_before * (1 / 3 if await holds_room(shard) else 0.6)
    assert await noted(shard) == []
    await shard.check(ended=True)


@pytest.mark.parametrize("kind", ["one chunk", "json", "no token", "unknown form"])
async def test_what_keeps_its_entries_loses_the_room_for_more(shard: Shard, kind: str) -> None:
    if kind == "json":
        worker = await generate(shard, "x", 0, answer="json")
        claim, start = worker.claims["x"], 9
        items = [worker.tokens(claim, i, 1) for i in range(start)]
        packed = [chunk("x", i, 1).pack(Answer.JSON) for i in range(start)]
        await worker.send(*(i._replace(chunk=p) for i, p in zip(items, packed, strict=True)))
    elif kind == "unknown form":
        worker, start = await generate(shard, "x", 5), 6
        item = worker.tokens(worker.claims["x"], 5, 1)
        await worker.send_one(item._replace(chunk=b"\x97of a later version"))
    else:
        start = 1 if kind == "one chunk" else 0
        worker = await generate(shard, "x", start)
    await worker.send(worker.ending(worker.claims["x"], start))
    before, bytes_before = await raw(shard, "x"), await size(shard, "x")
    assert len(before) == start + 1
    assert await shard.compact() == 1
    assert await raw(shard, "x") == before
    assert await size(shard, "x") <= bytes_before * (1 / 3 if await holds_room(shard) else 1)
    assert 0 < await shard.redis.pttl(shard.keys.log("x")) <= 600_000
    assert await noted(shard) == []


async def test_a_compact_log_lives_as_long_as_the_log_would_have(shard: Shard) -> None:
    await complete(shard.with_retention(5 * MINUTE_MS), "x")
    await shard.redis.pexpire(shard.keys.log("x"), MINUTE_MS)
    assert await shard.compact() == 1
    assert 0 < await shard.redis.pttl(shard.keys.log("x")) <= MINUTE_MS
    await shard.check(ended=True)


@pytest.mark.parametrize("reason", [Reason.CLIENT, Reason.DEADLINE])
async def test_however_it_ended(shard: Shard, reason: Reason) -> None:
    await generate(shard, "x")
    if reason is Reason.CLIENT:
        await shard.ops.cancel("x")
    else:
        await shard.redis.hset(shard.keys.request("x"), "deadline", 1)
        await shard.redis.zadd(shard.keys.deadlines, {"x": 1})
        assert (await shard.sweep()).expired == 1
    assert await shard.compact() == 1
    assert len(await raw(shard, "x")) == 1
    assert (await shard.end("x")).reason is reason


async def test_not_before_its_time(shard: Shard) -> None:
    await complete(shard, "x")
    assert await shard.logs.list_compactable(after_ms=MINUTE_MS, count=10) == []
    await shard.redis.zincrby(shard.keys.ended, -MINUTE_MS, "x")
    assert await shard.logs.list_compactable(after_ms=MINUTE_MS, count=10) == ["x"]


async def test_a_log_is_told_to_one_worker_for_a_time(shard: Shard) -> None:
    for name in ("x", "y", "z"):
        await complete(shard, name)
    first = await shard.logs.list_compactable(after_ms=0, count=2)
    assert first == ["x", "y"]
    assert await shard.logs.list_compactable(after_ms=0, count=2) == ["z"]
    assert await shard.logs.list_compactable(after_ms=0, count=2) == []
    # Who was told of it died.
    for name in ("x", "y", "z"):
        score = await shard.redis.zscore(shard.keys.ended, name)
        assert 20_000 < score - await shard.now_ms() <= 30_000
        await shard.redis.zincrby(shard.keys.ended, -30_000, name)
    assert await shard.compact() == 3


async def test_switched_off_nothing_is_kept_in_mind(shard: Shard) -> None:
    await complete(shard, "x")
    assert await shard.logs.list_compactable(after_ms=None, count=10) == []
    assert await noted(shard) == []
    assert len(await raw(shard, "x")) == LONG + 1


async def test_notes_go_with_the_logs(shard: Shard) -> None:
    await complete(shard, "x")
    assert await noted(shard) == ["x"]
    await shard.redis.delete(shard.keys.ended)
    await complete(shard.with_retention(50), "y")
    await shard.wait_ms(60)
    assert await noted(shard) == []


async def test_a_request_that_has_not_ended_is_left(shard: Shard) -> None:
    worker = await generate(shard, "x")
    await shard.redis.xadd(shard.keys.log("x"), {"end": b"?"}, id=f"{LONG}-1")
    assert await shard.compact("x") == 0
    await shard.redis.xdel(shard.keys.log("x"), f"{LONG}-1")
    await shard.ops.release_all(worker.name, blame=False)
    assert await shard.compact("x") == 0
    assert len(await raw(shard, "x")) == LONG
    await shard.check()


async def test_a_log_that_is_not_what_was_read_is_left(shard: Shard) -> None:
    await complete(shard, "x")
    (log,) = await shard.logs.read(["x"])
    others = Chunk(0, tuple(range(LONG)), "", rolling_digest(range(LONG)))
    # As after a redrive: another life of the same length, in other pieces or with other tokens.
    for pieces in ([chunk("x", 0, LONG - 1), chunk("x", LONG - 1, 1)], [others]):
        await shard.redis.delete(shard.keys.log("x"))
        if len(pieces) == 1:
            for i in range(LONG - 1):
                await shard.redis.xadd(shard.keys.log("x"), {"chunk": b"?"}, id=f"{i + 1}-0")
        for piece in pieces:
            await shard.redis.xadd(
                shard.keys.log("x"), {"chunk": piece.pack()}, id=f"{piece.stop}-0"
            )
        end = End(n=LONG, reason=Reason.LENGTH).pack()
        await shard.redis.xadd(shard.keys.log("x"), {"end": end}, id=f"{LONG}-1")
        await shard.redis.pexpire(shard.keys.log("x"), MINUTE_MS)
        before = await raw(shard, "x")
        assert await shard.logs.compact([(log, compacted(log.chunks))]) == 0
        assert await raw(shard, "x") == before


async def test_a_redriven_request_is_compacted_after_its_new_end(shard: Shard) -> None:
    deadly = shard.with_retry(max_blames=1)
    worker = await generate(deadly, "x")
    await deadly.ops.release_all(worker.name, blame=True)  # forgiven, since it made progress
    await deadly.worker("b").claim_one()
    await deadly.ops.release_all("b", blame=True)
    assert await shard.state("x") == "dead"
    (log,) = await shard.logs.read(["x"])
    (letter,) = await shard.ops.dead_letters()
    assert (await shard.ops.redrive(letter.entry)).done
    assert await shard.logs.compact([(log, compacted(log.chunks))]) == 0
    claim = await worker.claim_one()
    assert (claim.n, claim.chunks) == (0, ())
    await worker.send(*(worker.tokens(claim, i, 1) for i in range(LONG)))
    await worker.send(worker.ending(claim, LONG))
    assert await shard.compact() == 1
    await shard.check(ended=True)


async def test_done_twice_it_is_done_once(shard: Shard) -> None:
    await complete(shard, "x")
    logs = [(log, compacted(log.chunks)) for log in await shard.logs.read(["x"])]
    assert await shard.logs.compact(logs) == 1
    once = await raw(shard, "x")
    assert await shard.logs.compact(logs) == 0
    assert await shard.compact("x") == 0
    assert await raw(shard, "x") == once


async def test_a_log_longer_than_a_page(shard: Shard) -> None:
    worker = await generate(shard, "x", 1500)
    await generate(shard, "y", 9)
    await shard.ops.cancel("y")
    await worker.send(worker.ending(worker.claims["x"], 1500))
    assert await shard.compact() == 2
    assert await shard.tokens("x") == [token("x", i) for i in range(1500)]
    await shard.check(ended=True)


async def test_it_runs_at_maxmemory(shard: Shard) -> None:
    await complete(shard, "x")
    await complete(shard, "y", 1)
    await shard.redis.config_set("maxmemory", 1)
    assert await shard.logs.list_compactable(after_ms=0, count=10) == ["x", "y"]
    assert await shard.compact("x") == 1
    assert await shard.compact("y") == 1


async def test_damage_hurts_no_other(shard: Shard) -> None:
    for name in ("gone", "text", "lost", "fine"):
        await complete(shard, name)
    await shard.redis.delete(shard.keys.log("gone"))
    await shard.redis.delete(shard.keys.request("lost"))
    await shard.redis.set(shard.keys.log("text"), "text", px=MINUTE_MS)
    assert await shard.compact() == 1
    assert len(await raw(shard, "fine")) == 1
    assert await noted(shard) == []
    await shard.redis.set(shard.keys.ended, "text")
    await complete(shard, "more")
    assert await shard.compact() == 0
    await shard.redis.delete(shard.keys.ended)
