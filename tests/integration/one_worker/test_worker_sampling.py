"""Sampling options through Redis and a worker, there and back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producer import Producer, Reason, Result, State


async def result_of(producer: Producer, **options: Any) -> Result:
    submitted = await producer.submit("The list type", **{"temperature": 0, **options})
    return await asyncio.wait_for(producer.stream(submitted.id).collect(), 60)


async def test_options_reach_the_sampler_alone_and_together(producer: Producer) -> None:
    options: list[dict[str, Any]] = [
        {"max_tokens": 12},
        {"max_tokens": 12, "allowed_token_ids": [300, 301, 302]},
        {"max_tokens": 12, "repetition_penalty": 1.8, "min_tokens": 12},
        {"max_tokens": 12, "temperature": 1.5, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.7},
        {"max_tokens": 12, "logit_bias": {"310": 100}},
    ]
    together = await asyncio.gather(*(result_of(producer, **chosen) for chosen in options))
    alone = [await result_of(producer, **chosen) for chosen in options]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert set(together[1].token_ids) <= {300, 301, 302}
    assert len(together[2].token_ids) == 12
    assert set(together[4].token_ids) == {310}
    assert together[0].logprobs == ()


@pytest.mark.parametrize("answer", ["msgpack", "json"])
async def test_logprobs_come_with_the_tokens(producer: Producer, answer: str) -> None:
    result = await result_of(producer, max_tokens=9, logprobs=4, answer=answer)
    assert len(result.logprobs) == len(result.token_ids) == 9
    for token, report in zip(result.token_ids, result.logprobs, strict=True):
        assert len(report.top) == 4
        assert report.top[0] == (token, report.logprob)  # greedy: the most likely of all
        assert report.logprob < 0


@pytest.mark.parametrize("answer", ["msgpack", "json"])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_prompts_logprobs_come_once_with_the_first_chunk(
    producer: Producer, answer: str, n: int
) -> None:
    prompt = [1, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    options = {"max_tokens": 6, "prompt_logprobs": 3, "answer": answer, "n": n}
    submitted = await producer.submit(prompt, temperature=1, seed=3, **options)
    chunks = [chunk async for chunk in producer.stream(submitted.id)]
    first, *rest = chunks
    assert not any(chunk.prompt_logprobs for chunk in rest)
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    assert all(entry and len(entry.top) == 3 for entry in first.prompt_logprobs[1:])
    late = await producer.stream(submitted.id).collect()
    assert late.prompt_logprobs == first.prompt_logprobs
    after = await producer.stream(submitted.id, from_index=first.stop).collect()
    assert after.prompt_logprobs == ()


async def test_a_report_of_a_long_text_is_refused_by_the_worker(producer: Producer) -> None:
    submitted = await producer.submit("a b c " * 1500, prompt_logprobs=20, max_tokens=1)
    result = await asyncio.wait_for(producer.stream(submitted.id).collect(), 60)
    assert result.reason in (Reason.INVALID, Reason.PROMPT_TOO_LONG)


async def test_unknown_tokens_are_refused_by_the_name_of_their_field(producer: Producer) -> None:
    result = await result_of(producer, banned_token_ids=[5, 10**6])
    assert (result.state, result.reason) == (State.FAILED, Reason.INVALID)
    assert result.end.message.startswith("banned_token_ids[1]: got 1000000; allowed: a token id")
