"""Dead letters through the client and the program: shown, run again, thrown away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from delivery.fleet import MINUTE_MS, NO_BOUNDS, Shard, request
from redis.exceptions import ConnectionError as RedisConnectionError
from workers import WorkerFactory

from penstock.producer import (
    IdInUse,
    InvalidRequest,
    Producer,
    Reason,
    State,
    UnknownDeadLetter,
)
from penstock.producer.cli import main
from penstock.shared.scripts.operations import SubmitReply
from penstock.shared.settings import load_settings


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Awaitable[Done]]


@pytest.fixture
def penstock(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("REDIS_URL", redis_url)

    async def run(*arguments: str) -> Done:
        code = await asyncio.to_thread(main, arguments)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(redis_url) as client:
        yield client


async def kill_workers_of(shard: Shard, name: str, times: int = 5) -> None:
    """Workers that claimed it fall silent, one after the other, before its first token."""
    for i in range(times):
        claim = await shard.worker(f"{name}-{i}", lease_ms=1).claim_one()
        assert claim.id == name
        await shard.reap()


async def make_dead(shard: Shard, *names: str, **fields: object) -> None:
    for name in names:
        await shard.submit(name, **fields)
        await kill_workers_of(shard, name)
        assert await shard.state(name) == "dead"


async def test_a_poison_request_is_redriven_and_completes(
    newest_shard: Shard, redis_url: str, producer: Producer, penstock: Run, tmp_path: Path
) -> None:
    shard = newest_shard
    await producer.submit("who killed it?", id="poison", max_tokens=12, seed=3, temperature=0)
    await kill_workers_of(shard, "poison")
    result = await producer.result("poison", check=False)
    assert (result.state, result.reason, result.token_ids) == (State.DEAD, Reason.POISON, ())

    done = await penstock("dlq", "list", "--json")
    (facts,) = json.loads(done.out)["dead_letters"]
    assert (facts["id"], facts["reason"], facts["blames"]) == ("poison", "poison", 5)
    assert facts["prompt"] == "who killed it?"
    done = await penstock("dlq", "redrive", "poison")
    assert (done.code, done.out) == (0, "redriven poison\n")
    assert await producer.dead_letters.count() == 0
    assert (await producer.status("poison")).state is State.QUEUED

    factory = WorkerFactory(redis_url, tmp_path)
    try:
        factory.engine("good", model__path="synthetic")
        result = await producer.result("poison", timeout=60)
    finally:
        factory.close()
    assert (result.state, len(result.token_ids)) == (State.COMPLETED, 12)


async def test_what_is_redriven_is_what_was_submitted(
    newest_shard: Shard, producer: Producer
) -> None:
    fields = {"lane": "critical", "tenant": "acme", "max_queue_ms": 50_000, "seed": 7}
    await producer.submit([1, 2, 3], id="x", max_tokens=5, deadline_ms=60_000, **fields)
    before = await newest_shard.record("x")
    await kill_workers_of(newest_shard, "x")
    letter = await producer.dead_letters.redrive("x")
    after = await newest_shard.record("x")
    for name in ("payload", "digest", "lane", "tenant", "cost", "output_cost"):
        assert after[name] == before[name]
    for name in ("deadline", "queue_deadline"):
        assert int(after[name]) - int(after["accepted_at"]) == int(before[name]) - int(
            before["accepted_at"]
        )
    assert letter.payload == before["payload"].encode("latin-1")
    assert (await producer.submit([1, 2, 3], id="x", max_tokens=5, deadline_ms=60_000, **fields)
            ).duplicate  # fmt: skip
    await newest_shard.check()


async def test_a_redriven_request_keeps_its_note(shard: Shard) -> None:
    """Else its readers lack what its submitter left for them, and its resubmission conflicts."""

    async def submit() -> SubmitReply:
        return await shard.ops.submit(
            request("x"), bounds=NO_BOUNDS, default_deadline_ms=MINUTE_MS, note=b"a note"
        )

    await submit()
    await kill_workers_of(shard, "x")
    letter = (await shard.redis.xrange(shard.keys.dead_letters))[0][0]
    await shard.ops.redrive(letter.decode())
    assert (await shard.record("x"))["note"] == "a note"
    assert (await submit()).duplicate
    await shard.check()


async def test_letters_are_found_by_id_and_by_their_own_name(
    newest_shard: Shard, producer: Producer
) -> None:
    letters = producer.dead_letters
    assert (await letters.count(), await letters.newest()) == (0, None)
    for name in ("x", "nobody", "1-1", ""):
        with pytest.raises(UnknownDeadLetter, match="dlq list"):
            await letters.find(name)
    await make_dead(newest_shard, "x", "1-1")
    found = [letter async for letter in letters.all()]
    assert [letter.id for letter in found] == ["x", "1-1"]
    assert await letters.find("x") == await letters.find(found[0].entry) == found[0]
    assert (await letters.find("1-1")).id == "1-1"
    assert await letters.newest() == found[1].entry
    assert [letter.id async for letter in letters.all(until=found[0].entry)] == ["x"]


async def test_an_id_with_two_letters_is_to_be_named_by_entry(
    newest_shard: Shard, producer: Producer
) -> None:
    await make_dead(newest_shard, "x")
    await newest_shard.redis.delete(newest_shard.keys.request("x"))  # its retention has passed
    await make_dead(newest_shard, "x", prompt="another")
    letters = producer.dead_letters
    entries = [letter.entry async for letter in letters.all()]
    with pytest.raises(InvalidRequest, match=f"{entries[0]} or {entries[1]}"):
        await letters.drop("x")
    await letters.drop(entries[0])
    assert (await letters.find("x")).entry == entries[1]


async def test_a_redrive_touches_no_request_that_has_the_id_now(
    newest_shard: Shard, producer: Producer, penstock: Run
) -> None:
    await make_dead(newest_shard, "x")
    await newest_shard.redis.delete(newest_shard.keys.request("x"))
    await newest_shard.submit("x", prompt="another")
    before = await newest_shard.record("x")
    with pytest.raises(IdInUse, match="is queued"):
        await producer.dead_letters.redrive("x")
    done = await penstock("dlq", "redrive", "x")
    assert done.code == 2
    assert "in use" in done.err
    done = await penstock("dlq", "redrive", "--all", "--yes", "--json")
    assert done.code == 1
    assert [failure["id"] for failure in json.loads(done.out)["failed"]] == ["x"]
    assert await newest_shard.record("x") == before
    assert await producer.dead_letters.count() == 1


async def test_a_redrive_whose_answer_was_lost_is_done_once(
    newest_shard: Shard, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_dead(newest_shard, "x")
    run = type(newest_shard.ops).redrive
    calls = 0

    async def lossy(self: object, entry: str) -> object:
        nonlocal calls
        calls += 1
        reply = await run(self, entry)  # type: ignore[arg-type]
        if calls == 1:
            raise RedisConnectionError("cut")
        return reply

    monkeypatch.setattr(type(newest_shard.ops), "redrive", lossy)
    assert (await producer.dead_letters.redrive("x")).id == "x"
    assert calls == 2
    assert await newest_shard.counter("requests") == 1
    with pytest.raises(UnknownDeadLetter):
        await producer.dead_letters.redrive("x")
    await newest_shard.check()


async def test_all_letters_of_now(newest_shard: Shard, penstock: Run) -> None:
    done = await penstock("dlq", "redrive", "--all", "--yes")
    assert (done.code, done.out) == (0, "redriven 0\n")
    await make_dead(newest_shard, "a", "b", "c")
    done = await penstock("dlq", "drop", "--all")
    assert done.code == 2
    assert "drop 3 dead letters?" in done.err
    assert "--yes" in done.err
    done = await penstock("dlq", "drop", "b", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"dropped": ["b"], "failed": []})
    assert await newest_shard.state("b") == "dead"
    done = await penstock("dlq", "redrive", "--all", "--yes", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"redriven": ["a", "c"], "failed": []})
    assert [await newest_shard.state(name) for name in "ac"] == ["queued", "queued"]
    await newest_shard.check()


async def test_list_and_show(newest_shard: Shard, penstock: Run) -> None:
    done = await penstock("dlq", "list")
    assert (done.code, done.out) == (0, "no dead letters\n")
    await make_dead(newest_shard, "x", prompt="tell [bold] me \x1b[31m" + "y" * 100)
    await make_dead(newest_shard, "z")
    done = await penstock("dlq", "list", "--limit", "1")
    assert done.code == 0
    assert "tell [bold] me ␛[31m" in done.out
    assert "\x1b" not in done.out
    assert "1 more" in done.err
    done = await penstock("dlq", "show", "x")
    assert done.code == 0
    assert "reason: poison" in done.out
    assert "y" * 100 in done.out
    assert "\x1b" not in done.out
    done = await penstock("dlq", "show", "x", "--json")
    assert json.loads(done.out)["request"]["max_tokens"] == 8
    done = await penstock("dlq", "show", "nobody")
    assert (done.code, done.out) == (2, "")
    assert "no dead letter 'nobody'" in done.err
    for arguments in ([], ["x", "--all"]):
        done = await penstock("dlq", "redrive", *arguments)
        assert done.code == 2
        assert "--all without an id" in done.err


async def test_a_letter_whose_payload_is_garbage(newest_shard: Shard, penstock: Run) -> None:
    await newest_shard.submit("x")
    await newest_shard.redis.hset(newest_shard.keys.request("x"), "payload", b"\xff\x00garbage")
    await kill_workers_of(newest_shard, "x")
    done = await penstock("dlq", "list")
    assert (done.code, done.err) == (0, "")
    assert "unreadable" in done.out
    done = await penstock("dlq", "show", "x", "--json")
    assert "unreadable" in json.loads(done.out)
    assert (await penstock("dlq", "drop", "x")).code == 0


async def test_no_letters_through_a_dead_server(penstock: Run) -> None:
    done = await penstock("dlq", "list", "--redis", "redis://127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert "cannot reach Redis" in done.err


async def test_letters_of_other_shards_are_not_seen(newest_shard: Shard, redis_url: str) -> None:
    await make_dead(newest_shard, "x")
    settings = load_settings({"redis.url": redis_url, "queue.shard": 1})
    async with Producer(settings=settings) as other:
        assert await other.dead_letters.count() == 0
