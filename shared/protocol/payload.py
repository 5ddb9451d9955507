"""What goes into and comes out of a model that answers at once: any msgpack value.

A request's ``payload`` and the ``result`` of its one chunk are the only places of the protocol with
msgpack's *bin*: no script looks into them.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgpack

from ..errors import InvalidRequest, ProtocolError
from .parsing import PARSER_ERRORS, parse_msgpack

__all__ = [
    "MAX_RESULT_BYTES",
    "check_payload",
    "json_form",
    "pack_result",
    "packed_size",
    "result_as_json",
    "result_from_json",
    "unpack_result",
]

MAX_RESULT_BYTES = 8 << 20
"""Largest packed result. It is one message on a channel; Redis drops readers of several such."""

_VALUES = "null, true, false, numbers of 64 bits, text, bytes, lists, and maps with text as keys"


def check_payload(field: str, value: object) -> Any:
    """Return a payload in its normal form: what a worker will read.

    Raises:
        InvalidRequest: it is None, no msgpack value, or nested too deeply.
    """
    if value is None:
        raise InvalidRequest(field, value, "a value; null asks for nothing")
    if isinstance(value, bytes | bool):
        return value
    try:
        packed = msgpack.packb(value)
    except PARSER_ERRORS as error:
        raise InvalidRequest(field, value, f"{_VALUES} ({error})") from None
    try:
        # One level is the request's own map.
        return parse_msgpack(field, b"\x91" + packed)[0]
    except ProtocolError as error:
        raise InvalidRequest(field, value, f"{_VALUES}; {error.allowed}") from None


def packed_size(value: object) -> int:
    """Bytes of a payload in its packed form."""
    return len(value) if isinstance(value, bytes) else len(msgpack.packb(value))


def pack_result(value: object) -> bytes:
    """Pack what a model gave for one item; arrays become lists by their ``tolist``.

    Raises:
        ValueError: it is no msgpack value, or larger than :data:`MAX_RESULT_BYTES`.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_as_list)
    except PARSER_ERRORS as error:
        raise ValueError(f"the result cannot be sent ({error}); allowed: {_VALUES}") from None
    if len(packed) > MAX_RESULT_BYTES:
        raise ValueError(f"the result has {len(packed)} bytes; allowed: {MAX_RESULT_BYTES}")
    return packed


def unpack_result(packed: bytes) -> Any:
    """Return the value of a packed result.

    Raises:
        ProtocolError: the bytes are none.
    """
    try:
        return msgpack.unpackb(packed)
    except (msgpack.UnpackException, *PARSER_ERRORS) as error:
        raise ProtocolError("result", packed, f"one msgpack value ({error})") from None


def result_as_json(packed: bytes) -> Any:
    """Return the :func:`json_form` of a packed result."""
    return json_form(unpack_result(packed))


def json_form(value: object) -> Any:
    """Return a payload or result as JSON has it: bytes become text in base64.

    Raises:
        ValueError: it holds NaN or infinity, which JSON has not.
    """
    return json.loads(json.dumps(value, allow_nan=False, default=_as_base64))


def result_from_json(value: object) -> bytes:
    """Pack a result that came as JSON; what was bytes stays text."""
    packed: bytes = msgpack.packb(value)
    return packed


def _as_list(value: object) -> Any:
    """Arrays and their numbers, of numpy, torch and others, as lists and plain numbers."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"it holds a {type(value).__name__}")
    return to_list()


def _as_base64(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise ValueError(f"a {type(value).__name__} has no form in JSON")
