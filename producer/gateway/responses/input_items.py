"""The ``input`` of a response: text or items, as chat messages and as the API lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.shared.protocol.fields.field_types import FieldType

from ...choices import Choice
from ..api_errors import ApiError, invalid
from ..openai.chat_deltas import call_id
from ..openai.fields.common_fields import LIST, TEXT
from ..openai.fields.members import check_members

__all__ = ["assistant_message", "check_calls", "input_items", "read_input"]

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")
_Types = Mapping[str, FieldType | None]
_ANY_ITEM: _Types = {"type": None, "id": TEXT, "status": TEXT}
_KEYS: Mapping[str, _Types] = {
    "message": {**_ANY_ITEM, "role": None, "content": None, "phase": TEXT},
    "reasoning": {**_ANY_ITEM, "summary": LIST, "content": None},
    "function_call": {**_ANY_ITEM, "call_id": None, "name": None, "arguments": None},
    "function_call_output": {**_ANY_ITEM, "call_id": None, "output": None},
}
_PART_KEYS: _Types = {"type": None, "text": None}
_OUTPUT_TEXT_KEYS: _Types = {**_PART_KEYS, "annotations": LIST, "logprobs": LIST}
"""What an earlier answer had, which comes back with it."""


def read_input(value: object) -> list[Message]:
    """The chat messages of an ``input``.

    Reasoning and calls that follow each other are one message of the assistant, together with the
    text between them.

    Raises:
        ApiError: 400, with the place at fault.
    """
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input", "input: give text or a list of items", "missing_value")
    messages: list[Message] = []
    for i, item in enumerate(value):
        _add_item(messages, f"input[{i}]", item)
    return messages


def check_calls(messages: Sequence[Message]) -> None:
    """See that every output of a function belongs to a call before it.

    Raises:
        ApiError: 400, there is no such call.
    """
    known = set()
    for message in messages:
        known |= {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            shown = message["tool_call_id"][:64]
            raise invalid("input", f"input: there is no function call {shown!r} before its output")


def _add_item(messages: list[Message], where: str, item: object) -> None:
    if not isinstance(item, dict):
        raise invalid(where, f"{where}: an item is an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _KEYS:
        shown = kind[:64] if isinstance(kind, str) else "no text"
        message = (
            f"{where}.type: allowed are {', '.join(_KEYS)}; items of type {shown} are not served"
        )
        raise invalid(f"{where}.type", message, "unsupported_value")
    for key, value in item.items():
        if key not in _KEYS[kind] and value is not None:
            path = f"{where}.{key[:64]}"
            raise invalid(path, f"{path}: is not served", "unsupported_parameter")
    check_members(where, item, _KEYS[kind])
    if kind == "message":
        _add_message(messages, where, item)
    elif kind == "function_call_output":
        name = _text(f"{where}.call_id", item.get("call_id"))
        content = _content(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": name, "content": content})
    elif kind == "function_call":
        texts = [_text(f"{where}.{key}", item.get(key)) for key in ("call_id", "name", "arguments")]
        function = {"name": texts[1], "arguments": texts[2]}
        call = {"id": texts[0], "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    else:
        if item.get("summary"):
            path = f"{where}.summary"
            raise invalid(path, f"{path}: is not served: give content", "unsupported_value")
        text = _reasoning(f"{where}.content", item.get("content"))
        if text:
            thought = _assistant(messages, begins=True)
            thought["reasoning_content"] = thought.get("reasoning_content", "") + text


def _add_message(messages: list[Message], where: str, item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role: allowed are {', '.join(_ROLES)}")
    content = _content(f"{where}.content", item.get("content"))
    last = messages[-1] if messages else {}
    if role == "assistant" and set(last) == {"role", "content", "reasoning_content"}:
        last["content"] += content
        return
    messages.append({"role": role, "content": content})


def _assistant(messages: list[Message], *, begins: bool = False) -> Message:
    """The assistant's message that goes on, or a new one; reasoning ``begins`` it."""
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant"
    if begins and goes_on:
        goes_on = not last["content"] and "tool_calls" not in last
    if not goes_on:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(where: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise invalid(where, f"{where}: give text")


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where}: give text, or a list of parts")
    return "".join(_part(f"{where}[{i}]", part, _TEXT_TYPES) for i, part in enumerate(content))


def _reasoning(where: str, content: object) -> str:
    if not isinstance(content, list | None):
        raise invalid(where, f"{where}: give a list of parts")
    parts = enumerate(content or ())
    return "".join(_part(f"{where}[{i}]", part, ("reasoning_text",)) for i, part in parts)


def _part(where: str, part: object, allowed: tuple[str, ...]) -> str:
    if isinstance(part, dict) and part.get("type") in allowed:
        is_output = part["type"] == "output_text"
        check_members(where, part, _OUTPUT_TEXT_KEYS if is_output else _PART_KEYS)
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise _not_text(where, allowed)


def _not_text(where: str, allowed: tuple[str, ...]) -> ApiError:
    message = f"{where}: allowed are parts of type {' and '.join(allowed)}, with text"
    return invalid(where, message, "unsupported_content")


def assistant_message(response_id: str, choice: Choice) -> Message:
    """An output as a message of the conversation that goes on."""
    message: Message = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    calls = [
        {
            "id": call_id(response_id, choice.index, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(choice.tool_calls)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def input_items(response_id: str, messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as ``GET /v1/responses/{id}/input_items`` lists them, in their order."""
    items = [item for message in messages for item in _items(message)]
    name = response_id.removeprefix("resp_")
    return [
        {"id": f"item_{name}_in{number}", **item, "status": "completed"}
        for number, item in enumerate(items)
    ]


def _items(message: Message) -> list[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if role == "tool":
        output = {"call_id": message["tool_call_id"], "output": content}
        return [{"type": "function_call_output", **output}]
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [part]})
    calls = message.get("tool_calls", ())
    if content or not calls:
        text: dict[str, Any] = {"type": "input_text", "text": content}
        if role == "assistant":
            text = {"type": "output_text", "text": content, "annotations": []}
        items.append({"type": "message", "role": role, "content": [text]})
    for call in calls:
        function = call["function"]
        items.append({"type": "function_call", "call_id": call["id"], **function})
    return items
