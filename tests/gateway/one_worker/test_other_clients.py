"""Clients that others built on OpenAI's API, unchanged, against a running gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
from gateway.rig import GatewayProcess
from pydantic import BaseModel, SecretStr

if TYPE_CHECKING:  # these take two seconds, which other test files need not wait for
    from langchain_openai import ChatOpenAI


class Verdict(BaseModel):
    """What the model is made to say."""

    good: bool
    stars: int


def test_instructor_gets_an_object_of_its_class(client: openai.OpenAI) -> None:
    import instructor

    structured = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    verdict = structured.chat.completions.create(
        model="demo",
        response_model=Verdict,
        messages=[{"role": "user", "content": "Is the list type good?"}],
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(verdict, Verdict)


@pytest.fixture
def chat(gateway: GatewayProcess) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="demo",
        base_url=f"{gateway.url}/v1",
        api_key=SecretStr("none"),
        max_completion_tokens=12,
        temperature=0,
        stream_usage=True,
    )


def test_langchain_whole_and_streamed_are_the_same(chat: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage

    messages = [SystemMessage("Be short."), HumanMessage("What is a mapping?")]
    whole = chat.invoke(messages)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(chat.stream(messages))
    assert "".join(str(part.content) for part in parts) == whole.content


async def test_langchain_batches_and_runs_in_a_loop(chat: ChatOpenAI) -> None:
    answers = await chat.abatch(["one", "two", "three"])
    await chat.root_async_client.close()  # before its loop
    assert all(answer.content for answer in answers)


def test_langchain_structured_output(chat: ChatOpenAI) -> None:
    wide = chat.model_copy(update={"max_tokens": 60})
    structured = wide.with_structured_output(Verdict, method="json_schema")
    assert isinstance(structured.invoke("Is the list type good?"), Verdict)
    by_responses = wide.model_copy(update={"use_responses_api": True, "stream_usage": False})
    structured = by_responses.with_structured_output(Verdict, method="json_schema")
    assert isinstance(structured.invoke("Is the list type good?"), Verdict)


def test_openais_own_helpers_parse_what_they_ask_for(client: openai.OpenAI) -> None:
    asked = "Is the list type good?"
    chat = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": asked}],
        response_format=Verdict,
        max_tokens=60,
        temperature=0,
    )
    assert isinstance(chat.choices[0].message.parsed, Verdict)
    response = client.responses.parse(
        model="demo", input=asked, text_format=Verdict, max_output_tokens=60, temperature=0
    )
    assert isinstance(response.output_parsed, Verdict)
