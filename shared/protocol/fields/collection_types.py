"""Types of request fields that hold several values: texts, token ids, biases, a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequest
from ...quoting import quote
from ..parsing import MAX_SCHEMA_DEPTH, parse_json
from .field_types import FieldType, Integer, Number, Text

__all__ = ["Biases", "JsonSchema", "Texts", "TokenIds"]

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class JsonSchema(FieldType):
    """A JSON Schema: a mapping, or JSON text of one. Its normal form is text.

    The order of properties is that of the output, so it is kept. Whether it is a schema that can be
    compiled, only a worker can tell.
    """

    max_bytes: int
    wire = "string or map"
    text = "JSON object"

    def _range(self) -> str:
        return f"JSON text of an object, up to {self.max_bytes:,} bytes"

    def check(self, field: str, value: object) -> str:
        """Return the JSON text."""
        allowed = f"a JSON Schema: an object, or its JSON text, of at most {self.max_bytes} bytes"
        if isinstance(value, Mapping):
            try:
                value = json.dumps(
                    value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_dict
                )
            except (TypeError, ValueError, RecursionError):
                raise InvalidRequest(field, value, allowed) from None
        text = Text(self.max_bytes).check(field, value)
        if not isinstance(parse_json(field, text, allowed, max_depth=MAX_SCHEMA_DEPTH), dict):
            raise InvalidRequest(field, text, allowed)
        return text


def _dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


@dataclass(frozen=True, slots=True)
class Texts(FieldType):
    """Up to ``max_items`` non-empty strings as a tuple; a single ``str`` is taken as one of them.

    Attributes:
        max_items: most strings.
        max_bytes: most bytes of one in UTF-8.
        max_total_bytes: most bytes of all; None for no bound of their own.
        distinct: whether each may be given once only.
    """

    max_items: int
    max_bytes: int
    max_total_bytes: int | None = None
    distinct: bool = False
    wire = "list of strings"
    text = "text, the field once for each"
    repeated = True

    def _range(self) -> str:
        total = f", {self.max_total_bytes:,} in all" if self.max_total_bytes else ""
        return (
            f"up to {self.max_items:,} of 1 to {self.max_bytes:,} bytes{total}"
            f"{', each once' if self.distinct else ''}"
        )

    def check(self, field: str, value: object) -> tuple[str, ...]:
        """Return the strings as a tuple."""
        if isinstance(value, str):
            value = (value,)
        if (
            not isinstance(value, Sequence)
            or isinstance(value, bytes)
            or len(value) > self.max_items
        ):
            raise InvalidRequest(field, value, f"a list of at most {self.max_items} strings")
        kind = Text(self.max_bytes)
        texts = tuple(kind.check(f"{field}[{i}]", item) for i, item in enumerate(value))
        if self.distinct and len(set(texts)) != len(texts):
            raise InvalidRequest(field, value, "each text once")
        if self.max_total_bytes:
            size = sum(len(text.encode()) for text in texts)
            if size > self.max_total_bytes:
                allowed = f"texts of at most {self.max_total_bytes} bytes in all; these have {size}"
                raise InvalidRequest(field, value, allowed)
        return texts


@dataclass(frozen=True, slots=True)
class TokenIds(FieldType):
    """``min_items`` to ``max_items`` token ids, each an ``int`` in ``[0, 2**31)``, as a tuple."""

    max_items: int
    min_items: int = 0
    wire = "list of integers"
    text = "JSON array of integers"

    def _range(self) -> str:
        least = f"{self.min_items} to" if self.min_items else "up to"
        return f"{least} {self.max_items:,} token ids"

    def check(self, field: str, value: object) -> tuple[int, ...]:
        """Return the ids as a tuple."""
        if (
            not isinstance(value, Sequence)
            or isinstance(value, str | bytes)
            or not self.min_items <= len(value) <= self.max_items
        ):
            allowed = f"a list of {self.min_items} to {self.max_items} token ids"
            raise InvalidRequest(field, value, allowed)
        # In C for the 262,144 there may be; only where one is wrong are they looked at in turn.
        if value and (
            set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID
        ):
            kind = Integer(0, MAX_TOKEN_ID)
            return tuple(kind.check(f"{field}[{i}]", item) for i, item in enumerate(value))
        return tuple(value)

    def read(self, field: str, text: str) -> list[Any]:
        """Read a JSON array."""
        ids = parse_json(field, text, f"a {self.text}")
        if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
            raise InvalidRequest(field, text, f"a {self.text}")
        return ids


@dataclass(frozen=True, slots=True)
class Biases(FieldType):
    """A map of up to ``max_items`` token ids, also as decimal text, to numbers up to ``bound``."""

    max_items: int
    bound: float
    wire = "map of token ids, as decimal strings, to numbers"
    text = 'JSON object such as `{"42":-1.5}`'

    def _range(self) -> str:
        return f"up to {self.max_items}, from {-self.bound:g} to {self.bound:g}"

    def check(self, field: str, value: object) -> dict[int, float] | None:
        """Return the map by ascending id, so that equal maps have equal packed forms."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or len(value) > self.max_items:
            bounds = f"numbers from {-self.bound:g} to {self.bound:g}"
            allowed = f"a map of at most {self.max_items} token ids to {bounds}"
            raise InvalidRequest(field, value, allowed)
        id_type, bias_type = Integer(0, MAX_TOKEN_ID), Number(-self.bound, self.bound)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            where = f"{field}[{quote(key)}]"
            decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
            token_id = id_type.check(where, int(key) if decimal else key)
            if token_id in biases:
                raise InvalidRequest(where, key, "each token id once")
            biases[token_id] = bias_type.check(where, bias)
        return dict(sorted(biases.items())) or None

    def read(self, field: str, text: str) -> dict[str, Any]:
        """Read a JSON object."""
        allowed = 'a JSON object such as {"42":-1.5}'
        biases = parse_json(field, text, allowed)
        if not isinstance(biases, dict):
            raise InvalidRequest(field, text, allowed)
        return biases
