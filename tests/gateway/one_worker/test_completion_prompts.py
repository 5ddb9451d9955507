"""Completions of several prompts, and echoes of prompts with what the model thinks of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from gateway.rig import GatewayProcess, events

PROMPTS = ["The list type", "A dictionary maps", "Sets are"]
FIELDS: dict[str, Any] = {"model": "demo", "max_tokens": 4, "temperature": 0, "seed": 1}


def post(gateway: GatewayProcess, **fields: Any) -> Any:
    found = httpx.post(f"{gateway.url}/v1/completions", json={**FIELDS, **fields}, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def tokens_of(gateway: GatewayProcess, text: str) -> list[int]:
    found = httpx.post(
        f"{gateway.url}/tokenize", json={"model": "demo", "prompt": text}, timeout=60
    )
    tokens: list[int] = found.json()["tokens"]
    return tokens


def test_several_prompts_are_answered_as_each_alone(
    gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    alone = [post(gateway, prompt=prompt) for prompt in PROMPTS]
    expected = [one["choices"][0]["text"] for one in alone]
    whole = client.completions.create(**FIELDS, prompt=PROMPTS)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(whole.usage, name) == sum(one["usage"][name] for one in alone)
    asked = {"prompt": PROMPTS[:2], "n": 2, "temperature": 1}
    twice = post(gateway, **asked)["choices"]
    assert [choice["index"] for choice in twice] == [0, 1, 2, 3]
    ids = [
        httpx.post(f"{gateway.url}/tokenize", json={"model": "demo", "prompt": p}, timeout=60)
        for p in PROMPTS
    ]
    as_ids = post(gateway, prompt=[found.json()["tokens"] for found in ids], echo=True)
    assert [c["text"] for c in as_ids["choices"]] == [
        prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)
    ]


def test_a_key_makes_several_prompts_one_call(gateway: GatewayProcess) -> None:
    headers = {"idempotency-key": "several"}
    url, body = f"{gateway.url}/v1/completions", {**FIELDS, "prompt": PROMPTS}
    first, again = (httpx.post(url, json=body, headers=headers, timeout=60) for _ in range(2))
    assert first.json() == again.json()
    other = httpx.post(url, json={**body, "prompt": PROMPTS[:2]}, headers=headers, timeout=60)
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_one_wrong_prompt_refuses_all(client: openai.OpenAI) -> None:
    for prompt, param in (
        (["fine", [2**31 - 1]], "prompt"),
        (["fine", ""], "prompt"),
        (["x"] * 257, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**FIELDS, prompt=prompt)  # type: ignore[call-overload]
        assert str(refused.value.param).startswith(param)
    with pytest.raises(openai.BadRequestError) as streamed:
        client.completions.create(**FIELDS, prompt=PROMPTS, stream=True)
    assert streamed.value.param == "stream"


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_shows_log_probabilities_of_the_prompt(
    gateway: GatewayProcess, as_ids: bool
) -> None:
    text = PROMPTS[0]
    ids = tokens_of(gateway, text)
    prompt = ids if as_ids else text
    plain = post(gateway, prompt=prompt, logprobs=2)["choices"][0]
    fields = {"prompt": prompt, "logprobs": 2, "echo": True}
    (choice,) = post(gateway, **fields)["choices"]
    assert choice["text"] == text + plain["text"]
    shown = choice["logprobs"]
    assert {len(values) for values in shown.values()} == {len(ids) + 4}
    assert "".join(shown["tokens"]) == choice["text"]
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert all(value <= 0 for value in shown["token_logprobs"][1:])
    assert all(len(top) == 2 for top in shown["top_logprobs"][1:])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert shown[name][len(ids) :] == plain["logprobs"][name]
    for (at, after), token in zip(pairwise(shown["text_offset"]), shown["tokens"], strict=False):
        assert after - at == len(token)

    url = f"{gateway.url}/v1/completions"
    with httpx.stream(
        "POST", url, json={**FIELDS, **fields, "stream": True}, timeout=60
    ) as response:
        live = list(events(response))
    streamed = [event.data["choices"][0] for event in live[:-1]]
    for name, values in shown.items():
        assert [v for one in streamed if one["logprobs"] for v in one["logprobs"][name]] == values
    assert "".join(event.text for event in live) == choice["text"]
    again = f"{gateway.url}/v1/streams/{live[0].data['id']}"
    with httpx.stream("GET", again, params={"from": live[0].id}, timeout=60) as response:
        assert list(events(response)) == live[1:]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_every_event_has_the_counts_so_far(gateway: GatewayProcess, endpoint: str) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPTS[0]}
    if endpoint.startswith("chat"):
        prompt = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**FIELDS, **prompt, "stream": True, "stream_options": options}
    with httpx.stream("POST", f"{gateway.url}/v1/{endpoint}", json=body, timeout=60) as response:
        live = list(events(response))
    last = live[-2].data["usage"]
    assert last["completion_tokens"] == 4
    for event in live[:-2]:
        usage = event.data["usage"]
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert usage["completion_tokens"] == event.id
        assert usage["total_tokens"] == usage["prompt_tokens"] + event.id
    again = f"{gateway.url}/v1/streams/{live[0].data['id']}"
    with httpx.stream("GET", again, params={"from": live[0].id}, timeout=60) as response:
        assert list(events(response)) == live[1:]
