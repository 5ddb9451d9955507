"""OpenAI's own Python client, unchanged and strict, against a running gateway and worker."""

from __future__ import annotations

import openai
import pytest
from gateway.rig import GatewayProcess

MESSAGES = [{"role": "user", "content": "Say something about queues."}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_chat_streamed_and_not_is_the_same(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(**options)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *deltas, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == choice.message.content
    assert deltas[-1].choices[0].finish_reason == choice.finish_reason


def test_completions_streamed_and_not_are_the_same(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    options = {"model": "demo", "prompt": "The list type", "max_tokens": 12, "seed": 5}
    whole = client.completions.create(**options)
    # The schema knows no events of completions: it wants a reason in each, and OpenAI's own
    # server sends null until the last one.
    with gateway.client(_strict_response_validation=False) as lenient:
        chunks = list(lenient.completions.create(**options, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    echoed = client.completions.create(**options, echo=True)
    assert echoed.choices[0].text == "The list type" + whole.choices[0].text


def test_several_choices(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as range_error:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=99)
    assert range_error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as no_parameter:
        client.chat.completions.create(
            model="demo", messages=MESSAGES, extra_body={"temprature": 1}
        )
    assert no_parameter.value.code == "unknown_parameter"
    assert "did you mean temperature" in no_parameter.value.message


def test_logprobs(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=8, seed=5, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == answer.usage.completion_tokens  # type: ignore[union-attr]
    shown = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert shown.startswith((choice.message.content or "").encode())
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    with gateway.client(_strict_response_validation=False) as lenient:
        options = {"model": "demo", "prompt": "The list", "max_tokens": 8, "seed": 5, "logprobs": 2}
        whole = lenient.completions.create(**options).choices[0].logprobs
        chunks = list(lenient.completions.create(**options, stream=True))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    assert whole is not None
    assert [t for part in parts for t in part.tokens or ()] == whole.tokens
    assert [t for part in parts for t in part.text_offset or ()] == whole.text_offset


def test_models_say_their_context_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] > 100
