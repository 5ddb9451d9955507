"""What a plain Redis client adds to an intake stream, read as a request.

An entry is a flat list of names and values, all text: what ``XADD`` takes in every language.
docs/plain-door.md is the table of its fields for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import InvalidRequest
from ..quoting import one_line
from . import field_checks as check
from .events import MAX_MESSAGE_CHARS
from .parsing import parse_json
from .request import MAX_PAYLOAD_BYTES, Request, check_id
from .states import Answer, Reason

__all__ = ["Admission", "Entry", "Refusal", "read_entry"]

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")
_PROMPTS = ("prompt", "prompt_ids", "messages")
_REPEATED = ("stop", "choice")
"""Fields that may stand there several times, or once with all values as `<name>_json`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an intake stream.

    Attributes:
        tenant: whose stream it is; None for the one that all trusted clients share.
        name: the entry's id in its stream, such as ``1700000000000-0``.
        fields: names and values in turn. A name may occur more than once.
    """

    tenant: str | None
    name: str
    fields: Sequence[bytes]

    @property
    def own_id(self) -> str:
        """The request id that nobody else may have: of an entry that brings none."""
        return self.name if self.tenant is None else f"{self.tenant}.{self.name}"


@dataclass(frozen=True, slots=True)
class Admission:
    """An entry that is a request.

    Attributes:
        request: the request.
        payload: its packed form.
    """

    request: Request
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that is none.

    Attributes:
        id: where it is to be answered.
        answer: in which form.
        reason: why.
        message: the same for a person.
    """

    id: str
    answer: Answer
    reason: Reason
    message: str


def read_entry(entry: Entry) -> Admission | Refusal:
    """The request that an entry is, or why it is none. Raises nothing, whatever the entry holds."""
    try:
        request = Request.build(**_request_fields(entry))
        return Admission(request, request.pack())
    except InvalidRequest as error:
        return refused(entry, Reason.INVALID, str(error))


def refused(entry: Entry, reason: Reason, message: str) -> Refusal:
    """The refusal of an entry, to be answered as far as it can be told as it asks for."""
    pairs = dict(zip(entry.fields[0::2], entry.fields[1::2], strict=True))
    answer = Answer.JSON if pairs.get(b"answer") == b"json" else Answer.MSGPACK
    try:
        id = _own(entry, check_id(_text("id", pairs.get(b"id", b""))))
    except InvalidRequest:
        id = entry.own_id
    return Refusal(id, answer, reason, one_line(message, MAX_MESSAGE_CHARS))


def _request_fields(entry: Entry) -> dict[str, Any]:
    """The entry's fields as :meth:`Request.build` takes them."""
    size = sum(map(len, entry.fields))
    if size > MAX_PAYLOAD_BYTES:
        allowed = f"names and values of at most {MAX_PAYLOAD_BYTES} bytes in all"
        raise InvalidRequest("entry", f"{size} bytes", allowed)
    values = _read_values(entry.fields)
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise InvalidRequest("prompt", given or None, f"exactly one of {', '.join(_PROMPTS)}")
    values["prompt"] = values.pop(given[0])
    for name in _REPEATED:
        if (array := f"{name}_json") in values:
            if name in values:
                raise InvalidRequest(array, values[array], f"no field {name} beside it")
            values[name] = values.pop(array)
    values["id"] = _own(entry, values["id"]) if "id" in values else entry.own_id
    if entry.tenant is not None and values.setdefault("tenant", entry.tenant) != entry.tenant:
        allowed = f"{entry.tenant}, whose stream this is, or no such field"
        raise InvalidRequest("tenant", values["tenant"], allowed)
    return values


def _own(entry: Entry, id: str) -> str:
    if entry.tenant is not None and not id.startswith(f"{entry.tenant}."):
        raise InvalidRequest("id", id, f"an id that begins with {entry.tenant}.")
    return id


def _read_values(fields: Sequence[bytes]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for raw_name, raw in zip(fields[0::2], fields[1::2], strict=True):
        name = _text("field name", raw_name)
        text = _text(name, raw)
        read = _READERS.get(name)
        if read is None:
            raise check.unknown(name, text, _READERS)
        value = read(name, text)
        if name in _REPEATED:
            values[name] = (*values.get(name, ()), value)
        elif name in values:
            raise InvalidRequest(name, value, "this field once")
        else:
            values[name] = value
    return values


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(name, raw, "text in UTF-8") from None


def _as_text(name: str, value: str) -> str:
    del name
    return value


def _as_integer(name: str, value: str) -> int:
    if not _INTEGER.fullmatch(value):
        raise InvalidRequest(name, value, "an integer in decimal digits")
    return int(value)


def _as_number(name: str, value: str) -> float:
    if not _NUMBER.fullmatch(value):
        raise InvalidRequest(name, value, "a number such as 0.7")
    return float(value)


def _as_flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidRequest(name, value, "true or false")
    return value == "true"


def _as_early_stopping(name: str, value: str) -> bool | str:
    if value not in ("true", "false", "never"):
        raise InvalidRequest(name, value, "true, false or never")
    return value if value == "never" else value == "true"


def _as_list(name: str, value: str, of: type = object) -> list[Any]:
    allowed = f"a JSON array{_ARRAYS.get(of, '')}"
    read = parse_json(name, value, allowed)
    if not isinstance(read, list) or not all(isinstance(item, of) for item in read):
        raise InvalidRequest(name, value, allowed)
    return read


def _as_messages(name: str, value: str) -> list[Any]:
    return _as_list(name, value, dict)


def _as_ids(name: str, value: str) -> list[Any]:
    return _as_list(name, value, int)


def _as_map(name: str, value: str) -> dict[str, Any]:
    allowed = 'a JSON object such as {"42":-1.5}'
    read = parse_json(name, value, allowed)
    if not isinstance(read, dict):
        raise InvalidRequest(name, value, allowed)
    return read


_ARRAYS = MappingProxyType(
    {dict: ' such as [{"role":"user","content":"Hello"}]', int: " of integers"}
)

_READERS: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        "accept_threshold": _as_number,
        "allowed_token_ids": _as_ids,
        "answer": _as_text,
        "banned_token_ids": _as_ids,
        "beam_width": _as_integer,
        "best_of": _as_integer,
        "choice": _as_text,
        "choice_json": _as_list,
        "deadline_ms": _as_integer,
        "early_stopping": _as_early_stopping,
        "frequency_penalty": _as_number,
        "grammar": _as_text,
        "id": _as_text,
        "ignore_eos": _as_flag,
        "json_schema": _as_text,
        "lane": _as_text,
        "length_penalty": _as_number,
        "logit_bias": _as_map,
        "logprobs": _as_integer,
        "max_queue_ms": _as_integer,
        "max_tokens": _as_integer,
        "messages": _as_messages,
        "min_p": _as_number,
        "min_tokens": _as_integer,
        "n": _as_integer,
        "on_disconnect": _as_text,
        "presence_penalty": _as_number,
        "prompt": _as_text,
        "prompt_ids": _as_ids,
        "prompt_logprobs": _as_integer,
        "regex": _as_text,
        "repetition_penalty": _as_number,
        "seed": _as_integer,
        "speculation": _as_text,
        "stop": _as_text,
        "stop_json": _as_list,
        "stop_token_ids": _as_ids,
        "temperature": _as_number,
        "tenant": _as_text,
        "top_k": _as_integer,
        "top_p": _as_number,
    }
)
