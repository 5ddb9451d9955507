"""Chat messages with the keys of OpenAI's API, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from ..fields.field_types import Text
from .tool_types import FUNCTION_NAME, json_text

__all__ = ["check_messages", "message_bytes"]

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 128
_MAX_BYTES = 1 << 20
_TEXT = Text(_MAX_BYTES, empty_ok=True)
_NAME = Text(256)

_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
    "refusal",
}  # fmt: skip
_ASSISTANTS_OWN = ("tool_calls", "reasoning_content", "reasoning", "refusal")
_PART_TEXTS = {"text": "text", "refusal": "refusal"}


def check_messages(field: str, messages: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return the normal form of chat messages.

    In it a message is a map of ``role`` and ``content``, both text, and of those of ``name``,
    ``reasoning_content``, ``tool_calls`` and ``tool_call_id`` that it has. A list of text parts is
    joined by newlines; a ``refusal`` becomes content; the arguments of a call are JSON text.

    Args:
        field: of the request, for errors.
        messages: at least one.

    Raises:
        InvalidRequest: a message has an unknown key or role, or a value of another type or size.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(field, f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    return tuple(_message(f"{field}[{i}]", message) for i, message in enumerate(messages))


def message_bytes(message: Mapping[str, Any]) -> int:
    """Return the UTF-8 bytes of what a message in normal form says.

    These are its content, its reasoning, and the names and arguments of its calls.
    """
    texts = [message["content"], message.get("reasoning_content", "")]
    for call in message.get("tool_calls", ()):
        texts += call["function"].values()
    return sum(len(text.encode()) for text in texts)


def _message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or "role" not in value:
        raise InvalidRequest(where, value, f"a map with role and content; keys: {_known()}")
    given = {key: item for key, item in value.items() if item is not None}
    for key in given:
        if key not in _KEYS:
            raise InvalidRequest(where, key, f"the keys {_known()}")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role", role, " or ".join(ROLES))
    for key in _ASSISTANTS_OWN:
        if key in given and role != "assistant":
            raise InvalidRequest(f"{where}.{key}", given[key], "nothing: only assistants have it")
    message: dict[str, Any] = {"role": role, "content": _content(where, given)}
    if "name" in given:
        message["name"] = _NAME.check(f"{where}.name", given["name"])
    if (reasoning := _reasoning(where, given)) is not None:
        message["reasoning_content"] = reasoning
    if calls := given.get("tool_calls"):
        message["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = _NAME.check(f"{where}.tool_call_id", given["tool_call_id"])
    elif "tool_call_id" in given:
        raise InvalidRequest(f"{where}.tool_call_id", given["tool_call_id"], "it with role tool")
    return message


def _known() -> str:
    return ", ".join(sorted(_KEYS))


def _content(where: str, given: Mapping[str, Any]) -> str:
    content = given.get("content")
    refusal = given.get("refusal")
    if content is None:
        if refusal is not None:
            return _TEXT.check(f"{where}.refusal", refusal)
        if given["role"] == "assistant" and len(given) > 1:
            return ""
        raise InvalidRequest(f"{where}.content", content, "text, or a list of text parts")
    if isinstance(content, str):
        return _TEXT.check(f"{where}.content", content)
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise InvalidRequest(f"{where}.content", content, "text, or a list of text parts")
    if len(content) > MAX_PARTS:
        allowed = f"at most {MAX_PARTS} parts"
        raise InvalidRequest(f"{where}.content", f"{len(content)} parts", allowed)
    return "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return _TEXT.check(where, part)
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _PART_TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(part, Mapping) or not set(part) <= {"type", key}:
        allowed = 'a text part such as {"type":"text","text":"Hello"}; models here read only text'
        raise InvalidRequest(where, part, allowed)
    return _TEXT.check(f"{where}.{key}", part.get(key))


def _reasoning(where: str, given: Mapping[str, Any]) -> str | None:
    names = [name for name in ("reasoning_content", "reasoning") if name in given]
    if not names:
        return None
    texts = [_TEXT.check(f"{where}.{name}", given[name]) for name in names]
    if texts[0] != texts[-1]:
        allowed = "the same as reasoning_content, or only one of the two"
        raise InvalidRequest(f"{where}.reasoning", given["reasoning"], allowed)
    return texts[0]


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or len(calls) > MAX_CALLS:
        raise InvalidRequest(where, calls, f"a list of at most {MAX_CALLS} tool calls")
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _call(where: str, call: object) -> dict[str, Any]:
    shape = 'a call such as {"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}'
    if not isinstance(call, Mapping) or not set(call) <= {"id", "type", "function", "index"}:
        raise InvalidRequest(where, call, shape)
    function = call.get("function")
    if not isinstance(function, Mapping) or not set(function) <= {"name", "arguments"}:
        raise InvalidRequest(f"{where}.function", function, shape)
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type", call["type"], "function")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, Mapping):
        arguments = json_text(f"{where}.function.arguments", arguments, "a JSON object", _MAX_BYTES)
    normal: dict[str, Any] = {}
    if call.get("id") is not None:
        normal["id"] = _NAME.check(f"{where}.id", call["id"])
    normal["type"] = "function"
    normal["function"] = {
        "name": FUNCTION_NAME.check(f"{where}.function.name", function.get("name")),
        "arguments": _TEXT.check(f"{where}.function.arguments", arguments),
    }
    return normal
