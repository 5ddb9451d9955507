"""Reads an entry that a plain Redis client added to an ingress stream as a request.

An entry is a flat list of names and values, all text: what ``XADD`` takes in every language.
docs/ingress.md describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import InvalidRequest
from ..quoting import one_line
from .events import MAX_MESSAGE_CHARS
from .fields.collection_types import TokenIds
from .parsing import parse_json
from .request import (
    MAX_PAYLOAD_BYTES,
    MAX_PROMPT_TOKENS,
    REQUEST_OPTIONS,
    Request,
    check_id,
    unknown_field,
)
from .states import Answer, Reason

__all__ = ["Admission", "Entry", "Refusal", "read_entry"]

_PROMPTS = ("prompt", "prompt_ids", "messages", "payload")
_REPEATED = tuple(item.name for item in REQUEST_OPTIONS if item.type.repeated)
"""Fields that may occur several times, or once with all values as ``<name>_json``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an ingress stream.

    Attributes:
        tenant: the tenant that owns the stream; None for the stream that trusted clients share.
        name: the entry's id in its stream, such as ``1700000000000-0``.
        fields: names and values in turn. A name may occur more than once.
    """

    tenant: str | None
    name: str
    fields: Sequence[bytes]

    @property
    def own_id(self) -> str:
        """The id of an entry that brings none; no other request can have it."""
        return self.name if self.tenant is None else f"{self.tenant}.{self.name}"


@dataclass(frozen=True, slots=True)
class Admission:
    """An entry that holds a valid request.

    Attributes:
        request: the request.
        payload: its packed form.
    """

    request: Request
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that is refused.

    Attributes:
        id: the request id under which the refusal is published.
        answer: the form of the answer.
        reason: why.
        message: the reason in words, for a person.
    """

    id: str
    answer: Answer
    reason: Reason
    message: str


def read_entry(entry: Entry) -> Admission | Refusal:
    """Return the request in an entry, or its refusal; raises nothing, whatever the entry holds."""
    try:
        request = Request.build(**_request_fields(entry))
        return Admission(request, request.pack())
    except InvalidRequest as error:
        return refused(entry, Reason.INVALID, str(error))


def refused(entry: Entry, reason: Reason, message: str) -> Refusal:
    """Return the refusal of an entry, in the form and under the id that it asks for, if valid."""
    pairs = dict(zip(entry.fields[0::2], entry.fields[1::2], strict=True))
    answer = Answer.JSON if pairs.get(b"answer") == b"json" else Answer.MSGPACK
    try:
        id = _own(entry, check_id(_text("id", pairs.get(b"id", b""))))
    except InvalidRequest:
        id = entry.own_id
    return Refusal(id, answer, reason, one_line(message, MAX_MESSAGE_CHARS))


def _request_fields(entry: Entry) -> dict[str, Any]:
    """Return the entry's fields as :meth:`Request.build` takes them."""
    size = sum(map(len, entry.fields))
    if size > MAX_PAYLOAD_BYTES:
        allowed = f"names and values of at most {MAX_PAYLOAD_BYTES} bytes in all"
        raise InvalidRequest("entry", f"{size} bytes", allowed)
    values = _read_values(entry.fields)
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise InvalidRequest("prompt", given or None, f"exactly one of {', '.join(_PROMPTS)}")
    if given[0] != "payload":
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
            raise unknown_field(name, text, _READERS)
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


def _read_text(name: str, text: str) -> str:
    del name
    return text


def _read_list(name: str, text: str) -> list[Any]:
    items = parse_json(name, text, "a JSON array")
    if not isinstance(items, list):
        raise InvalidRequest(name, text, "a JSON array")
    return items


def _read_messages(name: str, text: str) -> list[Any]:
    allowed = 'a JSON array such as [{"role":"user","content":"Hello"}]'
    messages = parse_json(name, text, allowed)
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequest(name, text, allowed)
    return messages


def _read_json(name: str, text: str) -> Any:
    return parse_json(name, text, "a JSON value")


_READERS: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        "id": _read_text,
        "prompt": _read_text,
        "prompt_ids": TokenIds(MAX_PROMPT_TOKENS, min_items=1).read,
        "messages": _read_messages,
        "payload": _read_json,
        **{item.name: item.type.read for item in REQUEST_OPTIONS},
        **{f"{name}_json": _read_list for name in _REPEATED},
    }
)
