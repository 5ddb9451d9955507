"""Entries become requests once and only once, within the bounds, or get their End."""

from __future__ import annotations

import pytest
from ingress.shard_ingress import ShardIngress

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, Usage
from penstock.shared.protocol.states import Answer, Lane, Reason, State
from penstock.shared.scripts.operations import Bounds


async def test_an_entry_becomes_what_submit_makes(ingress: ShardIngress) -> None:
    await ingress.shard.submit(
        "submitted", prompt="Hi", max_tokens=5, tenant="t", max_queue_ms=50_000
    )
    await ingress.add_raw(
        "id", "plain", "prompt", "Hi", "max_tokens", 5, "tenant", "t", "max_queue_ms", 50_000
    )
    (admitted,) = await ingress.take_in()
    assert (admitted.verdict, admitted.id) == ("ok", "plain")
    one, other = (
        await ingress.shard.record("submitted"),
        await ingress.shard.record("plain"),
    )
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
    assert await ingress.left() == (0, 0)
    worker = ingress.shard.worker("w")
    for claim in await worker.claim(2):
        await worker.send(worker.ending(claim, 0, 5))
    await ingress.shard.check(ended=True)
    assert await ingress.shard.tokens("plain") != []


async def test_entries_added_before_there_was_a_worker(ingress: ShardIngress) -> None:
    entries = [await ingress.add(prompt="Hi") for _ in range(3)]
    verdicts = await ingress.take_in()
    assert [(a.verdict, a.id) for a in verdicts] == [("ok", entry) for entry in entries]


async def test_the_same_request_twice_runs_once(ingress: ShardIngress) -> None:
    for _ in range(3):
        await ingress.add(id="x", prompt="Hi", max_tokens=8)
    assert [a.verdict for a in await ingress.take_in()] == ["ok", "dup", "dup"]
    assert await ingress.shard.counter("requests") == 1
    assert (await ingress.shard.submit("x", prompt="Hi", max_tokens=8)).duplicate
    worker = ingress.shard.worker("w")
    await worker.send(worker.ending(await worker.claim_one(), 0, 8))
    assert (await ingress.submit_plainly(id="x", prompt="Hi", max_tokens=8)).verdict == "dup"
    await ingress.shard.check(ended=True)


async def test_an_id_in_use_is_not_touched_and_the_answer_is_elsewhere(
    ingress: ShardIngress,
) -> None:
    await ingress.shard.submit("x", prompt="Hi")
    worker = ingress.shard.worker("w")
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 2))
    entry = await ingress.add(id="x", prompt="something else")
    invalid = await ingress.add(id="x", prompt="Hi", max_tokens="x")
    assert [(a.verdict, a.id) for a in await ingress.take_in()] == [
        ("conflict", entry), ("refused", invalid),
    ]  # fmt: skip
    end = await ingress.shard.end(entry)
    assert (end.reason, end.n) == (Reason.INVALID, 0)
    assert "another payload" in end.message
    assert "max_tokens" in (await ingress.shard.end(invalid)).message
    await worker.send(worker.ending(claim, 2, 1))
    assert len(await ingress.shard.tokens("x")) == 3
    await ingress.shard.check(ended=True)


async def test_a_refusal_is_an_end_like_any_other(ingress: ShardIngress) -> None:
    async with ingress.redis.pubsub() as pubsub:
        await pubsub.subscribe(ingress.keys.channel("x"))
        await pubsub.get_message(timeout=60)
        assert (await ingress.submit_plainly(id="x", prompt="", answer="json")).verdict == "refused"
        message = await pubsub.get_message(timeout=60)
    (entry,) = await ingress.redis.xrange(ingress.keys.log("x"))
    assert entry[0] == b"0-1"
    assert entry[1] == {b"end": message["data"]}
    assert message["data"].startswith(b'{"end":true,"n":0,"state":"failed","reason":"invalid","mes')
    assert 0 < await ingress.redis.pttl(ingress.keys.log("x")) <= 600_000
    assert await ingress.shard.counter("ended:failed") == 1
    # Its id is free: the same client may do better.
    assert (await ingress.submit_plainly(id="x", prompt="Hi")).verdict == "ok"
    assert await ingress.shard.log("x") == []
    await ingress.shard.check()


