"""Types of request fields about chat: lists of tools, the choice among them, JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequest
from ..fields.field_types import FieldType, Name, Text
from ..parsing import MAX_SCHEMA_DEPTH, parse_json

__all__ = ["FUNCTION_NAME", "JsonMap", "ToolChoice", "ToolList", "json_text"]

FUNCTION_NAME = Name(
    re.compile(r"[A-Za-z0-9_-]{1,64}"), "a function's name: 1 to 64 characters of A-Z a-z 0-9 _ -"
)
_NAMED = "function:"


def json_text(field: str, value: object, allowed: str, max_bytes: int) -> str:
    """Return a value of maps, lists and scalars as compact JSON text.

    Raises:
        InvalidRequest: it has no JSON form or one of more than ``max_bytes`` bytes.
    """
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
        )
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(field, value, allowed) from None
    return Text(max_bytes).check(field, text)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


@dataclass(frozen=True, slots=True)
class JsonMap(FieldType):
    """A mapping with names as keys, or JSON text of one. Its normal form is compact text."""

    max_bytes: int
    max_keys: int
    wire = "string or map"
    text = "JSON object"

    def _range(self) -> str:
        return f"JSON text of an object, up to {self.max_keys} keys and {self.max_bytes:,} bytes"

    def check(self, field: str, value: object) -> str:
        """Return the JSON text."""
        allowed = f"a JSON object of at most {self.max_keys} names and {self.max_bytes} bytes"
        if not isinstance(value, str):
            value = json_text(field, value, allowed, self.max_bytes)
        text = Text(self.max_bytes).check(field, value)
        parsed = parse_json(field, text, allowed)
        if not isinstance(parsed, dict) or len(parsed) > self.max_keys:
            raise InvalidRequest(field, text, allowed)
        for name in parsed:
            if not name.isidentifier() or len(name) > 64:
                raise InvalidRequest(f"{field}.{name[:64]}", parsed[name], "names as in Python")
        return text


@dataclass(frozen=True, slots=True)
class ToolList(FieldType):
    """A list of function tools as in OpenAI's API, or JSON text of it. Its normal form is text.

    Each is ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``.
    """

    max_tools: int
    max_bytes: int
    wire = "string or list of maps"
    text = "JSON array"

    def _range(self) -> str:
        return f"JSON text of up to {self.max_tools} tools, up to {self.max_bytes:,} bytes"

    def check(self, field: str, value: object) -> str | None:
        """Return the JSON text; None for an empty list."""
        if value is None:
            return None
        allowed = f"a list of at most {self.max_tools} function tools of {self.max_bytes} bytes"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = json_text(field, list(value), allowed, self.max_bytes)
        text = Text(self.max_bytes).check(field, value)
        tools = parse_json(field, text, allowed, max_depth=MAX_SCHEMA_DEPTH)
        if not isinstance(tools, list) or len(tools) > self.max_tools:
            raise InvalidRequest(field, text, allowed)
        names = [_check_tool(f"{field}[{i}]", tool) for i, tool in enumerate(tools)]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise InvalidRequest(f"{field}[{i}].function.name", name, "each name once")
        return text if tools else None


def _check_tool(where: str, tool: Any) -> str:
    shape = 'a tool such as {"type":"function","function":{"name":"f","parameters":{...}}}'
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        raise InvalidRequest(where, tool, shape)
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}.type", tool.get("type"), "function")
    _only(where, tool, ("type", "function"))
    where = f"{where}.function"
    _only(where, function, ("name", "description", "parameters", "strict"))
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters", parameters, "a JSON Schema: an object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict", strict, "true or false")
    if (about := function.get("description")) is not None and not isinstance(about, str):
        raise InvalidRequest(f"{where}.description", about, "text")
    return FUNCTION_NAME.check(f"{where}.name", function.get("name"))


def _only(where: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    for key in value:
        if key not in names:
            raise InvalidRequest(where, key, f"the keys {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class ToolChoice(FieldType):
    """``auto``, ``none``, ``required``, or ``function:NAME``; also OpenAI's map for a name."""

    def _range(self) -> str:
        return "`auto`, `none`, `required`, or `function:` and a tool's name"

    def check(self, field: str, value: object) -> str:
        """Return the text."""
        if isinstance(value, Mapping) and value.get("type") == "function":
            function = value.get("function")
            if isinstance(function, Mapping) and set(function) == {"name"} and len(value) == 2:
                return _NAMED + FUNCTION_NAME.check(f"{field}.function.name", function["name"])
        if isinstance(value, str):
            if value in ("auto", "none", "required"):
                return value
            if value.startswith(_NAMED):
                return _NAMED + FUNCTION_NAME.check(field, value.removeprefix(_NAMED))
        raise InvalidRequest(field, value, f"auto, none, required or {_NAMED}NAME")
