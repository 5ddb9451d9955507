"""Reasoning and tool calls through OpenAI's own client; a grammar makes the tiny model call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway.rig import GatewayProcess, events
from tool_model import TOOLS, save_tool_model
from workers import WorkerFactory

GRAMMAR = r"""
start: <think> /[a-z ]{20,40}/ </think> "\n\n" /[a-z]{5,9}/ "\n" call "\n" call
call: <tool_call> "\n{\"name\": \"weather\", \"arguments\": " arguments "}\n" </tool_call>
arguments: "{\"city\": \"" /[a-z]{3,12}/ "\", \"days\": " /[1-9]/ "}"
"""
ASK: dict[str, Any] = {
    "model": "caller",
    "messages": [{"role": "user", "content": "What is the weather in Bonn?"}],
    "tools": TOOLS,
    "max_tokens": 400,
    "seed": 1,
    "extra_body": {"structured_outputs": {"grammar": GRAMMAR}},
}


@pytest.fixture(scope="module", autouse=True)
def tool_worker(fleet: WorkerFactory, folder: Path) -> None:
    path = save_tool_model(folder / "tool-model")
    fleet.engine("caller", model__path=str(path), queue__model="caller")


def test_calls_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    (whole,) = client.chat.completions.create(**ASK).choices
    assert whole.finish_reason == "tool_calls"
    calls = whole.message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "weather"]  # type: ignore[union-attr]
    assert all(set(json.loads(call.function.arguments)) == {"city", "days"} for call in calls)  # type: ignore[union-attr]
    reasoning, content = "", ""
    found: dict[int, list[str]] = {}
    reasons = []
    for chunk in client.chat.completions.create(**ASK, stream=True):
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.id is not None:
                found[part.index] = [part.function.name or "", ""]
            found[part.index][1] += part.function.arguments or ""
    assert [reason for reason in reasons if reason is not None] == ["tool_calls"]
    assert content == (whole.message.content or "")
    assert reasoning == (whole.message.model_extra or {})["reasoning_content"]
    assert found == {
        i: [call.function.name, call.function.arguments]  # type: ignore[union-attr]
        for i, call in enumerate(calls)
    }


def test_a_conversation_goes_on_with_the_calls_results(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASK).choices
    calls = choice.message.tool_calls or []
    messages = [
        *ASK["messages"],
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls),
    ]
    again = client.chat.completions.create(**{**ASK, "messages": messages})
    assert again.choices[0].finish_reason == "tool_calls"
    ids = {call.id for call in again.choices[0].message.tool_calls or []}
    assert ids.isdisjoint(call.id for call in calls)


def test_a_resumed_stream_still_ends_with_tool_calls(gateway: GatewayProcess) -> None:
    with gateway.client() as client:
        name = client.chat.completions.create(**ASK).id
    url = f"{gateway.url}/v1/streams/{name}"
    with httpx.stream("GET", url) as response:
        first = list(events(response))
    last = first[-2].id
    with httpx.stream("GET", url, params={"from": last}) as response:
        rest = list(events(response))
    assert rest[0].data["choices"][0]["finish_reason"] == "tool_calls"
    assert rest[-1].data == "[DONE]"


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    for change, param in (
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**ASK, **change})
        assert str(refused.value.param).startswith(param)
