"""The check of bodies and events notices what OpenAI's API would not send."""

from __future__ import annotations

from typing import Any

import pytest
from gateway.openai_forms import check_body, check_event

CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "demo",
    "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
}
DELTA = {
    "type": "response.output_text.delta",
    "item_id": "msg_1",
    "output_index": 0,
    "content_index": 0,
    "delta": "a",
    "logprobs": [],
    "sequence_number": 4,
}
REASON = {"message": "no", "type": "server_error", "param": None, "code": "internal_error"}
ERROR = {"error": REASON}


def test_what_is_right_passes() -> None:
    check_event(CHUNK)
    check_event(DELTA)
    check_event(ERROR)
    check_body({"object": "list", "data": []})
    check_body({"tokens": [1, 2]})  # not OpenAI's


@pytest.mark.parametrize(
    "wrong",
    [
        {**CHUNK, "created": "1"},
        {**CHUNK, "choices": [{"index": 0, "finish_reason": None}]},
        {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "done"}]},
        {**DELTA, "sequence_number": None},
        {**DELTA, "type": "response.text.delta"},
        {"error": {**REASON, "code": None}},
        {"error": {"message": "no", "type": "server_error"}},
        {"object": "list", "data": [{"object": "model", "id": 3}]},
    ],
    ids=str,
)
def test_what_is_wrong_is_noticed(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_event(wrong)