@pytest.mark.parametrize(
    ("bounds", "bound"),
    [
        (Bounds(requests=2), "requests (2)"),
        (Bounds(tokens=25), "tokens (25)"),
        (Bounds(bytes=70), "bytes (70)"),
        (Bounds(tenant_requests=2), "tenant_requests (2)"),
    ],
)
async def test_bounds_hold_here_too(
    newest_ingress: ShardIngress, bounds: Bounds, bound: str
) -> None:
    ingress = ShardIngress(newest_ingress.redis, bounds)
    for i in range(4):
        await ingress.add(id=f"x{i}", prompt="Hi", max_tokens=8)
    assert [a.verdict for a in await ingress.take_in()] == ["ok", "ok", "full", "full"]
    end = await ingress.shard.end("x3")
    assert (end.state, end.reason) == (State.FAILED, Reason.QUEUE_FULL)
    assert f"the bound on queued {bound} is reached" in end.message
    # Submissions and entries share the bounds.
    await ingress.shard.worker("w").claim(1)
    assert (await ingress.submit_plainly(id="x3", prompt="Hi", max_tokens=8)).verdict == "ok"
    await ingress.shard.check()


async def test_time_counts_from_when_the_entry_was_added(ingress: ShardIngress) -> None:
    now = await ingress.shard.now_ms()
    await ingress.add_raw("id", "old", "prompt", "Hi", "deadline_ms", 1000, name=f"{now - 2000}-0")
    await ingress.add_raw("id", "aged", "prompt", "Hi", "deadline_ms", 9000, name=f"{now - 1000}-0")
    await ingress.add_raw("id", "early", "prompt", "Hi", name=f"{now + 3_600_000}-0")
    assert [a.verdict for a in await ingress.take_in()] == ["late", "ok", "ok"]
    end = await ingress.shard.end("old")
    assert (end.state, end.reason) == (State.EXPIRED, Reason.DEADLINE)
    assert int((await ingress.shard.record("aged"))["accepted_at"]) == now - 1000
    assert now <= int((await ingress.shard.record("early"))["accepted_at"]) < now + 60_000
    await ingress.shard.check()


async def test_a_name_from_the_dawn_of_time_is_late(ingress: ShardIngress) -> None:
    await ingress.add_raw("id", "x", "prompt", "Hi", "deadline_ms", 604_800_000, name="0-1")
    assert [a.verdict for a in await ingress.take_in()] == ["late"]
    await ingress.shard.check(ended=True)


async def test_entries_trimmed_after_they_were_read(ingress: ShardIngress) -> None:
    """The one hole of a confined producer: it can empty its own stream."""
    await ingress.lease("a")
    await ingress.poll("a")
    await ingress.add(id="x", prompt="Hi")
    (held,) = await ingress.read("a")
    await ingress.redis.xtrim(ingress.keys.ingress(), maxlen=0)
    assert (await ingress.resolve(held)).verdict == "gone"
    await ingress.add(id="y", prompt="Hi")
    await ingress.read("a")
    await ingress.redis.xtrim(ingress.keys.ingress(), maxlen=0)
    await ingress.lease("b")
    await ingress.shard.ops.release_all("a", blame=False)
    assert (await ingress.poll("b")).entries == ()
    assert await ingress.left() == (0, 0)
    await ingress.shard.check(ended=True)


