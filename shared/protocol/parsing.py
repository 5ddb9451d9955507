"""JSON and msgpack from outside, parsed within bounds: depth, number of containers, exceptions.

A parser may raise more than its documentation names (RecursionError, OverflowError, MemoryError).
Here all of it becomes the :class:`InvalidRequest` of one request, and a parsed value is flat enough
for every later check to walk it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from ..errors import InvalidRequest, ProtocolError

__all__ = [
    "MAX_SCHEMA_DEPTH",
    "PARSER_ERRORS",
    "HalfSurrogate",
    "find_half_surrogate",
    "parse_json",
    "parse_msgpack",
]

MAX_DEPTH = 8
"""Containers inside one another. A request needs three: map, chat messages, message."""

MAX_SCHEMA_DEPTH = 100
"""The same in a JSON Schema."""

_SHOWN_CHARS = 200

_CONTAINERS = frozenset({list, dict})

MAX_CONTAINERS = 1 << 16
"""Arrays and maps in one value. A payload of the largest size has room for fewer chat messages."""

_HALF = re.compile("[\ud800-\udfff]")

PARSER_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""What parsers raise over bytes from outside, beyond errors of their own."""


class HalfSurrogate(NamedTuple):
    """Half of a surrogate pair in a parsed value, which is no Unicode text.

    Attributes:
        path: the field that holds it, such as ``messages[0].content``, printable; of a map's key
            that has one, the path of its value.
        message: what is wrong with it, and what to write.
    """

    path: str
    message: str


def find_half_surrogate(value: object, path: str = "") -> HalfSurrogate | None:
    r"""Return the first half of a surrogate pair in a parsed value, or in a key of its maps.

    JSON's escapes can write one (``\ud800`` alone); UTF-8 has no bytes for it.

    Args:
        value: text, a list or a map; all else is fine.
        path: where it stands.
    """
    if isinstance(value, str):
        if value.isascii() or (half := _HALF.search(value)) is None:
            return None
        shown = path[:_SHOWN_CHARS]
        what = f"has \\u{ord(half[0]):04x}, half of a surrogate pair; write both halves, or U+FFFD"
        return HalfSurrogate(shown, f"{shown}: {what}")
    found = (find_half_surrogate(part, where) for where, part in _parts(value, path))
    return next(filter(None, found), None)


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            name = key[:64].encode("ascii", "backslashreplace").decode()
            where = f"{path}.{name}" if path else name
            yield where, key
            yield where, item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item


def parse_json(field: str, text: str, allowed: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse the JSON value of a field, without what Python reads beyond JSON: NaN and infinity.

    Raises:
        InvalidRequest: it is no JSON, or goes over a bound; ``allowed`` says what is accepted. Or a
            number in it is not finite, whose place the error names.
    """
    strange: list[str] = []

    def note(number: str) -> float:
        strange.append(number)
        return math.nan

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else note(number)

    try:
        value = json.loads(text, parse_float=finite, parse_constant=note)
    except PARSER_ERRORS as error:
        raise InvalidRequest(field, text, f"{allowed}; {_why_none(error)}") from None
    if not _is_flat(value, max_depth):
        raise InvalidRequest(field, text, f"{allowed}; {_BOUND}")
    if strange and (path := _find_nan(value, field)) is not None:
        raise InvalidRequest(path, strange[0], "a finite number")
    return value


def _find_nan(value: object, path: str) -> str | None:
    """Where the first NaN stands in a parsed value; None if it has none."""
    if isinstance(value, float):
        return path if math.isnan(value) else None
    found = (_find_nan(part, where) for where, part in _parts(value, path))
    return next((where for where in found if where is not None), None)


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


def _why_none(error: BaseException) -> str:
    """Why a text is no JSON."""
    if isinstance(error, RecursionError):
        return _BOUND
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    # Python reads no whole number of more digits (sys.set_int_max_str_digits).
    return "a number in it is too long" if isinstance(error, ValueError) else "it is none"


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
