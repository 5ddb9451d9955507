"""Entries become requests once and only once, within the bounds, or get their End."""

from __future__ import annotations

import pytest
from door.plain import PlainDoor

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, Usage
from penstock.shared.protocol.states import Answer, Lane, Reason, State
from penstock.shared.scripts.operations import Bounds


async def test_an_entry_becomes_what_submit_makes(door: PlainDoor) -> None:
    await door.shard.submit("submitted", prompt="Hi", max_tokens=5, tenant="t", max_queue_ms=50_000)
    await door.add_raw(
        "id", "plain", "prompt", "Hi", "max_tokens", 5, "tenant", "t", "max_queue_ms", 50_000
    )
    (admitted,) = await door.take_in()
    assert (admitted.verdict, admitted.id) == ("ok", "plain")
    one, other = await door.shard.record("submitted"), await door.shard.record("plain")
    alone = {
        "payload",
        "bytes",
        "digest",
        "entry",
        "accepted_at",
        "deadline",
        "queue_deadline",
    }  # their ids differ, and their times
    assert {k: v for k, v in one.items() if k not in alone} == {
        k: v for k, v in other.items() if k not in alone
    }
    assert (
        int(other["deadline"]) - int(other["accepted_at"])
        == int(one["deadline"]) - int(one["accepted_at"])
        == 60_000
    )
    assert int(other["queue_deadline"]) - int(other["accepted_at"]) == 50_000
    assert await door.left() == (0, 0)
    worker = door.shard.worker("w")
    for claim in await worker.claim(2):
        await worker.send(worker.ending(claim, 0, 5))
    await door.shard.check(ended=True)
    assert await door.shard.tokens("plain") != []


async def test_entries_added_before_there_was_a_worker(door: PlainDoor) -> None:
    entries = [await door.add(prompt="Hi") for _ in range(3)]
    verdicts = await door.take_in()
    assert [(a.verdict, a.id) for a in verdicts] == [("ok", entry) for entry in entries]


async def test_the_same_request_twice_runs_once(door: PlainDoor) -> None:
    for _ in range(3):
        await door.add(id="x", prompt="Hi", max_tokens=8)
    assert [a.verdict for a in await door.take_in()] == ["ok", "dup", "dup"]
    assert await door.shard.counter("requests") == 1
    assert (await door.shard.submit("x", prompt="Hi", max_tokens=8)).duplicate
    worker = door.shard.worker("w")
    await worker.send(worker.ending(await worker.claim_one(), 0, 8))
    assert (await door.submit_plainly(id="x", prompt="Hi", max_tokens=8)).verdict == "dup"
    await door.shard.check(ended=True)


async def test_an_id_in_use_is_not_touched_and_the_answer_is_elsewhere(door: PlainDoor) -> None:
    await door.shard.submit("x", prompt="Hi")
    worker = door.shard.worker("w")
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    entry = await door.add(id="x", prompt="something else")
    invalid = await door.add(id="x", prompt="Hi", max_tokens="x")
    assert [(a.verdict, a.id) for a in await door.take_in()] == [
        ("conflict", entry), ("refused", invalid),
    ]  # fmt: skip
    end = await door.shard.end(entry)
    assert (end.reason, end.n) == (Reason.INVALID, 0)
    assert "another payload" in end.message
    assert "max_tokens" in (await door.shard.end(invalid)).message
    await worker.send(worker.ending(claim, 2, 1))
    assert len(await door.shard.tokens("x")) == 3
    await door.shard.check(ended=True)