async def test_streams_of_tenants(ingress: ShardIngress) -> None:
    assert (await ingress.poll("w")).tenants == (None,)
    assert await ingress.ops.add_tenant("acme")
    assert not await ingress.ops.add_tenant("acme")
    assert await ingress.ops.add_tenant("rival")
    assert await ingress.ops.tenants() == ("acme", "rival")
    assert set((await ingress.poll("w")).tenants) == {None, "acme", "rival"}
    entry = await ingress.add("acme", prompt="Hi")
    await ingress.add("acme", id="acme.1", prompt="Hi")
    forged = await ingress.add("acme", id="rival.1", prompt="Hi")
    assert {(a.verdict, a.id) for a in await ingress.take_in()} == {
        ("ok", f"acme.{entry}"), ("ok", "acme.1"), ("refused", f"acme.{forged}"),
    }  # fmt: skip
    assert await ingress.redis.exists(ingress.keys.log("rival.1")) == 0
    assert (await ingress.shard.record("acme.1"))["tenant"] == "acme"
    assert await ingress.ops.remove_tenant("acme")
    assert not await ingress.ops.remove_tenant("acme")
    assert set((await ingress.poll("w")).tenants) == {None, "rival"}


@pytest.mark.parametrize("name", ["a.b", "", "a b", "a:b", "x" * 65])
async def test_names_of_no_tenant(newest_ingress: ShardIngress, name: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        await newest_ingress.ops.add_tenant(name)
    if name:
        await newest_ingress.redis.sadd(newest_ingress.keys.ingress_tenants, name)
        await newest_ingress.add(name, prompt="Hi")
        polled = await newest_ingress.poll("w")
        assert (polled.tenants, polled.broken) == ((None,), (name,))


async def test_keys_of_wrong_types_hurt_their_own_only(ingress: ShardIngress) -> None:
    await ingress.ops.add_tenant("broken")
    await ingress.ops.add_tenant("sound")
    await ingress.redis.set(ingress.keys.ingress("broken"), "x")
    await ingress.redis.set(ingress.keys.request("taken"), "x")
    await ingress.redis.set(ingress.keys.log("log"), "x")
    await ingress.redis.set(ingress.keys.queue(Lane.NORMAL, "q"), "x")
    assert (await ingress.poll("w")).broken == ("broken",)
    own = await ingress.add(id="taken", prompt="Hi")
    await ingress.add(id="log", prompt="Hi")
    await ingress.add(id="logbad", prompt="")
    await ingress.redis.set(ingress.keys.log("logbad"), "x")
    await ingress.add_raw("id", "queue", "prompt", "Hi", "tenant", "q")
    await ingress.add("sound", id="sound.1", prompt="Hi")
    assert {a.id: a.verdict for a in await ingress.take_in()} == {
        own: "broken", "log": "ok", "logbad": "refused", "queue": "broken", "sound.1": "ok",
    }  # fmt: skip
    assert (await ingress.shard.end(own)).reason is Reason.ENGINE_ERROR
    assert (await ingress.shard.end("logbad")).reason is Reason.INVALID
    assert await ingress.left() == (0, 0)


async def test_it_runs_at_maxmemory(ingress: ShardIngress) -> None:
    await ingress.lease("w")
    await ingress.poll("w")
    for i in range(5):
        await ingress.add(id=f"x{i}", prompt="Hi" * 5000, max_tokens="x" if i == 4 else 8)
    await ingress.redis.config_set("maxmemory", 1)
    verdicts = [a.verdict for a in await ingress.take_in()]
    await ingress.redis.config_set("maxmemory", 0)
    assert verdicts == ["ok"] * 4 + ["refused"]
    await ingress.shard.check()


async def test_nothing_of_ended_requests_lives_for_ever(ingress: ShardIngress) -> None:
    await ingress.ops.add_tenant("acme")
    await ingress.add("acme", prompt="Hi")
    await ingress.add(prompt="")
    await ingress.take_in()
    worker = ingress.shard.worker("w")
    await worker.send(worker.ending(await worker.claim_one(), 0, 1))
    await ingress.shard.check(ended=True)


def test_json_and_msgpack_say_the_same() -> None:
    for event in (
        Chunk(3, (1, 2), 'a "quoted" wörd \n', 7),
        End(n=5, reason=Reason.STOP, usage=Usage(prompt_tokens=1, output_tokens=5, attempts=1)),
        End(n=0, reason=Reason.CLIENT, message="é"),
    ):
        assert unpack_event(event.pack(Answer.JSON)) == unpack_event(event.pack()) == event
