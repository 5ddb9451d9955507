"""The ``input`` of a response: text or items, as chat messages and as the API lists them."""

from __future__ import annotations

from typing import Any

from ..api_errors import ApiError, invalid

__all__ = ["assistant_message", "input_items", "read_input"]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")
_MESSAGE_KEYS = frozenset({"type", "role", "content", "id", "status", "phase"})


def read_input(value: object) -> list[dict[str, str]]:
    """The chat messages of an ``input``.

    Raises:
        ApiError: 400, with the place at fault.
    """
    if isinstance(value, str):
        if not value:
            raise invalid("input", "input: give text or a list of items", "missing_value")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input", "input: give text or a list of items", "missing_value")
    return [_message(f"input[{i}]", item) for i, item in enumerate(value)]


def _message(where: str, item: object) -> dict[str, str]:
    if not isinstance(item, dict):
        raise invalid(where, f"{where}: an item is an object")
    kind = item.get("type", "message")
    if kind != "message":
        shown = kind[:64] if isinstance(kind, str) else "no text"
        message = f"{where}.type: allowed is message; items of type {shown} are not served"
        raise invalid(f"{where}.type", message, "unsupported_value")
    for key in item:
        if key not in _MESSAGE_KEYS:
            path = f"{where}.{key[:64]}"
            raise invalid(path, f"{path}: is not served", "unsupported_parameter")
    role = item.get("role")
    if role not in _ROLES:
        message = f"{where}.role: allowed are {', '.join(_ROLES)}"
        raise invalid(f"{where}.role", message)
    return {"role": role, "content": _content(f"{where}.content", item.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where}: give text, or a list of parts")
    return "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") in _TEXT_TYPES:
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise _not_text(where)


def _not_text(where: str) -> ApiError:
    message = f"{where}: allowed are parts of type input_text and output_text, with text"
    return invalid(where, message, "unsupported_content")


def assistant_message(text: str) -> dict[str, str]:
    """An output as a message of the conversation that goes on."""
    return {"role": "assistant", "content": text}


def input_items(response_id: str, messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Messages as ``GET /v1/responses/{id}/input_items`` lists them, in their order."""
    kinds = {"assistant": "output_text"}
    items = []
    for number, message in enumerate(messages):
        part: dict[str, Any] = {
            "type": kinds.get(message["role"], "input_text"), "text": message["content"],
        }  # fmt: skip
        if part["type"] == "output_text":
            part["annotations"] = []
        items.append(
            {
                "id": f"msg_{response_id.removeprefix('resp_')}_in{number}",
                "type": "message",
                "role": message["role"],
                "status": "completed",
                "content": [part],
            }
        )
    return items
