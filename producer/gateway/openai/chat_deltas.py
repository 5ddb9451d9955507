"""Parsed answers as chat shows them: content, reasoning in a field of its own, and tool calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from penstock.shared.protocol.chat.deltas import CONTENT, REASONING, TOOL_CALL, Delta

from ...choices import Choice
from ..answering.sse import quoted

__all__ = ["call_id", "chat_message", "delta_object", "has_call"]


def call_id(request_id: str, choice: int, index: int) -> str:
    """The id of a tool call: always the same one for a request, a choice and a call's number."""
    name = f"{request_id}/{choice}/{index}"
    return f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def has_call(deltas: Iterable[Delta]) -> bool:
    """Whether a tool is called."""
    return any(delta.kind == TOOL_CALL for delta in deltas)


def delta_object(
    request_id: str, choice: int, deltas: tuple[Delta, ...], reasoning_field: str
) -> str:
    """The members of an event's ``delta``, as JSON without the braces.

    Args:
        request_id: of the request.
        choice: number of the choice.
        deltas: what the tokens of the event add.
        reasoning_field: name of the field for reasoning.
    """
    if len(deltas) == 1 and deltas[0].kind == CONTENT:  # what nearly every event is
        return f'"content":{quoted(deltas[0].text)}'
    members = []
    for kind, name in ((REASONING, reasoning_field), (CONTENT, "content")):
        text = "".join(delta.text for delta in deltas if delta.kind == kind)
        if text:
            members.append(f'"{name}":{quoted(text)}')
    calls = [_fragment(request_id, choice, one) for one in deltas if one.kind == TOOL_CALL]
    if calls:
        members.append(f'"tool_calls":[{",".join(calls)}]')
    return ",".join(members)


def _fragment(request_id: str, choice: int, delta: Delta) -> str:
    function = f'"arguments":{quoted(delta.text)}'
    if not delta.name:
        return f'{{"index":{delta.index},"function":{{{function}}}}}'
    name = call_id(request_id, choice, delta.index)
    return (
        f'{{"index":{delta.index},"id":"{name}","type":"function",'
        f'"function":{{"name":{json.dumps(delta.name)},{function}}}}}'
    )


def chat_message(request_id: str, choice: Choice, reasoning_field: str) -> dict[str, Any]:
    """The ``message`` of a whole answer that was parsed."""
    calls = [
        {
            "id": call_id(request_id, choice.index, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(choice.tool_calls)
    ]
    content = choice.content or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message[reasoning_field] = choice.reasoning
    if calls:
        message["tool_calls"] = calls
    return message
