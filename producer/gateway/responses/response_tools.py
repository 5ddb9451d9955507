"""Tools, their choice and reasoning as the Responses API words them, for the queue's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.protocol.chat.chat_options import ReasoningEffort
from penstock.shared.protocol.chat.tool_types import FUNCTION_NAME
from penstock.shared.protocol.fields.field_types import FieldType, Flag

from ..api_errors import invalid
from ..openai.fields.common_fields import OBJECT, TEXT
from ..openai.fields.members import check_members

__all__ = ["echoed_tools", "tool_options"]

_TOOL_KEYS = ("name", "description", "parameters", "strict")
_TOOL: Mapping[str, FieldType] = {
    "type": TEXT,
    **dict(zip(_TOOL_KEYS, (FUNCTION_NAME, TEXT, OBJECT, Flag()), strict=True)),
}
_UNSERVED = "unsupported_parameter"


def tool_options(own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the queue's request that say which tools there are, and how much to reason.

    Args:
        own: values that the endpoint reads.

    Raises:
        ApiError: 400, with the place at fault.
    """
    fields: dict[str, Any] = {}
    tools = [_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(own.get("tools") or ())]
    if tools:
        fields["tools"] = tools
        if own.get("parallel_tool_calls") is False:
            fields["parallel_tool_calls"] = False
    if own.get("tool_choice") is not None:
        fields["tool_choice"] = _chat_choice(own["tool_choice"])
    effort = _effort(own.get("reasoning") or {})
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def echoed_tools(own: Mapping[str, Any]) -> dict[str, Any]:
    """What the response object says of them; without what was not given."""
    echoed: dict[str, Any] = {
        name: own[name]
        for name in ("tool_choice", "parallel_tool_calls")
        if own.get(name) is not None
    }
    if own.get("tools"):
        echoed["tools"] = [
            {"type": "function", **{key: tool.get(key) for key in _TOOL_KEYS}}
            for tool in own["tools"]
        ]
    if own.get("reasoning"):
        echoed["reasoning"] = {"effort": own["reasoning"].get("effort"), "summary": None}
    return echoed


def _chat_tool(where: str, tool: object) -> dict[str, Any]:
    """A tool with its function in an object of its own, as chat has it."""
    if not isinstance(tool, dict):
        raise invalid(where, f"{where}: a tool is an object")
    kind = tool.get("type")
    if kind != "function":
        shown = kind[:64] if isinstance(kind, str) else "no text"
        message = f"{where}.type: allowed is function; tools of type {shown} are not served"
        raise invalid(f"{where}.type", message, "unsupported_value")
    for key in tool:
        if key not in _TOOL:
            path = f"{where}.{key[:64]}"
            raise invalid(path, f"{path}: is not served", _UNSERVED)
    check_members(where, tool, _TOOL)
    if not isinstance(tool.get("name"), str):
        raise invalid(f"{where}.name", f"{where}.name: the name of the function, as text")
    function = {key: tool[key] for key in _TOOL_KEYS if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: object) -> object:
    if isinstance(choice, dict):
        if choice.get("type") == "function" and set(choice) == {"type", "name"}:
            return {"type": "function", "function": {"name": choice["name"]}}
        message = "tool_choice: allowed are auto, none, required, and a function by its name"
        raise invalid("tool_choice", message, "unsupported_value")
    return choice


def _effort(reasoning: Mapping[str, Any]) -> str | None:
    for name, value in reasoning.items():
        if name != "effort" and value is not None:
            where = f"reasoning.{name[:64]}"
            raise invalid(where, f"{where}: is not served", _UNSERVED)
    effort = reasoning.get("effort")
    allowed = [member.value for member in ReasoningEffort]
    if effort is None or (isinstance(effort, str) and effort in allowed):
        return effort
    raise invalid("reasoning.effort", f"reasoning.effort: allowed are {', '.join(allowed)}")
