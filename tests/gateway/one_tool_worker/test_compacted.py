"""Streams read live, again, and once more when their log was made compact, are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import redis
from gateway.rig import Event, GatewayProcess, events
from tool_model import TOOLS
from waiting import wait_until

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis

KEYS = Keys("caller", 0)
GRAMMAR = r"""
start: <think> /[a-z ]{20,40}/ </think> "\n\n" /[a-z]{5,9}/ "\n" call "\n" call
call: <tool_call> "\n{\"name\": \"weather\", \"arguments\": " arguments "}\n" </tool_call>
arguments: "{\"city\": \"" /[a-z]{3,12}/ "\", \"days\": " /[1-9]/ "}"
"""
MESSAGES = [{"role": "user", "content": "What is the weather in Bonn?"}]
CALLS: dict[str, Any] = {"tools": TOOLS, "structured_outputs": {"grammar": GRAMMAR}}
SHOWN: dict[str, Any] = {
    "n": 2,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "ignore_eos": True,
}
CHAT: dict[str, dict[str, Any]] = {
    "calls": {"messages": MESSAGES, **CALLS, "max_tokens": 400},
    "choices": {"messages": MESSAGES, **SHOWN, "logprobs": True, "max_tokens": 40},
    "text": {"prompt": "Bonn", **SHOWN, "logprobs": 2, "max_tokens": 40},
}


def make_compact(server: EmbeddedRedis, name: str) -> None:
    """Have a request's log made compact, as if it had ended long ago.

    On a busy machine all tokens may have left in one chunk. Then the end keeps its own entry.
    """
    with redis.Redis.from_url(server.url) as client:
        log = KEYS.log(name)
        num_chunks = sum(b"chunk" in fields for _, fields in client.xrange(log))
        assert client.zadd(KEYS.ended, {name: 1}, xx=True, ch=True) == 1
        wait_until(lambda: client.zscore(KEYS.ended, name) is None, "a compact log")
        assert client.xlen(log) == (1 if num_chunks > 1 else 2)


def stream(method: str, url: str, **options: Any) -> list[Event]:
    with httpx.stream(method, url, timeout=60, **options) as response:
        if response.status_code != 200:
            pytest.fail(f"{response.status_code} {response.read().decode()}")
        return list(events(response))


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_response_has_the_same_events_from_every_number(
    gateway: GatewayProcess, server: EmbeddedRedis, effort: str
) -> None:
    """With some effort the template begins to reason, so that there are tokens to be counted."""
    url = f"{gateway.url}/v1/responses"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "function", "name": "weather"}
    body = {
        "model": "caller", "input": "Bonn?", "tools": tools, "tool_choice": choice,
        "max_output_tokens": 200, "stream": True, "reasoning": {"effort": effort},
    }  # fmt: skip
    live = stream("POST", url, json=body)
    assert [event.data["sequence_number"] for event in live] == list(range(len(live)))
    name = live[0].data["response"]["id"]

    def agree() -> None:
        assert stream("GET", f"{url}/{name}", params={"stream": "true"}) == live
        for after in (0, 3, len(live) // 2, len(live) - 2):
            params = {"stream": "true", "starting_after": str(after)}
            assert stream("GET", f"{url}/{name}", params=params) == live[after + 1 :]
        assert httpx.get(f"{url}/{name}", timeout=60).json() == live[-1].data["response"]

    agree()
    make_compact(server, name)
    agree()


@pytest.mark.parametrize("kind", CHAT)
def test_a_streams_events_add_up_to_the_same_from_every_token(
    gateway: GatewayProcess, server: EmbeddedRedis, kind: str
) -> None:
    path = "completions" if kind == "text" else "chat/completions"
    body = {"model": "caller", "stream": True, "seed": 7, **CHAT[kind]}
    # A live reader that fell behind would find several tokens in one event, too.
    live = stream("POST", f"{gateway.url}/v1/{path}", json=body)
    url = f"{gateway.url}/v1/streams/{live[0].data['id']}"
    places = sorted({event.id for event in live if event.id is not None})
    last = places[-1]
    chosen = (0, places[0], places[len(places) // 2], places[-2], last)
    before = {place: stream("GET", url, params={"from": place}) for place in chosen}
    assert added_up(before[0]) == added_up(live)
    make_compact(server, live[0].data["id"])
    for place in chosen:
        after = stream("GET", url, params={"from": place})
        assert added_up(after) == added_up(before[place])
        assert max(event.id for event in after if event.id is not None) == last


def added_up(found: Sequence[Event]) -> dict[Any, Any]:
    """What the events of a stream say, however their tokens are cut into events.

    By choice: texts joined, lists put behind each other, and what is said once.
    """
    assert found[-1].data == "[DONE]"
    total: dict[Any, Any] = {}
    for event in found[:-1]:
        choices = {choice["index"]: choice for choice in event.data["choices"]}
        total = _sum(total, {**event.data, "choices": choices})
    return total


def _sum(total: Any, more: Any) -> Any:
    if isinstance(more, dict):
        total = total or {}
        return {key: _sum(total.get(key), more.get(key)) for key in {**total, **more}}
    if isinstance(more, list) and more and isinstance(more[0], dict) and "index" in more[0]:
        return _sum(total, {item["index"]: item for item in more})
    if isinstance(more, list):
        return (total or []) + more
    if isinstance(more, str) and total is not None and more != total:
        return total + more
    return total if more is None else more
