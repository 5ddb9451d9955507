"""The part of a request that says what form its output has: schema, regex, grammar or choices.

What can be told without the library that reads them is told here, so at the client: sizes, and
that a schema is JSON. Whether it is a schema, and the others are what they should be, a worker
tells before it computes anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..errors import InvalidRequest
from . import field_checks as check
from .parsing import MAX_SCHEMA_DEPTH, parse_json

__all__ = ["CONSTRAINTS", "choices", "exclusive", "grammar", "json_schema", "regex"]

CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
"""The fields, of which a request has at most one."""

MAX_SCHEMA_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 13
MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 1024
MAX_CHOICES_BYTES = 1 << 16


def json_schema(value: object) -> str:
    """A schema as JSON text; the order of properties is that of the output, so it is kept."""
    allowed = f"a JSON Schema: an object, or its JSON text, of at most {MAX_SCHEMA_BYTES} bytes"
    if isinstance(value, Mapping):
        try:
            value = json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_mapping
            )
        except (TypeError, ValueError, RecursionError, MemoryError):
            raise InvalidRequest("json_schema", value, allowed) from None
    text = check.text("json_schema", value, MAX_SCHEMA_BYTES)
    read = parse_json("json_schema", text, allowed, max_depth=MAX_SCHEMA_DEPTH)
    if not isinstance(read, dict):
        raise InvalidRequest("json_schema", text, allowed)
    return text


def _mapping(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def regex(value: object) -> str:
    """A regular expression for the whole output."""
    return check.text("regex", value, MAX_REGEX_BYTES)


def grammar(value: object) -> str:
    """A context-free grammar in Lark's notation."""
    return check.text("grammar", value, MAX_GRAMMAR_BYTES)


def choices(value: object) -> tuple[str, ...]:
    """Texts of which the output is one, each once."""
    texts = check.strings("choice", value, MAX_CHOICES, MAX_CHOICE_BYTES)
    if len(set(texts)) != len(texts):
        raise InvalidRequest("choice", value, "each text once")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_CHOICES_BYTES:
        allowed = f"texts of at most {MAX_CHOICES_BYTES} bytes in all; these have {size}"
        raise InvalidRequest("choice", value, allowed)
    return texts


def exclusive(values: Mapping[str, object]) -> str | None:
    """The one of :data:`CONSTRAINTS` that is given, None without any.

    Raises:
        InvalidRequest: there are several.
    """
    given = [name for name in CONSTRAINTS if values[name]]
    if len(given) > 1:
        allowed = f"at most one of {', '.join(CONSTRAINTS)}; {given[0]} is given, too"
        raise InvalidRequest(given[1], values[given[1]], allowed)
    return given[0] if given else None
