"""Answers as JSON, from real workers, for clients that know nothing but Redis."""

from __future__ import annotations

import json
import signal
import statistics
import time
from typing import Any

import pytest
import redis
from delivery.fleet import Shard, chunk
from ingress.shard_ingress import ShardIngress
from waiting import wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Answer
from penstock.shared.scripts.operations import Append
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")
SYNTHETIC = {"model__path": "synthetic"}


class PlainClient:
    """What a client in any language does: XADD, XREAD, and reading JSON."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)

    def ask(self, prompt: str = "Hi", **fields: Any) -> str:
        """Add a request; returns the id of its answer."""
        entry: str = self.redis.xadd(KEYS.ingress(), {"prompt": prompt, "answer": "json", **fields})
        return str(fields.get("id", entry))

    def events(self, id: str, timeout_s: float = 60) -> list[dict[str, Any]]:
        """Everything up to the end."""
        events: list[dict[str, Any]] = []
        last, deadline = "0-0", time.monotonic() + timeout_s
        while not (events and "end" in events[-1]):
            assert time.monotonic() < deadline, f"no end of {id} after {events}"
            for _, entries in self.redis.xread({KEYS.log(id): last}, block=1000):
                for last, fields in entries:  # noqa: B007 (the last one read is where to go on)
                    events += [json.loads(value) for value in fields.values()]
        return events


@pytest.fixture
def client(redis_url: str) -> Any:
    client = PlainClient(redis_url)
    yield client
    client.redis.close()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events[:-1])


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    at = 0
    for event in events[:-1]:
        assert event["start"] == at
        at += len(event["ids"])
    assert events[-1]["n"] == at
    return [token for event in events[:-1] for token in event["ids"]]


async def test_answers_of_a_real_worker(
    workers: WorkerFactory, client: PlainClient, redis_url: str
) -> None:
    workers.engine("w", model__synthetic_step_ms=2, **SYNTHETIC)
    pubsub = client.redis.pubsub()
    pubsub.subscribe(KEYS.channel("whole"))
    assert pubsub.get_message(timeout=60)
    id = client.ask(id="whole", max_tokens=12, seed=3, lane="critical")
    events = client.events(id)
    expected = list(synthetic_tokens(3, [ord(c) for c in "Hi"], 12))
    assert ids_of(events) == expected
    assert text_of(events) == "".join(map(chr, expected))
    usage = events[-1].pop("usage")
    assert events[-1] == {
        "end": True, "n": 12, "state": "completed", "reason": "length", "message": "",
    }  # fmt: skip
    assert (usage["prompt_tokens"], usage["output_tokens"], usage["attempts"]) == (2, 12, 1)
    assert usage["device_us"] > 0
    heard = [json.loads(pubsub.get_message(timeout=60)["data"]) for _ in events]
    assert heard[:-1] == events[:-1]
    pubsub.close()

    stopped = client.events(client.ask(max_tokens=12, seed=3, stop=chr(expected[5])))
    cut = "".join(map(chr, expected)).partition(chr(expected[5]))[0]
    assert (text_of(stopped), stopped[-1]["reason"]) == (cut, "stop")

    expired = client.events(client.ask(max_tokens=5000, deadline_ms=1500))
    usage = expired[-1].pop("usage")
    assert (usage["prompt_tokens"], usage["output_tokens"]) == (2, len(ids_of(expired)))
    assert expired[-1] == {
        "end": True, "n": len(ids_of(expired)), "state": "expired", "reason": "deadline",
        "message": "",
    }  # fmt: skip

    running = client.ask(id="running", max_tokens=5000)
    client.redis.xread({KEYS.log(running): "0-0"}, block=60_000)
    async with Producer(redis_url) as producer:
        assert (await producer.cancel(running)).changed
        cancelled = client.events(running)
        assert (cancelled[-1]["state"], cancelled[-1]["reason"]) == ("cancelled", "client")
        # Our own reader reads JSON logs as well, of requests and of refusals.
        result = await producer.result("whole")
        assert list(result.token_ids) == expected
        assert (await producer.status(running)).end is not None
        refused = client.ask(id="refused", max_tokens=0)
        assert client.events(refused)[-1]["reason"] == "invalid"
        assert (await producer.result(refused, check=False)).reason == "invalid"
        assert (await producer.submit("Hi", max_tokens=3, answer="json", id="sub")).id == "sub"
        assert len(ids_of(client.events("sub"))) == 3


def test_a_json_stream_goes_on_after_its_worker_was_killed(
    workers: WorkerFactory, client: PlainClient
) -> None:
    settings = {**SYNTHETIC, "worker__lease_ms": 300}
    # Slow enough that it is still at work when it is killed.
    first = workers.engine("first", model__synthetic_step_ms=100, **settings)
    id = client.ask(max_tokens=60, seed=9)
    client.redis.xread({KEYS.log(id): "5-0"}, block=60_000)
    first.kill()
    unseen = [client.ask(max_tokens=2) for _ in range(20)]
    workers.engine("second", model__synthetic_step_ms=10, **settings)
    events = client.events(id)
    assert ids_of(events) == list(synthetic_tokens(9, [ord(c) for c in "Hi"], 60))
    assert events[-1]["usage"]["attempts"] == 2
    for id in unseen:
        assert client.events(id)[-1]["state"] == "completed"
    assert client.redis.xlen(KEYS.ingress()) == 0


def stop_with_entries_in_hand(first: WorkerProcess, client: PlainClient, ids: list[str]) -> None:
    """Stop a worker's process when the server has given it entries, and before it sees them."""

    def has_some() -> bool:
        first.signal(signal.SIGSTOP)
        # All at once: a waiting reader is served after the transaction.
        pipeline = client.redis.pipeline(transaction=True)
        for id in ids:
            fields = {"id": id, "prompt": "Hi", "max_tokens": "3", "answer": "json"}
            pipeline.xadd(KEYS.ingress(), fields)
        pipeline.execute()
        if client.redis.xpending(KEYS.ingress(), "workers")["pending"]:
            return True
        # It was not waiting just then. What it will find is the same again: nothing runs twice.
        first.signal(signal.SIGCONT)
        return False

    wait_until(has_some, "entries in the hand of a stopped worker")


