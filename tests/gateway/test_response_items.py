"""The items and events of a response, as functions of its deltas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.producer.gateway.responses.output_items import OutputItems
from penstock.producer.gateway.responses.response_events import ResponseWriter
from penstock.producer.gateway.responses.response_object import ResponseHead
from penstock.shared.protocol.chat.deltas import CONTENT, REASONING, TOOL_CALL, Delta
from penstock.shared.protocol.events import Chunk, End, Usage
from penstock.shared.protocol.states import Reason

HEAD = ResponseHead("resp_1", 1, "m", "default", {})
DELTAS = (
    Delta(REASONING, "Hm"),
    Delta(REASONING, "m."),
    Delta(CONTENT, "Let me"),
    Delta(CONTENT, " see."),
    Delta(TOOL_CALL, '{"a":', 0, "f"),
    Delta(TOOL_CALL, "1}", 0),
    Delta(TOOL_CALL, "{}", 1, "g"),
    Delta(CONTENT, "Done"),
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def end(reason: Reason = Reason.STOP) -> End:
    usage = Usage(prompt_tokens=3, output_tokens=len(DELTAS))
    return End(reason=reason, n=len(DELTAS), usage=usage)


def written(cuts: tuple[int, ...], last: End, after: int = -1) -> list[dict[str, Any]]:
    """The events of the deltas, one a token, in chunks that end at ``cuts``."""
    writer = ResponseWriter(HEAD, after)
    data, start = b"", 0
    for stop in (*cuts, len(DELTAS)):
        deltas = tuple(d._replace(token=i) for i, d in enumerate(DELTAS[start:stop]))
        data += writer.chunk(Chunk(start, (1,) * (stop - start), "", 0, deltas=deltas))
        start = stop
    data += writer.end(last)
    lines = data.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_events_are_as_openai_defines_them() -> None:
    events = written((), end())
    for number, event in enumerate(events):
        EVENT.validate_json(json.dumps(event))
        assert event["sequence_number"] == number
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["content_part.done", "output_item.done", "completed"]
    whole = Response.model_validate(events[-1]["response"])
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    found = [item.type for item in whole.output]
    assert found == ["reasoning", "message", "function_call", "function_call", "message"]
    assert {item.status for item in whole.output} == {"completed"}  # type: ignore[union-attr]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (3, 5, 6), tuple(range(1, len(DELTAS)))])
def test_events_do_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    whole = written((), end())
    for after in range(-1, len(whole)):
        assert written(cuts, end(), after) == whole[after + 1 :]


def test_tokens_of_reasoning_are_counted_with_the_marks_before_them() -> None:
    deltas = (
        Delta(REASONING, "Hm", token=1),  # behind a mark, which has no text
        Delta(REASONING, "m.", token=2),
        Delta(CONTENT, "So", token=4),
        Delta(REASONING, "But", token=7),
        Delta(CONTENT, " yes", token=7),
    )
    assert OutputItems.of("resp_1", deltas, end()).reasoning_tokens == 3 + 3
    by_chunk = OutputItems("resp_1")
    for delta in deltas:
        by_chunk.add(delta._replace(token=0), delta.token)
    assert by_chunk.reasoning_tokens == 3 + 3


def test_the_last_item_of_a_cut_output_is_incomplete() -> None:
    *_, last = written((), end(Reason.LENGTH))
    assert last["type"] == "response.incomplete"
    statuses = [item["status"] for item in last["response"]["output"]]
    assert statuses == ["completed"] * 4 + ["incomplete"]
    *_, last = written((), end(Reason.CLIENT))
    assert last["type"] == "response.failed"
    assert last["response"]["output"][-1]["status"] == "incomplete"
