"""Requests with several outputs through Redis and real workers: apart, continued, refused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import redis.asyncio
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer, Reason, Result
from penstock.producer.sync import BlockingProducer
from penstock.shared.errors import UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.request import Request
from penstock.shared.synthetic import SYNTHETIC, synthetic_tokens

KEYS = Keys("demo")
PROMPT = "The list type"


async def result_of(producer: Producer, **options: Any) -> Result:
    submitted = await producer.submit(PROMPT, **{"max_tokens": 12, "seed": 4, **options})
    return await asyncio.wait_for(producer.stream(submitted.id).collect(), 60)


async def test_choices_are_told_apart(producer: Producer) -> None:
    one, three, nine = await asyncio.gather(
        result_of(producer), result_of(producer, n=3), result_of(producer, n=9)
    )
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.choices[0].token_ids == one.token_ids == three.token_ids
    assert three.choices[0].text == one.text
    # More than the worker runs at the same time take turns, and are what they are all the same.
    assert nine.choices[:3] == three.choices
    assert len({choice.token_ids for choice in nine.choices}) == 9
    assert {choice.reason for choice in nine.choices} <= {Reason.STOP, Reason.LENGTH}
    assert nine.usage is not None
    assert nine.usage.output_tokens == sum(len(c.token_ids) for c in nine.choices) == nine.end.n
    assert one.choices[0].reason is one.reason


async def test_a_stream_says_whose_each_token_is(producer: Producer) -> None:
    stream = await producer.generate(PROMPT, n=3, max_tokens=8, ignore_eos=True)
    chunks = [chunk async for chunk in stream]
    runs = [run for chunk in chunks for run in chunk.runs()]
    for choice in range(3):
        mine = [run for run in runs if run.choice == choice]
        starts = [run.start for run in mine]
        lengths = [len(run.token_ids) for run in mine]
        assert starts == [sum(lengths[:i]) for i in range(len(mine))]
        assert sum(lengths) == 8
        assert [run.reason for run in mine] == [None] * (len(mine) - 1) + [Reason.LENGTH]
    # A reader that comes back at a chunk's end joins every choice without a seam.
    whole = (await producer.result(stream.id)).choices
    for seam in {chunk.stop for chunk in chunks}:
        late = await producer.stream(stream.id, from_index=seam).collect()
        before = [c for c in chunks if c.stop <= seam]
        texts = {
            c: "".join(r.text for k in before for r in k.runs() if r.choice == c) for c in range(3)
        }
        for choice in late.choices:
            assert texts[choice.index] + choice.text == whole[choice.index].text


async def test_the_likeliest_of_several_candidates(producer: Producer) -> None:
    options = {"logprobs": 0, "temperature": 1.3}
    many, best, only = await asyncio.gather(
        result_of(producer, n=5, **options),
        result_of(producer, n=2, best_of=5, temperature=1.3),
        result_of(producer, best_of=5, **options),
    )
    means = {
        choice.index: sum(of.logprob for of in choice.logprobs) / len(choice.logprobs)
        for choice in many.choices
    }
    ranked = sorted(means, key=lambda index: -means[index])
    assert [choice.text for choice in best.choices] == [many.choices[i].text for i in ranked[:2]]
    assert only.text == best.choices[0].text
    # Another batch rounds float32 in another way.
    figures = [report.logprob for report in many.choices[ranked[0]].logprobs]
    assert [report.logprob for report in only.logprobs] == pytest.approx(figures, abs=1e-4)
    generated = sum(len(choice.token_ids) for choice in many.choices)
    for result in (best, only):
        assert result.usage is not None
        assert result.usage.output_tokens == generated > result.end.n


@pytest.mark.parametrize("answer", ["msgpack", "json"])
async def test_beams_come_ranked_and_at_once(producer: Producer, answer: str) -> None:
    stream = await producer.generate(
        PROMPT, beam_width=4, n=3, max_tokens=8, temperature=0, answer=answer
    )
    (chunk,) = [chunk async for chunk in stream]
    assert [run.choice for run in chunk.runs()] == [0, 1, 2]
    assert len({run.token_ids for run in chunk.runs()}) == 3
    assert stream.end is not None
    assert stream.end.usage is not None
    assert stream.end.usage.output_tokens > chunk.stop


async def test_a_search_wider_than_the_worker_fails_alone(producer: Producer) -> None:
    wide, fine = await asyncio.gather(
        result_of(producer, beam_width=9, temperature=0), result_of(producer, n=2)
    )
    assert wide.reason is Reason.INVALID
    assert "beam_width is 9; allowed: at most 8" in wide.end.message
    assert len(fine.choices) == 2


async def test_the_ingress_takes_them(producer: Producer, server: EmbeddedRedis) -> None:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        entry = await client.xadd(
            KEYS.ingress(),
            {"prompt": PROMPT, "n": "2", "max_tokens": "4", "answer": "json", "ignore_eos": "true"},
        )
        result = await asyncio.wait_for(_ended(producer, entry.decode()), 30)
        log = await client.xrange(KEYS.log(entry.decode()))
    assert [len(choice.token_ids) for choice in result.choices] == [4, 4]
    shown = [json.loads(fields[b"chunk"]) for _, fields in log if b"chunk" in fields]
    parts = [part for chunk in shown for part in chunk["parts"]]
    for choice in result.choices:
        mine = [part for part in parts if part["choice"] == choice.index]
        assert "".join(part["text"] for part in mine) == choice.text
        assert mine[-1]["reason"] == "length"


async def _ended(producer: Producer, id: str) -> Result:
    while True:
        try:
            return await producer.result(id)
        except UnknownRequest:
            await asyncio.sleep(0.01)


def test_the_command_line_and_the_blocking_client(
    server: EmbeddedRedis, worker: WorkerProcess
) -> None:
    del worker
    command = [
        sys.executable,
        "-m",
        "penstock.producer.cli",
        "submit",
        PROMPT,
        "-n",
        "2",
        "--id",
        "c1",
    ]
    options = ["--max-tokens", "6", "--ignore-eos"]
    environment = {**os.environ, "REDIS_URL": server.url}
    shown = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=60,
    )
    with BlockingProducer(server.url) as producer:
        first, second = producer.result("c1").choices
        chunks = list(producer.stream("c1"))
    expected = f"--- choice 0 ---\n{first.text.rstrip(chr(10))}\n--- choice 1 ---\n{second.text}"
    assert shown.stdout.rstrip("\n") == expected.rstrip("\n")
    assert {run.choice for chunk in chunks for run in chunk.runs()} == {0, 1}


async def test_every_choice_goes_on_when_its_worker_is_killed(
    redis_url: str, workers: WorkerFactory
) -> None:
    """Three choices in mid-stream, candidates and a search that have published nothing yet."""
    settings: dict[str, Any] = {"worker__lease_ms": 500, "model__path": SYNTHETIC}
    # Slow: what it publishes last is 6 s away when it is killed, however late the test looks.
    first = workers.engine("first", model__synthetic_step_ms=100, **settings)
    async with Producer(redis_url) as producer:
        options = {"max_tokens": 80, "ignore_eos": True}
        requests = {
            "three": {"n": 3, **options},
            "best": {"n": 2, "best_of": 4, **options},
            "beams": {"beam_width": 2, "n": 2, "temperature": 0, **options},
        }
        for id, chosen in requests.items():
            await producer.submit(PROMPT, id=id, **chosen)
        readers = asyncio.gather(*(producer.stream(id).collect() for id in requests))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await _wait_for_tokens(client, "three", 60)
            first.kill()
            assert int(await client.hget(KEYS.request("best"), "tokens")) == 0
            workers.engine("second", model__synthetic_step_ms=5, **settings)
            three, best, beams = await asyncio.wait_for(readers, 60)
            log = await client.xrange(KEYS.log("three"))
        seed = Request.build(id="three", prompt=PROMPT).seed
        prompt = [ord(letter) for letter in PROMPT]
        assert [choice.token_ids for choice in three.choices] == [
            synthetic_tokens(seed, prompt, 80, choice) for choice in range(3)
        ]
        assert {choice.reason for choice in three.choices} == {Reason.LENGTH}
        for result in (three, best, beams):
            assert result.usage is not None
            assert result.usage.attempts == 2
            late = await producer.result(result.id)
            assert late.choices == result.choices
    chunks = [unpack_event(fields[b"chunk"]) for _, fields in log if b"chunk" in fields]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 240  # type: ignore[union-attr]


async def _wait_for_tokens(client: redis.asyncio.Redis, id: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if int(await client.hget(KEYS.request(id), "tokens") or 0) >= count:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"not {count} tokens")
