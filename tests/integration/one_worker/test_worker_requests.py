"""One worker, all kinds of requests: each ends with exactly one terminal event and its reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis.asyncio
from log_writer import eventually
from waiting import wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer, Reason, Result, State
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.request import Request
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")
DEMO = Path(str(resources.files("penstock.gpu_worker") / "demo_model" / "target"))


@pytest.fixture
async def client(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client


async def end_of(producer: Producer, request_id: str) -> Result:
    return await asyncio.wait_for(producer.stream(request_id).collect(), 60)


async def test_greedy_tokens_are_transformers_own(producer: Producer) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = DEMO
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["The list type", "def parse(", "Return", "é", "A file object is", "x = 1\n"]
    lanes = ["batch", "normal", "critical"] * 2
    ids = [
        (await producer.submit(prompt, lane=lane, temperature=0, max_tokens=16 + 5 * i)).id
        for i, (prompt, lane) in enumerate(zip(prompts, lanes, strict=True))
    ]
    results = await asyncio.gather(*(end_of(producer, i) for i in ids))
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        encoded = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            whole = model.generate(**encoded, do_sample=False, max_new_tokens=16 + 5 * i)
        expected = whole[0, encoded.input_ids.shape[1] :].tolist()
        assert list(result.token_ids) == expected
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.usefixtures("worker")
async def test_a_worker_says_what_it_serves(client: redis.asyncio.Redis) -> None:
    summary = (await client.hget(KEYS.model_card, "summary") or b"").decode()
    assert "in float32 on cpu, context " in summary
    assert ", computed " in summary


async def test_seed_decides_the_tokens_whatever_else_runs(producer: Producer) -> None:
    alone = await producer.submit("The list type", max_tokens=40, temperature=1.0, seed=7)
    first = await end_of(producer, alone.id)
    others = [await producer.submit("def", max_tokens=60, temperature=0.8) for _ in range(5)]
    again = await producer.submit("The list type", max_tokens=40, temperature=1.0, seed=7)
    second = await end_of(producer, again.id)
    for other in others:
        await end_of(producer, other.id)
    assert second.token_ids == first.token_ids


async def test_stop_string_ends_the_text_before_it(producer: Producer) -> None:
    free = await producer.submit("The list type", max_tokens=60, temperature=0, ignore_eos=True)
    text = (await end_of(producer, free.id)).text
    stop = text[len(text) // 2 :][:6]
    cut = await producer.submit(
        "The list type", max_tokens=60, temperature=0, ignore_eos=True, stop=[stop]
    )
    result = await end_of(producer, cut.id)
    assert (result.reason, result.text) == (Reason.STOP, text[: text.index(stop)])


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"\xc1", "payload"),
        (b"\x93\x01\x02\x03", "map"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": b"\xff\xfe"}, use_bin_type=False), "UTF-8"),
        (msgpack.packb({"v": 9, "id": "x", "prompt": "a"}), "version"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": "a", "max_tokens": 0}), "max_tokens"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": "a", "temperature": -1}), "temperature"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": "a", "lane": "vip"}), "lane"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": ""}), "prompt"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": [10**6]}), "prompt"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": "a", "wings": 2}), "wings"),
        (msgpack.packb({"v": 1, "id": "x", "prompt": "a" * 1_100_000}), "<= 1048576 bytes"),
    ],
)
async def test_payload_that_no_client_of_ours_sends_fails_alone(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, payload: bytes, says: str
) -> None:
    bystander = await producer.submit("Return", max_tokens=30, temperature=0, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(Request, "pack", lambda self: payload)
        raw = await producer.submit("replaced by the payload")
    result = await end_of(producer, raw.id)
    assert (result.state, result.reason, result.token_ids) == (State.FAILED, Reason.INVALID, ())
    assert says in result.end.message
    assert (await end_of(producer, bystander.id)).reason is Reason.LENGTH


async def test_prompt_longer_than_the_context(producer: Producer) -> None:
    submitted = await producer.submit([5] * 5000, max_tokens=4)
    result = await end_of(producer, submitted.id)
    assert (result.state, result.reason) == (State.FAILED, Reason.PROMPT_TOO_LONG)
    assert "5000" in result.end.message


async def test_output_ends_at_the_context(producer: Producer) -> None:
    limit = json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    submitted = await producer.submit([300] * (limit - 7), max_tokens=100, ignore_eos=True)
    result = await end_of(producer, submitted.id)
    assert (result.reason, result.end.n) == (Reason.LENGTH, 7)


async def test_cancel_stops_the_engine(producer: Producer, worker: WorkerProcess) -> None:
    submitted = await producer.submit("The list", max_tokens=1500, ignore_eos=True)
    stream = producer.stream(submitted.id)
    async for chunk in stream:
        if chunk.stop >= 5:
            break
    await stream.aclose()
    reply = await producer.cancel(submitted.id)
    assert (reply.changed, reply.state) == (True, State.CANCELLED)
    result = await end_of(producer, submitted.id)
    assert (result.reason, result.end.n) == (Reason.CLIENT, len(result.token_ids))
    assert result.end.n < 1500
    await asyncio.to_thread(
        wait_until, lambda: worker.metric("kv_blocks_used") == 0, "the blocks were freed"
    )
    assert (await producer.cancel(submitted.id)).changed is False


async def test_urgent_request_does_not_wait_for_running_batch_work(
    redis_url: str, workers: WorkerFactory
) -> None:
    """All sequences of the only worker are taken by long batch work; it gives way and completes."""
    worker = workers.engine(
        "only",
        model__path="synthetic",
        model__synthetic_step_ms=5.0,
        engine__max_sequences=2,
        worker__lease_ms=60_000,  # no sweep comes to its help
    )
    prompt = "x"
    async with Producer(redis_url) as own, redis.asyncio.Redis.from_url(redis_url) as server:
        batch = [
            await own.submit(prompt, lane="batch", max_tokens=400, seed=seed) for seed in range(3)
        ]
        while await server.zcard(KEYS.deadlines) and not await server.exists(KEYS.log(batch[1].id)):
            await asyncio.sleep(0.005)
        urgent = await own.submit(prompt, lane="critical", max_tokens=20, seed=9)
        first = await end_of(own, urgent.id)
        states = [(await own.status(one.id)).end for one in batch]
        assert states == [None] * 3, "batch work was far from its end"
        results = [await end_of(own, one.id) for one in batch]
    assert first.end.n == 20
    expected = [synthetic_tokens(seed, [ord(prompt)], 400) for seed in range(3)]
    assert [result.token_ids for result in results] == expected
    assert worker.metric("preemptions_total") >= 1


async def test_deadline_ends_a_running_request(producer: Producer, worker: WorkerProcess) -> None:
    submitted = await producer.submit("The", max_tokens=1900, ignore_eos=True, deadline_ms=400)
    result = await end_of(producer, submitted.id)
    assert (result.state, result.reason) == (State.EXPIRED, Reason.DEADLINE)
    await asyncio.to_thread(
        wait_until, lambda: worker.metric("kv_blocks_used") == 0, "the blocks were freed"
    )


async def test_broken_log_key_hurts_only_its_request(
    producer: Producer, client: redis.asyncio.Redis
) -> None:
    hurt = await producer.submit("The list", max_tokens=1500, ignore_eos=True)
    well = await producer.submit("The list", max_tokens=200, ignore_eos=True)
    while not await client.exists(KEYS.log(hurt.id)):
        await asyncio.sleep(0.005)
    await client.set(KEYS.log(hurt.id), "not a stream")
    assert (await end_of(producer, well.id)).end.n == 200

    async def ended() -> bool:
        return (await producer.status(hurt.id)).state is State.FAILED

    async with asyncio.timeout(20):
        while not await ended():
            await asyncio.sleep(0.01)
    status = await producer.status(hurt.id)
    assert status.end is not None
    assert status.end.reason is Reason.ENGINE_ERROR


async def test_request_with_a_hole_in_its_log_ends_and_is_not_continued(
    redis_url: str, workers: WorkerFactory
) -> None:
    async with Producer(redis_url) as own, redis.asyncio.Redis.from_url(redis_url) as server:
        first = workers.engine("first", worker__lease_ms=300, model__path="synthetic")
        submitted = await own.submit("a", max_tokens=5000)
        while int(await server.hget(KEYS.request(submitted.id), "tokens") or 0) < 20:
            await asyncio.sleep(0.005)
        first.kill()
        (entry, _), *_ = await server.xrange(KEYS.log(submitted.id), count=1)
        await server.xdel(KEYS.log(submitted.id), entry)
        workers.engine("second", model__path="synthetic")
        async with asyncio.timeout(20):
            while (await own.status(submitted.id)).end is None:
                await asyncio.sleep(0.01)
        end = (await own.status(submitted.id)).end
    assert end is not None
    assert (end.reason, "does not hold all" in end.message) == (Reason.ENGINE_ERROR, True)


async def test_deleted_record_frees_the_engine(
    producer: Producer, client: redis.asyncio.Redis, worker: WorkerProcess
) -> None:
    submitted = await producer.submit("The list", max_tokens=1500, ignore_eos=True)
    while not await client.exists(KEYS.log(submitted.id)):
        await asyncio.sleep(0.005)
    await client.delete(KEYS.request(submitted.id))
    await asyncio.to_thread(
        wait_until, lambda: worker.metric("kv_blocks_used") == 0, "the blocks were freed"
    )


async def test_more_requests_than_sequences_all_complete(producer: Producer) -> None:
    ids = [(await producer.submit("Return", max_tokens=20, ignore_eos=True)).id for _ in range(40)]
    results = await asyncio.gather(*(end_of(producer, i) for i in ids))
    assert [r.end.n for r in results] == [20] * 40


async def test_health_is_about_the_step_loop(worker: WorkerProcess) -> None:
    assert worker.get("/healthz") == (200, "ok\n")
    assert worker.get("/readyz") == (200, "ok\n")
    assert worker.get("/elsewhere")[0] == 404
    assert worker.metric("ready") == 1


@pytest.mark.parametrize("kind", ["msgpack", "json", "several"])
async def test_logs_are_made_compact_some_time_after_the_end(
    server: EmbeddedRedis,
    worker: WorkerProcess,
    producer: Producer,
    client: redis.asyncio.Redis,
    kind: str,
) -> None:
    name, log = f"compact-{kind}", KEYS.log(f"compact-{kind}")
    made = worker.metric("compacted_logs_total")
    options: dict[str, Any] = {"max_tokens": 60, "logprobs": 2, "ignore_eos": True}
    if kind == "several":
        options |= {"n": 3, "temperature": 0.9, "prompt_logprobs": 1}
    else:
        options["answer"] = kind
    await producer.submit(id=name, prompt="The list", **options)
    result = await end_of(producer, name)
    entries = await client.xrange(log)
    size = await client.memory_usage(log, samples=0)
    assert len(entries) > 2
    # As if it had ended longer ago than the setting says.
    await client.zadd(KEYS.ended, {name: 1})

    async def is_compact() -> bool:
        # The worker counts logs of earlier tests as well: only the note of this one tells.
        return await client.zscore(KEYS.ended, name) is None

    await eventually(is_compact, "a compact log", 30)
    await asyncio.to_thread(
        wait_until, lambda: worker.metric("compacted_logs_total") > made, "it was counted"
    )
    # One that keeps its entries takes less memory where the server holds room for more of them.
    assert await client.memory_usage(log, samples=0) <= size
    assert await end_of(producer, name) == result
    after = await client.xrange(log)
    assert after == entries if kind == "json" else len(after) == 1
