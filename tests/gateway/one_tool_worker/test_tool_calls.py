"""Reasoning and tool calls through OpenAI's own client; a grammar makes the tiny model call."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from gateway.rig import GatewayProcess, events
from tool_model import TOOLS, tool_tokenizer

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
    with httpx.stream("GET", url, timeout=60) as response:
        first = list(events(response))
    last = first[-2].id
    with httpx.stream("GET", url, params={"from": last}, timeout=60) as response:
        rest = list(events(response))
    assert rest[0].data["choices"][0]["finish_reason"] == "tool_calls"
    assert rest[-1].data == "[DONE]"


@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_is_counted_alike_in_every_answer(gateway: GatewayProcess, n: int) -> None:
    """Its tokens begin with the mark and end before the one behind it."""
    body = {key: value for key, value in ASK.items() if key not in ("extra_body", "tools")}
    grammar = GRAMMAR.replace("{20,40}/", "{20,40}[a-z]/")  # no space at the end, which is cut
    body |= {"structured_outputs": {"grammar": grammar}, "n": n}
    body["stream_options"] = {"include_usage": True}
    url = f"{gateway.url}/v1/chat/completions"
    plain = {**body, "return_token_ids": True}
    del plain["stream_options"]
    whole = httpx.post(url, json=plain, timeout=60).json()
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    end = tool_tokenizer().convert_tokens_to_ids("</think>")
    assert counted == sum(choice["token_ids"].index(end) for choice in whole["choices"]) > n

    headers = {"idempotency-key": f"reasoning {n}"}
    body["stream"] = True
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        found = list(events(response))
    assert found[-1].data == "[DONE]"
    usage = found[-2].data["usage"]
    assert usage["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    ids = sorted({event.id for event in found if event.id})
    for last in ids[:: max(1, len(ids) // 8)]:  # fast tokens come in few events
        headers["last-event-id"] = str(last)
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            rest = list(events(response))
        assert rest[-2].data["usage"] == usage


def test_reasoning_is_counted_as_in_responses(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="caller", messages=ASK["messages"], max_tokens=200, temperature=0, tools=TOOLS
    )
    asked = {"model": "caller", "input": ASK["messages"][0]["content"], "tools": FLAT_TOOLS}
    same = client.responses.create(**asked, max_output_tokens=200, temperature=0)
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert same.usage is not None
    assert chat.usage.completion_tokens == same.usage.output_tokens
    counted = same.usage.output_tokens_details.reasoning_tokens
    assert chat.usage.completion_tokens_details.reasoning_tokens == counted


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    for change, param in (
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**ASK, **change})
        assert str(refused.value.param).startswith(param)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
    ids=str,
)
def test_the_template_hears_what_it_knows(
    gateway: GatewayProcess, fields: dict[str, Any], more: bool
) -> None:
    def prompt_tokens(**fields: Any) -> int:
        body = {"model": "caller", "messages": ASK["messages"], "max_tokens": 1, **fields}
        found = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
        assert found.status_code == 200, found.text
        return int(found.json()["usage"]["prompt_tokens"])

    assert prompt_tokens(**fields) == prompt_tokens() + (2 if more else 0)


FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
RESPOND: dict[str, Any] = {
    "model": "caller",
    "input": "What is the weather in Bonn?",
    "tools": FLAT_TOOLS,
    "tool_choice": {"type": "function", "name": "weather"},
    "max_output_tokens": 300,
    "temperature": 0,  # sampled, the random model sometimes thinks until its tokens are spent
}


def test_a_response_calls_and_goes_on_with_the_result(client: openai.OpenAI) -> None:
    live = list(client.responses.create(**RESPOND, stream=True))
    whole = live[-1].response
    (call,) = [item for item in whole.output if item.type == "function_call"]
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    reasoning = [item for item in whole.output if item.type == "reasoning"]
    counted = whole.usage.output_tokens_details.reasoning_tokens
    assert bool(reasoning) == bool(counted)
    assert counted < whole.usage.output_tokens
    kinds = [event.type for event in live if event.type.startswith("response.function_call")]
    assert set(kinds[:-1]) == {"response.function_call_arguments.delta"}
    (done,) = [e for e in live if e.type == "response.function_call_arguments.done"]
    deltas = [e.delta for e in live if e.type == "response.function_call_arguments.delta"]
    assert (done.name, done.arguments, "".join(deltas)) == (
        call.name,
        call.arguments,
        done.arguments,
    )
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    assert [event.sequence_number for event in live] == list(range(len(live)))
    for after in (0, 2, len(live) // 2, len(live) - 3):
        replayed = list(client.responses.retrieve(whole.id, stream=True, starting_after=after))
        assert [e.to_dict() for e in replayed] == [e.to_dict() for e in live[after + 1 :]]

    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(**{**RESPOND, "input": [output]}, previous_response_id=whole.id)
    items = client.responses.input_items.list(again.id, order="asc").data
    # A call may follow reasoning: nothing fixes what the model samples before it.
    output_types = [item.type for item in whole.output]
    assert [item.type for item in items] == ["message", *output_types, "function_call_output"]
    given: list[Any] = [
        {"role": "user", "content": RESPOND["input"]},
        *(item.to_dict() for item in whole.output),
        output,
    ]
    same = client.responses.create(**{**RESPOND, "input": given})
    assert same.usage is not None
    assert again.usage is not None
    assert same.usage.input_tokens == again.usage.input_tokens


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "more": 1}]}, "tools[0].more"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "unknown"}}, "tool_choice"),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "content": "text"}]}, "input[0].content"),
    ],
)
def test_refusals_of_responses_name_the_place(
    client: openai.OpenAI, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={**RESPOND, **changes}, cast_to=object)
    assert refused.value.param == param
