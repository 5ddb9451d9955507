"""Options over HTTP: each does what it says, at both endpoints of a running gateway."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import GatewayProcess, events

from penstock.shared.local.embedded import EmbeddedRedis

PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is a list?"}]},
    "/v1/completions": {"prompt": "The list type"},
}
BASE = {"model": "demo", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
HOT = {"temperature": 2, "seed": 3, "max_tokens": 16}
LONG = {"ignore_eos": True, "max_tokens": 64}

both = pytest.mark.parametrize("path", PROMPTS)


def ask(gateway: GatewayProcess, path: str, **fields: Any) -> dict[str, Any]:
    body = {**BASE, **PROMPTS.get(path, {}), **fields}
    found = httpx.post(gateway.url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def ids_of(gateway: GatewayProcess, path: str, **fields: Any) -> list[int]:
    (choice,) = ask(gateway, path, **fields)["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


Ids = list[int]

EFFECTS: dict[str, tuple[Callable[[Ids], dict[str, Any]], Callable[[Ids, Ids], bool]]] = {
    # What is asked for, given the greedy tokens; and what then holds of the tokens.
    "min_p": (lambda _: {**HOT, "min_p": 1}, lambda got, greedy: got == greedy),
    "top_k": (lambda _: {**HOT, "top_k": 1}, lambda got, greedy: got == greedy),
    "temperature": (lambda _: HOT, lambda got, greedy: got != greedy),
    "stop_token_ids": (
        lambda greedy: {"stop_token_ids": [greedy[3]]},
        lambda got, greedy: got in (greedy[: (at := greedy.index(greedy[3]))], greedy[: at + 1]),
    ),
    "min_tokens": (
        lambda greedy: {"stop_token_ids": [greedy[0]], "min_tokens": 4},
        lambda got, greedy: len(got) >= 4,
    ),
    "logit_bias against": (
        lambda greedy: {"logit_bias": {str(greedy[0]): -100}},
        lambda got, greedy: got[0] != greedy[0],
    ),
    "logit_bias for": (
        lambda greedy: {"logit_bias": {str(greedy[1]): 100}, "ignore_eos": True},
        lambda got, greedy: set(got) == {greedy[1]},
    ),
    "allowed_token_ids": (
        lambda greedy: {"allowed_token_ids": sorted({greedy[1], greedy[2]})},
        lambda got, greedy: set(got) <= {greedy[1], greedy[2]},
    ),
    # With two tokens to choose from, one of them cannot be repeated for ever.
    "frequency_penalty": (
        lambda greedy: {**LONG, "allowed_token_ids": two(greedy), "frequency_penalty": 2},
        lambda got, greedy: set(got) == set(two(greedy)),
    ),
}


def two(greedy: Ids) -> Ids:
    return list(dict.fromkeys(greedy))[:2]


@both
@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_has_its_effect(gateway: GatewayProcess, path: str, name: str) -> None:
    fields, holds = EFFECTS[name]
    greedy = ids_of(gateway, path, max_tokens=16)
    assert len(set(greedy)) > 2
    assert holds(ids_of(gateway, path, **{"max_tokens": 16, **fields(greedy)}), greedy)


@both
def test_penalties_make_repetition_rarer(gateway: GatewayProcess, path: str) -> None:
    for name, less, more in (("presence_penalty", 2, -2), ("repetition_penalty", 1.8, 0.5)):
        varied, repeated = (
            len(set(ids_of(gateway, path, **LONG, **{name: value}))) for value in (less, more)
        )
        assert varied > repeated, name


@both
def test_token_ids_are_the_answers_own(gateway: GatewayProcess, path: str) -> None:
    answer = ask(gateway, path)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    body = {**BASE, **PROMPTS[path], "stream": True}
    with httpx.stream("POST", gateway.url + path, json=body, timeout=60) as response:
        parts = [e.data["choices"][0].get("token_ids", []) for e in events(response)
                 if e.data != "[DONE]"]  # fmt: skip
    assert list(itertools.chain(*parts)) == choice["token_ids"]
    assert "token_ids" not in ask(gateway, path, return_token_ids=False)["choices"][0]


def test_best_of_pays_for_all_candidates(gateway: GatewayProcess) -> None:
    fields = {"best_of": 3, "temperature": 1, "seed": 1, "ignore_eos": True, "max_tokens": 4}
    answer = ask(gateway, "/v1/completions", **fields)
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 12


SCHEMA = {"type": "boolean"}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_regex": ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    "guided_json": ({"guided_json": SCHEMA}, "true|false"),
    "guided_grammar": ({"guided_grammar": 'start: "ab" | "cd"'}, "ab|cd"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
    "json": ({"structured_outputs": {"json": SCHEMA}}, "true|false"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}, "ab|cd"),
    "json_object": ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    "response_format object": ({"response_format": {"type": "json_object"}}, r"\{.*"),
    "response_format schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "yes", "schema": SCHEMA, "strict": True},
            }
        },
        "true|false",
    ),
    "response_format text": ({"response_format": {"type": "text"}}, ".+"),
}


@both
@pytest.mark.parametrize("name", FORMS)
def test_an_output_has_the_form_that_was_asked_for(
    gateway: GatewayProcess, path: str, name: str
) -> None:
    fields, pattern = FORMS[name]
    text = text_of(ask(gateway, path, **fields))
    assert re.fullmatch(rf"\s*({pattern})\s*", text, re.DOTALL), text


TIERS: list[tuple[dict[str, Any], str, bytes]] = [
    ({}, "default", b"normal"),
    ({"service_tier": "auto"}, "default", b"normal"),
    ({"service_tier": "default"}, "default", b"normal"),
    ({"service_tier": "scale"}, "default", b"normal"),
    ({"service_tier": "priority"}, "priority", b"critical"),
    ({"service_tier": "fast"}, "priority", b"critical"),
    ({"service_tier": "flex"}, "flex", b"batch"),
    ({"priority": -1}, "priority", b"critical"),
    ({"priority": 0}, "default", b"normal"),
    ({"priority": 1}, "flex", b"batch"),
    ({"priority": 1, "service_tier": "fast"}, "priority", b"critical"),
]


@pytest.mark.parametrize(("fields", "tier", "lane"), TIERS, ids=str)
def test_the_tier_that_was_used_is_answered(
    gateway: GatewayProcess,
    server: EmbeddedRedis,
    fields: dict[str, Any],
    tier: str,
    lane: bytes,
) -> None:
    answers = [ask(gateway, path, **fields) for path in PROMPTS]
    body = {**BASE, **PROMPTS["/v1/chat/completions"], **fields, "stream": True}
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        answers += [event.data for event in events(response) if event.data != "[DONE]"]
    if "priority" not in fields:
        asked = {"model": "demo", "input": "The list", "max_output_tokens": 4, **fields}
        answers.append(httpx.post(f"{gateway.url}/v1/responses", json=asked, timeout=60).json())
    assert {answer["service_tier"] for answer in answers} == {tier}
    with redis.Redis.from_url(server.url) as client:
        lanes = {client.hget(f"ps:{{demo.0}}:request:{a['id']}", "lane") for a in answers}
    assert lanes == {lane}


@pytest.mark.parametrize("path", [*PROMPTS, "/v1/responses"])
def test_a_salt_of_the_cache_is_refused_by_name(gateway: GatewayProcess, path: str) -> None:
    prompt = PROMPTS.get(path, {"input": "The list type"})
    body = {"model": "demo", **prompt, "cache_salt": "x"}
    refused = httpx.post(gateway.url + path, json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"
