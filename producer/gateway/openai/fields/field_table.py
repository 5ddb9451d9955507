"""What an endpoint's fields are: one declaration each, for validation, OpenAPI and documentation.

A field is served, refused by name, or accepted without effect. Nothing is ignored in silence: a
field that is not declared is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.fields.field_types import FieldType
from penstock.shared.protocol.request import REQUEST_OPTIONS

from ...api_errors import ApiError, error_of, invalid

__all__ = ["ApiField", "FieldTable", "Kind", "Shape", "no_effect", "option", "refused", "served"]


class Kind(StrEnum):
    """What becomes of a field."""

    SERVED = "served"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


class Shape(FieldType):
    """A value that is checked where it is used; only its outermost JSON type is checked here."""

    def __init__(self, wire: str, types: tuple[type, ...], schema: Mapping[str, Any]) -> None:
        self.wire = wire
        self._types = types
        self.schema = schema

    def _range(self) -> str:
        return self.wire

    def check(self, field: str, value: object) -> Any:
        """Return the value as it is."""
        if isinstance(value, self._types) and not (
            isinstance(value, bool) and bool not in self._types
        ):
            return value
        raise InvalidRequest(field, value, self.wire)


@dataclass(frozen=True, slots=True)
class ApiField:
    """A field of a body.

    Attributes:
        name: its name in the API.
        kind: what becomes of it.
        effect: what it does, or why it is refused, for the documentation.
        type: what it may be; None for a refused field.
        target: the field of the queue's request that takes its value, as it is or through
            ``convert``. Empty where the endpoint reads it.
        convert: makes the queue's value of the API's.
        neutral: values of a refused field that ask for nothing, and are accepted.
    """

    name: str
    kind: Kind
    effect: str
    type: FieldType | None = None
    target: str = ""
    convert: Callable[[Any], Any] | None = None
    neutral: tuple[object, ...] = ()


_OPTIONS = {item.name: item for item in REQUEST_OPTIONS}


def option(
    name: str, target: str = "", convert: Callable[[Any], Any] | None = None, effect: str = ""
) -> ApiField:
    """A field that is an option of the queue's request, by that name or another one."""
    item = _OPTIONS[target or name]
    return ApiField(name, Kind.SERVED, effect or item.help, item.type, item.name, convert)


def served(name: str, type: FieldType, effect: str) -> ApiField:
    """A field that the endpoint reads itself."""
    return ApiField(name, Kind.SERVED, effect, type)


def refused(name: str, why: str, *neutral: object) -> ApiField:
    """A field that is refused, unless its value asks for nothing."""
    return ApiField(name, Kind.REFUSED, why, neutral=neutral)


def no_effect(name: str, type: FieldType, why: str) -> ApiField:
    """A field that is checked and has no effect."""
    return ApiField(name, Kind.NO_EFFECT, why, type)


_NAMES = {
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
    "choice": "structured_outputs.choice",
    "prompt_logprobs": "logprobs",  # with `echo`
}
"""What fields of the queue's request are called in an error. Forms of the output have several names
in the API."""


class FieldTable:
    """The fields of an endpoint.

    Args:
        fields: the declarations.
        prompt: which field holds the prompt.
        names: what fields of the queue's request are called that no declaration sets.
        required: for OpenAPI, which a body must have; empty: its model and its prompt.
        either: and of these exactly one.
    """

    def __init__(
        self,
        fields: Iterable[ApiField],
        prompt: str,
        names: Mapping[str, str] = _NAMES,
        *,
        required: tuple[str, ...] = (),
        either: tuple[str, ...] = (),
    ) -> None:
        self.fields = {field.name: field for field in fields}
        self.prompt = prompt
        self.required = required or ("model", prompt)
        self.either = either
        self.names = {field.target: field.name for field in self.fields.values() if field.target}
        self.names["prompt"] = self.names["payload"] = prompt
        self.names |= names

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check a body.

        Returns:
            The values that the endpoint reads, and those of the queue's request, both by name.
            A field that is null counts as not given.

        Raises:
            ApiError: 400, with the name of the field at fault.
        """
        own: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, value in body.items():
            field = self.fields.get(name)
            if field is None:
                raise self._unknown(name)
            if value is None:
                continue
            if field.kind is Kind.REFUSED:
                if not any(
                    value == other and type(value) is type(other) for other in field.neutral
                ):
                    raise invalid(name, f"{name}: {field.effect}", "unsupported_parameter")
                continue
            if field.convert is not None:
                value = field.convert(value)
            elif field.type is not None:
                value = self._checked(field, value)
            if field.target:
                values[field.target] = value
            elif field.kind is Kind.SERVED:
                own[name] = value
        return own, values

    def error(self, error: InvalidRequest) -> ApiError:
        """The error of a value that the queue's request refuses, in the API's names."""
        return error_of(error, self.names)

    def _checked(self, field: ApiField, value: object) -> Any:
        assert field.type is not None
        try:
            return field.type.check(field.name, value)
        except InvalidRequest as error:
            raise error_of(error) from None

    def _unknown(self, name: str) -> ApiError:
        close = get_close_matches(name[:64], self.fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        shown = name[:64].encode("ascii", "backslashreplace").decode()
        return invalid(shown, f"there is no parameter {shown!r}{hint}", "unknown_parameter")
