"""Streams whose tokens come several at a time, as drafts are accepted, stay whole and the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis.asyncio
from log_writer import eventually
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer, Result, State
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk

KEYS = Keys("demo")
TOKENS = 250
"""So many that a worker's metrics, which it sends every 0.1 s, come long before the last token."""
BEGUN = 10
PROMPTS = {"greedy": "The list type", "sampled": "def parse(", "other": "Return the name of"}
DRAFTS = {"speculation__length": 4, "worker__lease_ms": 600}

Outputs = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outputs]:
    """What an undisturbed worker without drafts gives."""

    async def run(url: str) -> Outputs:
        async with Producer(url) as producer:
            await submit_all(producer)
            return {id: (await producer.result(id, timeout=120)).token_ids for id in PROMPTS}

    with EmbeddedRedis() as server:
        workers = WorkerFactory(server.url, tmp_path_factory.mktemp("plain"))
        try:
            workers.engine("plain", speculation__source="off")
            yield asyncio.run(run(server.url))
        finally:
            workers.close()


async def submit_all(producer: Producer) -> None:
    for number, (id, prompt) in enumerate(PROMPTS.items()):
        await producer.submit(
            prompt,
            id=id,
            max_tokens=TOKENS,
            temperature=0.8 if id == "sampled" else 0.0,
            seed=number,
            ignore_eos=True,
        )


async def read_all(producer: Producer) -> dict[str, Result]:
    """Live readers of all; a gap or a repeat raises inside the reader."""
    async with asyncio.timeout(120):
        results = await asyncio.gather(*(producer.stream(id).collect() for id in PROMPTS))
    return dict(zip(PROMPTS, results, strict=True))


async def begun(client: redis.asyncio.Redis, worker: WorkerProcess) -> None:
    """Wait until all streams have begun and the worker has accepted drafts."""

    async def have() -> bool:
        counts = [int(await client.hget(KEYS.request(id), "tokens") or 0) for id in PROMPTS]
        return min(counts) >= BEGUN and await asyncio.to_thread(accepted, worker) > 0

    await eventually(have, "all have begun, and drafts were accepted", 30)


async def logged(client: redis.asyncio.Redis, id: str) -> tuple[list[int], int]:
    """A log's tokens, none missing and none twice; and how many the largest chunk has."""
    entries = await client.xrange(KEYS.log(id))
    events = [unpack_event(fields[b"chunk"]) for _, fields in entries if b"chunk" in fields]
    chunks = [event for event in events if isinstance(event, Chunk)]
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.start == len(tokens)
        tokens += chunk.token_ids
    return tokens, max(len(chunk.token_ids) for chunk in chunks)


def accepted(worker: WorkerProcess) -> float:
    return worker.metric("accepted_tokens_total")


@pytest.mark.timeout(300)  # three workers start one after the other
async def test_a_machine_is_lost_amid_accepted_drafts(
    redis_url: str, workers: WorkerFactory, plain: Outputs
) -> None:
    first = workers.engine("first", **DRAFTS)
    async with Producer(redis_url) as producer, redis.asyncio.Redis.from_url(redis_url) as client:
        await submit_all(producer)
        readers = asyncio.create_task(read_all(producer))
        await begun(client, first)
        first.kill()
        before = {id: int(await client.hget(KEYS.request(id), "tokens")) for id in PROMPTS}
        assert max(before.values()) < TOKENS
        second = workers.engine("second", **DRAFTS)
        results = await readers
        logs = {id: await logged(client, id) for id in PROMPTS}
    assert {id: result.token_ids for id, result in results.items()} == plain
    assert {id: tuple(tokens) for id, (tokens, _) in logs.items()} == plain
    assert {result.usage.attempts for result in results.values() if result.usage} == {2}
    assert max(largest for _, largest in logs.values()) > 1
    await eventually(lambda: asyncio.to_thread(_has_accepted, second), "it accepted drafts, too")


async def test_one_is_cancelled_and_one_expires_amid_accepted_drafts(
    redis_url: str, workers: WorkerFactory, plain: Outputs
) -> None:
    worker = workers.engine("only", **DRAFTS)
    async with Producer(redis_url) as producer, redis.asyncio.Redis.from_url(redis_url) as client:
        await submit_all(producer)
        readers = asyncio.create_task(read_all(producer))
        await begun(client, worker)
        await producer.cancel("greedy")
        await client.hset(KEYS.request("sampled"), "deadline", 1)  # as if it were long over
        await client.zadd(KEYS.deadlines, {"sampled": 1}, xx=True)
        results = await readers
        logs = {id: await logged(client, id) for id in PROMPTS}
    states = {id: result.state for id, result in results.items()}
    assert states == {
        "greedy": State.CANCELLED,
        "sampled": State.EXPIRED,
        "other": State.COMPLETED,
    }
    for id, (tokens, largest) in logs.items():
        assert results[id].token_ids == tuple(tokens)
        assert tuple(tokens) == plain[id][: len(tokens)]
        assert largest > 1
        assert (BEGUN <= len(tokens) < TOKENS) == (id != "other")
    assert len(logs["other"][0]) == TOKENS
    await eventually(lambda: asyncio.to_thread(_is_idle, worker), "all blocks were freed")


def _has_accepted(worker: WorkerProcess) -> bool:
    return accepted(worker) > 0


def _is_idle(worker: WorkerProcess) -> bool:
    return worker.metric("kv_blocks_used") == 0
