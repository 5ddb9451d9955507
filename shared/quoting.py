"""The one way for bytes from outside into a message, a log line or a refusal.

The result is always one line, encodable as UTF-8 and bounded in length. The value may be lone
surrogates, control characters, a megabyte of text, an integer of a million digits, or a list nested
a thousand deep.
"""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice

__all__ = ["one_line", "quote"]

_MAX_DEPTH = 3
_MAX_ITEMS = 8
_MAX_INTEGER_BITS = 256


def one_line(text: str, max_chars: int) -> str:
    """Return ``text`` with unprintable characters escaped, cut to ``max_chars`` characters."""
    start = text[: max_chars + 1]
    if not start.isprintable():
        start = "".join(char if char.isprintable() else repr(char)[1:-1] for char in start)
    return start if len(start) <= max_chars else f"{start[: max_chars - 3]}..."


def quote(value: object, max_chars: int = 80) -> str:
    """Return the form of any value in a message: its ``repr``, cut to ``max_chars`` characters."""
    return one_line(_represent(value, max_chars, _MAX_DEPTH), max_chars)


def _represent(value: object, max_chars: int, depth: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:max_chars]) if len(value) > max_chars else repr(value)
    if type(value) is int and value.bit_length() > _MAX_INTEGER_BITS:
        return f"an integer of {value.bit_length()} bits"
    if type(value) in (list, tuple, dict) and depth == 0:
        return "..."
    if type(value) is list:
        return f"[{_items(value, max_chars, depth)}]"
    if type(value) is tuple:
        return f"({_items(value, max_chars, depth)}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        pairs = [
            f"{_represent(key, max_chars, depth - 1)}: {_represent(item, max_chars, depth - 1)}"
            for key, item in islice(value.items(), _MAX_ITEMS)
        ]
        return f"{{{', '.join(pairs)}{_rest(value)}}}"
    try:
        return repr(value)
    except Exception:  # a caller's own class
        return f"<{type(value).__name__}>"


def _items(values: list[object] | tuple[object, ...], max_chars: int, depth: int) -> str:
    shown = (_represent(item, max_chars, depth - 1) for item in values[:_MAX_ITEMS])
    return ", ".join(shown) + _rest(values)


def _rest(values: Sized) -> str:
    return ", ..." if len(values) > _MAX_ITEMS else ""