async def test_a_refusal_is_an_end_like_any_other(door: PlainDoor) -> None:
    async with door.redis.pubsub() as pubsub:
        await pubsub.subscribe(door.keys.channel("x"))
        await pubsub.get_message(timeout=60)
        assert (await door.submit_plainly(id="x", prompt="", answer="json")).verdict == "refused"
        message = await pubsub.get_message(timeout=60)
    (entry,) = await door.redis.xrange(door.keys.log("x"))
    assert entry[0] == b"0-1"
    assert entry[1] == {b"end": message["data"]}
    assert message["data"].startswith(b'{"end":true,"n":0,"state":"failed","reason":"invalid","mes')
    assert 0 < await door.redis.pttl(door.keys.log("x")) <= 600_000
    assert await door.shard.counter("ended:failed") == 1
    # Its id is free: the same client may do better.
    assert (await door.submit_plainly(id="x", prompt="Hi")).verdict == "ok"
    assert await door.shard.log("x") == []
    await door.shard.check()


@pytest.mark.parametrize(
    ("bounds", "bound"),
    [
        (Bounds(requests=2), "requests (2)"),
        (Bounds(tokens=25), "tokens (25)"),
        (Bounds(bytes=70), "bytes (70)"),
        (Bounds(tenant_requests=2), "tenant_requests (2)"),
    ],
)
async def test_bounds_hold_at_this_door_too(
    newest_door: PlainDoor, bounds: Bounds, bound: str
) -> None:
    door = PlainDoor(newest_door.redis, bounds)
    for i in range(4):
        await door.add(id=f"x{i}", prompt="Hi", max_tokens=8)
    assert [a.verdict for a in await door.take_in()] == ["ok", "ok", "full", "full"]
    end = await door.shard.end("x3")
    assert (end.state, end.reason) == (State.FAILED, Reason.QUEUE_FULL)
    assert f"the bound on queued {bound} is reached" in end.message
    # Both doors share the bounds.
    await door.shard.worker("w").claim(1)
    assert (await door.submit_plainly(id="x3", prompt="Hi", max_tokens=8)).verdict == "ok"
    await door.shard.check()


async def test_time_counts_from_when_the_entry_was_added(door: PlainDoor) -> None:
    now = await door.shard.now_ms()
    await door.add_raw("id", "old", "prompt", "Hi", "deadline_ms", 1000, name=f"{now - 2000}-0")
    await door.add_raw("id", "aged", "prompt", "Hi", "deadline_ms", 9000, name=f"{now - 1000}-0")
    await door.add_raw("id", "early", "prompt", "Hi", name=f"{now + 3_600_000}-0")
    assert [a.verdict for a in await door.take_in()] == ["late", "ok", "ok"]
    end = await door.shard.end("old")
    assert (end.state, end.reason) == (State.EXPIRED, Reason.DEADLINE)
    assert int((await door.shard.record("aged"))["accepted_at"]) == now - 1000
    assert now <= int((await door.shard.record("early"))["accepted_at"]) < now + 60_000
    await door.shard.check()


async def test_a_name_from_the_dawn_of_time_is_late(door: PlainDoor) -> None:
    await door.add_raw("id", "x", "prompt", "Hi", "deadline_ms", 604_800_000, name="0-1")
    assert [a.verdict for a in await door.take_in()] == ["late"]
    await door.shard.check(ended=True)


async def test_entries_trimmed_after_they_were_read(door: PlainDoor) -> None:
    """The one hole of a confined producer: it can empty its own stream."""
    await door.lease("a")
    await door.poll("a")
    await door.add(id="x", prompt="Hi")
    (held,) = await door.read("a")
    await door.redis.xtrim(door.keys.ingress(), maxlen=0)
    assert (await door.resolve(held)).verdict == "gone"
    await door.add(id="y", prompt="Hi")
    await door.read("a")
    await door.redis.xtrim(door.keys.ingress(), maxlen=0)
    await door.lease("b")
    await door.shard.ops.release_all("a", blame=False)
    assert (await door.poll("b")).entries == ()
    assert await door.left() == (0, 0)
    await door.shard.check(ended=True)


