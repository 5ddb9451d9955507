"""The Responses API through OpenAI's own strict client: stored, resumed, continued, cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from gateway.rig import GatewayProcess
from waiting import wait_until

from penstock.shared.local.embedded import EmbeddedRedis

FIELDS: dict[str, Any] = {"model": "demo", "input": "The list type", "max_output_tokens": 12}


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def ended(client: openai.OpenAI, name: str) -> Any:
    found: list[Any] = []

    def has_ended() -> bool:
        found.append(client.responses.retrieve(name))
        return found[-1].status not in ("queued", "in_progress")

    wait_until(has_ended, "the response has ended")
    return found[-1]


def test_whole_stored_and_streamed_responses_agree(client: openai.OpenAI) -> None:
    whole = client.responses.create(**FIELDS, metadata={"a": "b"}, instructions="Be short.")
    assert whole.object == "response"
    assert whole.status in ("completed", "incomplete")
    assert whole.metadata == {"a": "b"}
    assert whole.instructions == "Be short."
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    events = list(client.responses.retrieve(whole.id, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].response.to_dict() == whole.to_dict()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_live_and_replayed_events_are_the_same_from_every_number(client: openai.OpenAI) -> None:
    live = list(client.responses.create(**FIELDS, stream=True))
    assert numbers(live) == sorted(set(numbers(live)))
    assert numbers(live)[:4] == [0, 1, 2, 3]
    name = live[0].response.id
    for after in (0, 1, 3, 4, 9, numbers(live)[-2]):
        replayed = list(client.responses.retrieve(name, stream=True, starting_after=after))
        expected = [event.to_dict() for event in live if event.sequence_number > after]
        assert [event.to_dict() for event in replayed] == expected


def test_numbers_that_no_event_has_are_refused(client: openai.OpenAI) -> None:
    live = list(client.responses.create(**FIELDS, stream=True))
    name, last = live[0].response.id, numbers(live)[-1]
    assert list(client.responses.retrieve(name, stream=True, starting_after=last)) == []
    for after in (last + 1, 2**31 - 1, 2**31):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.retrieve(name, stream=True, starting_after=after)
        assert refused.value.param == "starting_after"
    with pytest.raises(openai.BadRequestError) as unclear:
        client.responses.retrieve(name, extra_query={"stream": "maybe"})
    assert unclear.value.param == "stream"


def test_background_response_outlives_its_gateway(
    server: EmbeddedRedis, client: openai.OpenAI, folder: Path
) -> None:
    other = GatewayProcess(server.url, folder / "other.log")
    try:
        with other.client() as first:
            fields = {**FIELDS, "max_output_tokens": 64}
            events = first.responses.create(**fields, background=True, stream=True)
            seen = [next(iter(events)) for _ in range(3)]
            name = seen[0].response.id
            events.close()
    finally:
        other.kill()
    done = ended(client, name)
    assert done.status in ("completed", "incomplete")
    rest = list(client.responses.retrieve(name, stream=True, starting_after=2))
    assert numbers(rest)[0] == 3
    assert rest[-1].response.output_text == done.output_text


def test_background_response_is_answered_at_once_and_can_be_cancelled(
    client: openai.OpenAI,
) -> None:
    # A greedy answer that does not end by itself; a sampled one may before it is cancelled.
    endless = {"input": "Hello", "temperature": 0, "max_output_tokens": 8000}
    started = client.responses.create(**{**FIELDS, **endless}, background=True)
    assert started.status == "queued"
    with pytest.raises(openai.BadRequestError) as early:
        client.responses.create(**FIELDS, previous_response_id=started.id)
    assert early.value.code == "previous_response_not_found"
    cancelled = client.responses.cancel(started.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(started.id).status == "cancelled"
    assert list(client.responses.retrieve(started.id, stream=True))[-1].type == "response.failed"


def test_conversation_goes_on_from_a_stored_response(client: openai.OpenAI) -> None:
    first = client.responses.create(**FIELDS)
    second = client.responses.create(
        **{**FIELDS, "input": [{"role": "user", "content": "And then?"}]},
        previous_response_id=first.id,
    )
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].content[0].text == first.output_text
    latest = client.responses.input_items.list(second.id, limit=1)
    assert latest.data[0].id == items[-1].id
    assert latest.has_more


def test_deleted_or_unstored_response_is_not_known(client: openai.OpenAI) -> None:
    stored = client.responses.create(**FIELDS)
    client.responses.delete(stored.id)
    unstored = client.responses.create(**FIELDS, store=False)
    for name in (stored.id, unstored.id, "resp_none", "chatcmpl-x"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.retrieve(name)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(**FIELDS, previous_response_id=stored.id)
    assert wrong.value.param == "previous_response_id"


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    found = client.responses.create(**{**FIELDS, "max_output_tokens": 64}, text={"format": form})
    assert found.output_text.replace(" ", "").replace("\n", "") in ('{"ok":true}', '{"ok":false}')


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 99}, "temperature"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_body_is_named(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={**FIELDS, **changes}, cast_to=object)
    assert refused.value.param == param
