"""What ``tool_choice`` and its kin make certain, over HTTP: whole, streamed and read again.

The weights are random: the grammar alone decides what is called, and biases when calls end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from gateway.rig import Event, GatewayProcess, events
from tool_model import TOOLS

THINK, CALL, END = "259", "261", "258"
WEATHER, NOW = TOOLS
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ONCE = {"logit_bias": {THINK: -100, CALL: 50, END: 100}, "min_tokens": 1}
"""No reasoning, a call at once, and the end as soon as it is allowed."""
AGAIN = {"logit_bias": {THINK: -100, CALL: 100, END: -100}, "tools": [NOW]}
"""Calls as long as they are allowed; three of them fit, since this tool takes no arguments."""
TEXT = r"""
start: "said " <tool_call> "\n{\"name\": \"now\", \"arguments\": {}}\n" </tool_call>
"""
CASES: dict[str, tuple[dict[str, Any], str, tuple[int, int], set[str]]] = {
    "none": (
        {"tool_choice": "none", "structured_outputs": {"grammar": TEXT}}, "stop", (0, 0), set(),
    ),
    "required": ({**ONCE, "tool_choice": "required"}, "tool_calls", (1, 1), {"weather", "now"}),
    "named": ({**ONCE, "tool_choice": NAMED}, "tool_calls", (1, 1), {"weather"}),
    "strict": ({**ONCE, "tools": [STRICT]}, "tool_calls", (1, 1), {"weather"}),
    "several": ({**AGAIN, "tool_choice": "required"}, "length", (2, 9), {"now"}),
    "one alone": (
        {**AGAIN, "tool_choice": "required", "parallel_tool_calls": False},
        "tool_calls", (1, 1), {"now"},
    ),
}  # fmt: skip
"""What is asked for, and what comes: the reason, how many calls at least and most, of which."""


def assembled(found: Iterable[Event]) -> dict[str, Any]:
    """The one choice that the events of a stream add up to."""
    *chunks, done = [event.data for event in found]
    assert done == "[DONE]"
    content, calls, reasons = "", dict[int, dict[str, Any]](), []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reasons.append(choice["finish_reason"])
        content += choice["delta"].get("content", "")
        for part in choice["delta"].get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                assert part["index"] == len(calls)
                calls[part["index"]] = {"id": part["id"], "name": function["name"], "arguments": ""}
            calls[part["index"]]["arguments"] += function["arguments"]
    assert [reason for reason in reasons[:-1] if reason is not None] == []
    return {"content": content, "calls": list(calls.values()), "reason": reasons[-1]}


def of_whole(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was waited for."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    content = message["content"] or ""
    return {"content": content, "calls": calls, "reason": choice["finish_reason"]}


def fits(name: str, arguments: str) -> bool:
    """Whether a call's arguments are JSON of the tool's schema."""
    value = json.loads(arguments)
    if name == "now":
        return bool(value == {})
    city, days = value["city"], value["days"]
    rest = set(value) - {"city", "days"}
    return not rest and len(city) <= 12 and type(days) is int and 1 <= days <= 14


@pytest.mark.parametrize("case", CASES)
def test_calls_are_as_asked_for_however_they_are_read(gateway: GatewayProcess, case: str) -> None:
    fields, reason, (least, most), names = CASES[case]
    body = {
        "model": "caller",
        "messages": [{"role": "user", "content": "What is the weather in Bonn?"}],
        "tools": TOOLS,
        "max_tokens": 150 if reason == "length" else 400,
        **fields,
    }
    url = f"{gateway.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    whole = of_whole(reply.json())
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        live = list(events(response))
    streamed = assembled(live)
    for answer, name in ((whole, reply.json()["id"]), (streamed, live[0].data["id"])):
        with httpx.stream("GET", f"{gateway.url}/v1/streams/{name}", timeout=60) as response:
            assert assembled(events(response)) == answer
        calls = answer["calls"]
        assert least <= len(calls) <= most
        assert {call["name"] for call in calls} <= names
        assert len({call["id"] for call in calls}) == len(calls)
        complete = calls if reason == "tool_calls" else calls[:least]  # the last may be cut
        assert all(fits(call["name"], call["arguments"]) for call in complete)
        assert answer["reason"] == reason
        if case == "none":
            assert '{"name": "now", "arguments": {}}' in answer["content"]
        elif reason == "tool_calls":
            assert answer["content"].strip() == ""