async def test_doors_of_tenants(door: PlainDoor) -> None:
    assert (await door.poll("w")).tenants == (None,)
    assert await door.ops.add_tenant("acme")
    assert not await door.ops.add_tenant("acme")
    assert await door.ops.add_tenant("rival")
    assert await door.ops.tenants() == ("acme", "rival")
    assert set((await door.poll("w")).tenants) == {None, "acme", "rival"}
    entry = await door.add("acme", prompt="Hi")
    await door.add("acme", id="acme.1", prompt="Hi")
    forged = await door.add("acme", id="rival.1", prompt="Hi")
    assert {(a.verdict, a.id) for a in await door.take_in()} == {
        ("ok", f"acme.{entry}"), ("ok", "acme.1"), ("refused", f"acme.{forged}"),
    }  # fmt: skip
    assert await door.redis.exists(door.keys.log("rival.1")) == 0
    assert (await door.shard.record("acme.1"))["tenant"] == "acme"
    assert await door.ops.remove_tenant("acme")
    assert not await door.ops.remove_tenant("acme")
    assert set((await door.poll("w")).tenants) == {None, "rival"}


@pytest.mark.parametrize("name", ["a.b", "", "a b", "a:b", "x" * 65])
async def test_names_that_are_no_door(newest_door: PlainDoor, name: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        await newest_door.ops.add_tenant(name)
    if name:
        await newest_door.redis.sadd(newest_door.keys.ingress_tenants, name)
        await newest_door.add(name, prompt="Hi")
        polled = await newest_door.poll("w")
        assert (polled.tenants, polled.broken) == ((None,), (name,))


async def test_keys_of_wrong_types_hurt_their_own_only(door: PlainDoor) -> None:
    await door.ops.add_tenant("broken")
    await door.ops.add_tenant("sound")
    await door.redis.set(door.keys.ingress("broken"), "x")
    await door.redis.set(door.keys.request("taken"), "x")
    await door.redis.set(door.keys.log("log"), "x")
    await door.redis.set(door.keys.queue(Lane.NORMAL, "q"), "x")
    assert (await door.poll("w")).broken == ("broken",)
    own = await door.add(id="taken", prompt="Hi")
    await door.add(id="log", prompt="Hi")
    await door.add(id="logbad", prompt="")
    await door.redis.set(door.keys.log("logbad"), "x")
    await door.add_raw("id", "queue", "prompt", "Hi", "tenant", "q")
    await door.add("sound", id="sound.1", prompt="Hi")
    assert {a.id: a.verdict for a in await door.take_in()} == {
        own: "broken", "log": "ok", "logbad": "refused", "queue": "broken", "sound.1": "ok",
    }  # fmt: skip
    assert (await door.shard.end(own)).reason is Reason.ENGINE_ERROR
    assert (await door.shard.end("logbad")).reason is Reason.INVALID
    assert await door.left() == (0, 0)


async def test_it_runs_at_maxmemory(door: PlainDoor) -> None:
    await door.lease("w")
    await door.poll("w")
    for i in range(5):
        await door.add(id=f"x{i}", prompt="Hi" * 5000, max_tokens="x" if i == 4 else 8)
    await door.redis.config_set("maxmemory", 1)
    verdicts = [a.verdict for a in await door.take_in()]
    await door.redis.config_set("maxmemory", 0)
    assert verdicts == ["ok"] * 4 + ["refused"]
    await door.shard.check()


async def test_nothing_of_ended_requests_lives_for_ever(door: PlainDoor) -> None:
    await door.ops.add_tenant("acme")
    await door.add("acme", prompt="Hi")
    await door.add(prompt="")
    await door.take_in()
    worker = door.shard.worker("w")
    await worker.send(worker.ending(await worker.claim_one(), 0, 1))
    await door.shard.check(ended=True)


def test_json_and_msgpack_say_the_same() -> None:
    for event in (
        Chunk(3, (1, 2), 'a "quoted" wörd \n', 7),
        End(n=5, reason=Reason.STOP, usage=Usage(prompt_tokens=1, output_tokens=5, attempts=1)),
        End(n=0, reason=Reason.CLIENT, message="é"),
    ):
        assert unpack_event(event.pack(Answer.JSON)) == unpack_event(event.pack()) == event
