"""Checks of single field values. Each returns the value unchanged or raises; none clamps.

:func:`unknown` alone is for names of fields.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from ..errors import InvalidRequest

__all__ = [
    "flag",
    "integer",
    "member",
    "name",
    "number",
    "strings",
    "text",
    "token_ids",
    "unknown",
]

MAX_TOKEN_ID = 2**31 - 1

_Member = TypeVar("_Member", bound=StrEnum)


def integer(field: str, value: object, low: int, high: int) -> int:
    """An ``int`` (not a ``bool``) in ``[low, high]``; otherwise :class:`InvalidRequest`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(field, value, f"an integer from {low} to {high}")
    return value


def number(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite ``int`` or ``float`` in ``[low, high]`` (``(low, high]`` if ``open_low``)."""
    interval = (
        f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, value, interval)
    # Compared before it is converted: no float holds 10**400. NaN compares false.
    if not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(field, value, interval)
    return float(value)


def flag(field: str, value: object) -> bool:
    """A ``bool``; 0 and 1 are not taken for one."""
    if not isinstance(value, bool):
        raise InvalidRequest(field, value, "true or false")
    return value


def text(field: str, value: object, max_bytes: int, *, empty_ok: bool = False) -> str:
    """A ``str`` that has a UTF-8 form of at most ``max_bytes`` bytes."""
    allowed = f"{'' if empty_ok else 'non-empty '}text of at most {max_bytes} bytes in UTF-8"
    if not isinstance(value, str) or not (value or empty_ok):
        raise InvalidRequest(field, value, allowed)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequest(field, value, f"{allowed}, without lone surrogates") from None
    if size > max_bytes:
        raise InvalidRequest(field, value, f"{allowed}; this one has {size}")
    return value


def name(field: str, value: object, pattern: re.Pattern[str], allowed: str) -> str:
    """A ``str`` that matches ``pattern`` as a whole."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InvalidRequest(field, value, allowed)
    return value


def member(field: str, value: object, members: type[_Member]) -> _Member:
    """One of ``members``, which may be given by its value."""
    # Looked up by hand: an enum puts the whole value into its error, however long or deep it is.
    for known in members:
        if isinstance(value, str) and value == known.value:
            return known
    raise InvalidRequest(field, value, " or ".join(known.value for known in members))


def strings(field: str, value: object, max_items: int, max_bytes: int) -> tuple[str, ...]:
    """A list of up to ``max_items`` non-empty strings; a single ``str`` is taken as a list."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or len(value) > max_items:
        raise InvalidRequest(field, value, f"a list of at most {max_items} strings")
    return tuple(text(f"{field}[{i}]", item, max_bytes) for i, item in enumerate(value))


def token_ids(field: str, value: object, max_items: int, *, empty_ok: bool) -> tuple[int, ...]:
    """A list of token ids, each an ``int`` in ``[0, 2**31)``."""
    allowed = f"a list of {0 if empty_ok else 1} to {max_items} token ids"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(field, value, allowed)
    if len(value) > max_items or not (value or empty_ok):
        raise InvalidRequest(field, value, allowed)
    # In C for the 262,144 that may be; only where one is wrong are they looked at one by one.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID):
        return tuple(
            integer(f"{field}[{i}]", item, 0, MAX_TOKEN_ID) for i, item in enumerate(value)
        )
    return tuple(value)


def unknown(field: str, value: object, known: Iterable[str]) -> InvalidRequest:
    """What to raise for a field that does not exist: it names those that do, and the nearest."""
    names = sorted(known)
    close = difflib.get_close_matches(field[:64], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequest(field, value, f"one of the fields {', '.join(names)}{hint}")
