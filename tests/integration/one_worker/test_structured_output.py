"""Structured output through Redis and real workers: valid, refused by name, continued."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import redis.asyncio
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer, Reason, Result, State
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis

KEYS = Keys("demo", 0)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "pages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "minItems": 12,
            "maxItems": 14,
        },
        "kind": {"enum": ["book", "paper"]},
    },
    "required": ["title", "pages", "kind"],
    "additionalProperties": False,
}


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["title", "pages", "kind"]
        and isinstance(value["title"], str)
        and len(value["title"]) <= 40
        and 12 <= len(value["pages"]) <= 14
        and all(type(page) is int and 0 <= page <= 9999 for page in value["pages"])
        and value["kind"] in ("book", "paper")
    )


async def result_of(producer: Producer, prompt: str = "The list type", **options: Any) -> Result:
    submitted = await producer.submit(prompt, **options)
    return await asyncio.wait_for(producer.stream(submitted.id).collect(), 60)


async def test_every_form_beside_plain_requests(producer: Producer) -> None:
    options: list[dict[str, Any]] = [
        {"json_schema": SCHEMA, "seed": 1},
        {"json_schema": json.dumps(SCHEMA), "seed": 1},
        {"regex": "[A-Z][a-z]{2,5}: [0-9]{1,3}%", "max_tokens": 400},
        {"choice": ["yes", "no"], "answer": "json", "logprobs": 1},
        {"grammar": 'start: a a? "!"\na: "x" | "y" /[0-9]/', "temperature": 0.3},
        {"max_tokens": 20, "seed": 4},
    ]
    first, again, regex, choice, grammar, plain = await asyncio.gather(
        *(result_of(producer, **chosen) for chosen in options)
    )
    assert {r.reason for r in (first, again, regex, choice, grammar)} == {Reason.STOP}
    assert is_valid(first.text)
    assert again.token_ids == first.token_ids
    assert re.fullmatch("[A-Z][a-z]{2,5}: [0-9]{1,3}%", regex.text)
    assert choice.text in ("yes", "no")
    assert len(choice.logprobs) == len(choice.token_ids)
    assert re.fullmatch("(x|y[0-9]){1,2}!", grammar.text)
    assert (await result_of(producer, **options[-1])).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "nope"}}, 'json_schema: got \'{"type":"nope"}\'; allowed: '),
        ({"json_schema": {"not": {}}}, "json_schema: got "),
        ({"regex": "(a"}, "regex: got '(a'; allowed: a regular expression"),
        ({"grammar": "start: b"}, "grammar: got 'start: b'; allowed: a context-free grammar"),
        ({"choice": ["no"], "stop_token_ids": [10**6]}, "stop_token_ids[0]: got 1000000"),
        ({"choice": ["no"], "min_tokens": 30}, "choice, min_tokens: together they allow no token"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    producer: Producer, options: dict[str, Any], message: str
) -> None:
    result = await result_of(producer, **options)
    assert (result.state, result.reason) == (State.FAILED, Reason.INVALID)
    assert result.end.message.startswith(message)


async def test_a_constraint_that_crashes_its_compiler_costs_nobody_else(
    server: EmbeddedRedis, worker: WorkerProcess, producer: Producer
) -> None:
    """Both overflow a stack in native code. Others stream on, by the same engine process."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(3000))
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d1200": {"type": "string"}}}
    crashing: list[dict[str, Any]] = [
        {"grammar": f'start: r0\n{rules}r3000: "a"'},
        {"json_schema": json.dumps(schema, separators=(",", ":"))},
    ] * 3
    others: list[dict[str, Any]] = [
        {"max_tokens": 200, "ignore_eos": True, "seed": 3},
        {"json_schema": SCHEMA, "seed": 1, "max_tokens": 400},
    ]
    undisturbed = [await result_of(producer, **options) for options in others]
    results = await asyncio.gather(
        *(result_of(producer, **options) for options in [*others, *crashing])
    )
    assert [r.token_ids for r in results[:2]] == [r.token_ids for r in undisturbed]
    for result in results[2:]:
        assert (result.state, result.reason) == (State.FAILED, Reason.INVALID)
        assert result.end.message.endswith("nest it less deeply or make it smaller")
    assert worker.process.poll() is None
    assert worker.metric("redeliveries_total") == 0


async def test_the_ingress_takes_forms(server: EmbeddedRedis, worker: WorkerProcess) -> None:
    async with redis.asyncio.Redis.from_url(server.url) as client, Producer(server.url) as producer:
        fields = ["id", "plain", "prompt", "x", "answer", "json", "choice", "yes", "choice", "no"]
        await client.execute_command("XADD", KEYS.ingress(), "*", *fields)
        bad = ["id", "bad", "prompt", "x", "json_schema", "{"]
        await client.execute_command("XADD", KEYS.ingress(), "*", *bad)
        async with asyncio.timeout(30):
            while await client.exists(KEYS.log("plain"), KEYS.log("bad")) < 2:
                await asyncio.sleep(0.01)
            results = [await producer.stream(id).collect() for id in ("plain", "bad")]
    assert results[0].text in ("yes", "no")
    assert results[1].reason is Reason.INVALID
    assert results[1].end.message.startswith("json_schema: got '{'; allowed: a JSON Schema")


async def test_a_killed_workers_outputs_are_continued_in_mid_value(
    redis_url: str, workers: WorkerFactory
) -> None:
    """The tokens are those of an undisturbed run, wherever in the value the first worker died.

    Each choice has a constraint state of its own, which its own published tokens give back.
    """
    forms: list[dict[str, Any]] = [
        {"json_schema": SCHEMA, "seed": seed, "max_tokens": 400} for seed in range(3)
    ]
    forms += [
        {"regex": "([a-f]{20}-){4}!", "seed": 7, "max_tokens": 400},
        {"json_schema": SCHEMA, "seed": 1, "n": 3, "max_tokens": 400},
    ]
    settings = {"worker__lease_ms": 600}
    first = workers.engine("first", **settings)
    async with Producer(redis_url) as producer:
        expected = await asyncio.gather(*(result_of(producer, **form) for form in forms))
        submitted = [await producer.submit("The list type", **form) for form in forms]
        readers = asyncio.gather(*(producer.stream(s.id).collect() for s in submitted))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            async with asyncio.timeout(30):
                while True:
                    counts = [
                        int(await client.hget(KEYS.request(s.id), "tokens") or 0) for s in submitted
                    ]
                    if min(counts) >= 10 and counts[-1] >= 30:
                        break
        first.kill()
        second = workers.engine("second", **settings)
        results = await asyncio.wait_for(readers, 60)
    for result, whole, count in zip(results, expected, counts, strict=True):
        assert [(c.token_ids, c.text) for c in result.choices] == [
            (c.token_ids, c.text) for c in whole.choices
        ]
        assert count < result.end.n
    for result in (*results[:3], results[4]):
        assert all(is_valid(choice.text) for choice in result.choices)
        assert {choice.reason for choice in result.choices} == {Reason.STOP}
    assert len({choice.token_ids for choice in results[4].choices}) == 3
    assert second.metric("redeliveries_total") >= 4
