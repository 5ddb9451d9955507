"""JSON and msgpack from outside, parsed within bounds: depth, number of containers, exceptions.

A parser may raise more than its documentation names (RecursionError, OverflowError, MemoryError).
Here all of it becomes the :class:`InvalidRequest` of one request, and a parsed value is flat enough
for every later check to walk it.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack

from ..errors import InvalidRequest, ProtocolError

__all__ = ["MAX_SCHEMA_DEPTH", "PARSER_ERRORS", "parse_json", "parse_msgpack"]

MAX_DEPTH = 8
"""Containers inside one another. A request needs three: map, chat messages, message."""

MAX_SCHEMA_DEPTH = 100
"""The same in a JSON Schema."""

_CONTAINERS = frozenset({list, dict})

MAX_CONTAINERS = 1 << 16
"""Arrays and maps in one value. A payload of the largest size has room for fewer chat messages."""

PARSER_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""What parsers raise over bytes from outside, beyond errors of their own."""


def parse_json(field: str, text: str, allowed: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse the JSON value of a field.

    Raises:
        InvalidRequest: it is no JSON, or goes over a bound; ``allowed`` says what is accepted.
    """
    try:
        value = json.loads(text)
    except PARSER_ERRORS as error:
        why = _BOUND if isinstance(error, RecursionError) else getattr(error, "msg", "it is none")
        raise InvalidRequest(field, text, f"{allowed}; {why}") from None
    if not _is_flat(value, max_depth):
        raise InvalidRequest(field, text, f"{allowed}; {_BOUND}")
    return value


def parse_msgpack(field: str, data: bytes) -> Any:
    """Parse one msgpack value whose strings are UTF-8 and whose maps have string keys.

    Raises:
        ProtocolError: the bytes are not that, or go over a bound.
    """
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except UnicodeDecodeError:
        raise ProtocolError(field, data, "msgpack whose strings are valid UTF-8") from None
    except (msgpack.UnpackException, *PARSER_ERRORS) as error:
        raise ProtocolError(field, data, f"one msgpack value ({error})") from None
    if not _is_flat(value, MAX_DEPTH):
        raise ProtocolError(field, data, f"one msgpack value; {_BOUND}")
    return value


_BOUND = f"it is nested too deeply, or holds more than {MAX_CONTAINERS} arrays and maps"


def _is_flat(value: object, max_depth: int) -> bool:
    """Whether arrays and maps are within the bounds; walks level by level, without recursion."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    containers = len(level)
    for _ in range(max_depth):
        if not level or containers > MAX_CONTAINERS:
            break
        below: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            # In C: nearly every long array holds nothing but token ids.
            if not _CONTAINERS.isdisjoint(map(type, items)):
                below += [item for item in items if type(item) in _CONTAINERS]
        level, containers = below, containers + len(below)
    return not level