@pytest.mark.parametrize("fate", ["killed", "only stopped"])
def test_a_worker_process_lost_between_reading_and_acting(
    workers: WorkerFactory, client: PlainClient, fate: str
) -> None:
    settings = {**SYNTHETIC, "model__synthetic_step_ms": 1, "worker__lease_ms": 500}
    # What it was given lies in its connection for as long as it is stopped.
    settings |= {"redis__socket_timeout_s": 60}
    first = workers.engine("first", **settings)
    client.events(client.ask(max_tokens=1))
    ids = [f"x{i}" for i in range(30)]
    stop_with_entries_in_hand(first, client, ids)
    if fate == "killed":
        first.kill()
    workers.engine("second", **settings)
    for id in ids:
        assert client.events(id)[-1]["state"] == "completed"
    if fate == "only stopped":
        first.signal(signal.SIGCONT)
        wait_until(lambda: first.metric("ingress_entries_total") >= 30, "it has acted, too late")
    for id in ids:
        assert len(ids_of(client.events(id))) == 3
    assert client.redis.hget(KEYS.counters, "ended:completed") == "31"
    wait_until(lambda: client.redis.xlen(KEYS.ingress()) == 0, "the stream is empty")


def test_latency_of_a_plain_request_to_an_idle_worker(
    workers: WorkerFactory, client: PlainClient
) -> None:
    workers.engine("w", model__synthetic_step_ms=0, **SYNTHETIC)
    client.events(client.ask(max_tokens=1))
    to_claim, to_token = [], []
    for _ in range(20):
        began = time.perf_counter()
        id = client.ask(max_tokens=1)
        client.redis.xread({KEYS.log(id): "0-0"}, block=60_000)
        to_token.append((time.perf_counter() - began) * 1000)
        to_claim.append(client.events(id)[-1]["usage"]["queue_ms"])
    print(
        f"\nXADD -> claimed, ms by the server's clock: median {statistics.median(to_claim)}, "
        f"max {max(to_claim)}; XADD -> first token: median {statistics.median(to_token):.1f}, "
        f"max {max(to_token):.1f}"
    )
    # Whoever only looked once a second, as the knock does, would need half a second.
    assert statistics.median(to_claim) < 200


async def end_of(shard: Shard) -> dict[str, Any]:
    (*_, (_, fields)) = await shard.redis.xrange(shard.keys.log("x"))
    event: dict[str, Any] = json.loads(fields[b"end"])
    assert list(event) == ["end", "n", "state", "reason", "message", "usage"]
    return event


async def test_ends_that_scripts_write_are_json_too(ingress: ShardIngress) -> None:
    shard = ingress.shard.with_retry(max_blames=1)

    async def submit(**changes: Any) -> None:
        await shard.redis.delete(shard.keys.request("x"), shard.keys.log("x"))
        fields = {"id": "x", "prompt": "Hi", "answer": "json", "max_tokens": 4, **changes}
        await shard.ops.submit(
            Request.build(**fields), bounds=ingress.bounds, default_deadline_ms=60_000
        )

    await submit()
    await shard.ops.cancel("x")
    assert (await end_of(shard))["reason"] == "client"
    await submit(max_queue_ms=1)
    await shard.sweep_until(lambda swept: swept.expired > 0)
    assert (await end_of(shard))["reason"] == "queue_timeout"

    await submit()
    worker = shard.worker("w")
    await worker.claim_one()
    await shard.ops.release_all("w", blame=True)
    end = await end_of(shard)
    assert (end["state"], end["reason"]) == ("dead", "poison")
    assert end["message"] == "1 workers died with it, the last 1 without progress"
    (letter,) = await shard.ops.dead_letters()
    await shard.ops.redrive(letter.entry)
    claim = await worker.claim_one()
    assert Request.unpack(claim.payload).answer is Answer.JSON
    await shard.ops.cancel("x")
    assert (await end_of(shard))["reason"] == "client", "its next life is JSON as well"

    # Its record is gone: the form is told by what the log holds.
    await submit()
    claim = await worker.claim_one()
    packed = chunk("x", 0, 1).pack(Answer.JSON)
    assert await worker.send(Append("x", claim.epoch, 0, 1, packed)) == [(0, 1)]
    await shard.redis.delete(shard.keys.request("x"))
    await shard.sweep_until(lambda swept: swept.repaired > 0)
    assert (await end_of(shard))["message"] == "the record of this request was lost in Redis"


def test_msgpack_stays_the_default() -> None:
    asks = Request(id="x", prompt="Hi", answer=Answer.JSON)
    assert b"answer" not in Request(id="x", prompt="Hi").pack()
    assert Request.unpack(asks.pack()) == asks
