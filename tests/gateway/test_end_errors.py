"""Every end of a request but completion is an error to its client, in every form of an answer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.producer.batches.lines.line_endpoints import line_endpoint
from penstock.producer.choices import gather_choices
from penstock.producer.gateway.api_errors import ApiError, end_error
from penstock.producer.gateway.openai.answer_form import AnswerForm
from penstock.producer.gateway.openai.event_writers import AnswerHead, ChatWriter, CompletionWriter
from penstock.producer.gateway.openai.fields.chat_fields import CHAT_FIELDS
from penstock.producer.gateway.openai.token_logprobs import TokenNames
from penstock.producer.gateway.responses.response_events import ResponseWriter
from penstock.producer.gateway.responses.response_object import ResponseHead
from penstock.producer.results import Result
from penstock.shared.protocol.chat.deltas import CONTENT, Delta
from penstock.shared.protocol.choice_parts import Part
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.payload import pack_result
from penstock.shared.protocol.states import Reason, State

BAD = [reason for reason in Reason if reason.state is not State.COMPLETED]
CHUNK = Chunk(0, (1,), "a", 0, deltas=(Delta(CONTENT, "a"),))
PARTED = Chunk(0, (1, 2), "", 0, parts=(Part(0, 0, 1, "a", None), Part(1, 0, 1, "b", None)))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}


def test_completion_is_no_error() -> None:
    for reason in (Reason.STOP, Reason.LENGTH):
        assert end_error(End(n=1, reason=reason), {}, "prompt") is None


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("chunk", [CHUNK, PARTED], ids=["one", "several"])
def test_a_stream_ends_with_the_error(reason: Reason, chunk: Chunk) -> None:
    head, end = AnswerHead("x", 1, "m"), End(n=chunk.stop, reason=reason)
    for kind in (ChatWriter, CompletionWriter):
        writer = kind(head, AnswerForm(), CHAT_FIELDS, TokenNames(()))
        writer.chunk(chunk)
        with pytest.raises(ApiError) as raised:
            writer.end(end)
        assert raised.value.status >= 400
        assert reason.value in raised.value.message


@pytest.mark.parametrize("reason", BAD)
def test_a_response_has_failed(reason: Reason) -> None:
    writer = ResponseWriter(ResponseHead("resp_1", 1, "m", "default", {}))
    writer.chunk(CHUNK)
    data = writer.end(End(n=1, reason=reason)).decode().strip().splitlines()[-1]
    last = json.loads(data.removeprefix("data: "))
    assert last["type"] == "response.failed"
    if reason.state is not State.CANCELLED:
        assert reason.value in last["response"]["error"]["message"]


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("url", BODIES)
def test_a_line_of_a_batch_has_failed(reason: Reason, url: str) -> None:
    end = End(n=1, reason=reason)
    result = Result(id="x", choices=gather_choices([CHUNK], end), end=end)
    line = line_endpoint(url).translate({"model": "m", **BODIES[url]})
    answer = line.respond("x", result, TokenNames(()))
    assert answer["status_code"] >= 400
    assert answer["body"]["error"]["code"]


def test_an_answer_that_json_has_not_is_an_error_of_its_line() -> None:
    end = End(n=1, reason=Reason.STOP)
    choices = gather_choices([], end)
    result = Result(id="x", choices=choices, end=end, packed_value=pack_result([math.nan]))
    line = line_endpoint("/v1/infer").translate({"model": "m", "input": 1})
    answer = line.respond("x", result, TokenNames(()))
    assert (answer["status_code"], answer["body"]["error"]["code"]) == (500, "invalid_answer")
