"""What a request field may be: its types, and how an option is declared.

A type says which values a field accepts, how it is read from text, and how it is described. A check
returns the value in its normal form or raises; none clamps.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter, is_not
from typing import Any

from ...errors import InvalidRequest

__all__ = [
    "FieldType",
    "Flag",
    "FlagOrWord",
    "Integer",
    "Name",
    "Number",
    "Option",
    "OptionTable",
    "Text",
    "Word",
    "option",
]

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")


class FieldType(ABC):
    """What values a field may have.

    Attributes:
        wire: the type in msgpack and JSON, for documentation.
        text: the form as text, at the ingress and on the command line, for documentation.
        repeated: a client without lists gives the field once for each item.
    """

    wire = "string"
    text = "text"
    repeated = False

    @property
    def range(self) -> str:
        """What is accepted, in Markdown."""
        return self._range()

    @abstractmethod
    def _range(self) -> str: ...

    @abstractmethod
    def check(self, field: str, value: object) -> Any:
        """Return the normal form of a value; raise :class:`InvalidRequest` if it is none."""

    def read(self, field: str, text: str) -> Any:
        """Read a value from text, for :meth:`check`; of a repeated field, one item."""
        del field
        return text


@dataclass(frozen=True, slots=True)
class Integer(FieldType):
    """An ``int`` from ``low`` to ``high``; not a ``bool``."""

    low: int
    high: int
    wire = text = "integer"

    def _range(self) -> str:
        return f"{self.low:,} to {self.high:,}"

    def check(self, field: str, value: object) -> int:
        """Return the value."""
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        ):
            return value
        raise InvalidRequest(field, value, f"an integer from {self.low} to {self.high}")

    def read(self, field: str, text: str) -> int:
        """Read decimal digits."""
        if not _INTEGER.fullmatch(text):
            raise InvalidRequest(field, text, "an integer in decimal digits")
        return int(text)


@dataclass(frozen=True, slots=True)
class Number(FieldType):
    """An ``int`` or ``float`` from ``low`` to ``high``, one of which may be excluded."""

    low: float
    high: float
    above_low: bool = False
    below_high: bool = False
    wire = text = "number"

    def _range(self) -> str:
        above, below = "above " * self.above_low, "below " * self.below_high
        return f"{above}{self.low:g} to {below}{self.high:g}"

    def check(self, field: str, value: object) -> float:
        """Return the value as a ``float``."""
        # Compared before it is converted: no float holds 10**400. NaN compares false.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
            and not (self.above_low and value == self.low)
            and not (self.below_high and value == self.high)
        ):
            return float(value)
        raise InvalidRequest(
            field, value, f"a number {'' if self.above_low else 'from '}{self.range}"
        )

    def read(self, field: str, text: str) -> float:
        """Read a decimal number."""
        if not _NUMBER.fullmatch(text):
            raise InvalidRequest(field, text, "a number such as 0.7")
        return float(text)


@dataclass(frozen=True, slots=True)
class Flag(FieldType):
    """A ``bool``; 0 and 1 are not taken for one."""

    wire = "boolean"
    text = "`true` or `false`"

    def _range(self) -> str:
        return "true, false"

    def check(self, field: str, value: object) -> bool:
        """Return the value."""
        if isinstance(value, bool):
            return value
        raise InvalidRequest(field, value, "true or false")

    def read(self, field: str, text: str) -> bool:
        """Read ``true`` or ``false``."""
        if text not in ("true", "false"):
            raise InvalidRequest(field, text, "true or false")
        return text == "true"


@dataclass(frozen=True, slots=True)
class FlagOrWord(FieldType):
    """A ``bool``, or one word beside the two."""

    word: str
    wire = "boolean or string"

    def _range(self) -> str:
        return f"true, false, `{self.word}`"

    def check(self, field: str, value: object) -> bool | str:
        """Return the value."""
        if isinstance(value, bool) or (isinstance(value, str) and value == self.word):
            return value
        raise InvalidRequest(field, value, f"true, false or {self.word}")

    def read(self, field: str, text: str) -> bool | str:
        """Read ``true``, ``false`` or the word."""
        del field
        return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True, slots=True)
class Word(FieldType):
    """A member of an enumeration, which may be given by its value."""

    members: type[StrEnum]

    def _range(self) -> str:
        return ", ".join(f"`{member.value}`" for member in self.members)

    def check(self, field: str, value: object) -> StrEnum:
        """Return the member."""
        # Not by calling the enumeration: its error holds the whole value, however long or deep.
        for member in self.members:
            if isinstance(value, str) and value == member.value:
                return member
        allowed = " or ".join(member.value for member in self.members)
        raise InvalidRequest(field, value, allowed)


@dataclass(frozen=True, slots=True)
class Name(FieldType):
    """A ``str`` that a pattern matches as a whole; ``allowed`` says the same in words."""

    pattern: re.Pattern[str]
    allowed: str

    def _range(self) -> str:
        return self.allowed

    def check(self, field: str, value: object) -> str:
        """Return the value."""
        if isinstance(value, str) and self.pattern.fullmatch(value):
            return value
        raise InvalidRequest(field, value, self.allowed)


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """A ``str`` of 1 to ``max_bytes`` bytes in UTF-8; empty, too, with ``empty_ok``."""

    max_bytes: int
    empty_ok: bool = False

    def _range(self) -> str:
        return f"{'0' if self.empty_ok else '1'} to {self.max_bytes:,} bytes"

    def check(self, field: str, value: object) -> str:
        """Return the value."""
        least = "" if self.empty_ok else "non-empty "
        allowed = f"{least}text of at most {self.max_bytes} bytes in UTF-8"
        if not isinstance(value, str) or not (value or self.empty_ok):
            raise InvalidRequest(field, value, allowed)
        try:
            size = len(value) if value.isascii() else len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidRequest(field, value, f"{allowed}, without lone surrogates") from None
        if size > self.max_bytes:
            raise InvalidRequest(field, value, f"{allowed}; this one has {size}")
        return value


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one request field that may be left out.

    It alone gives the field's validation, its ingress reader, its flag on the command line and its
    row in docs/options.md.

    Attributes:
        name: the field's name.
        default: its value where it is not given.
        type: what it may be.
        help: one sentence for ``--help`` and the reference.
        unset: what a default of None means, in words; empty for other defaults.
        beam_search: whether it may stand beside a beam search.
    """

    name: str
    default: Any
    type: FieldType
    help: str
    unset: str
    beam_search: bool


def option(
    default: object,
    type: FieldType,
    help: str,
    *,
    unset: str = "",
    beam_search: bool = True,
    hash: bool | None = None,
) -> Any:
    """Declare a request option as a field of a dataclass; for the arguments see :class:`Option`."""
    facts = {"type": type, "help": help, "unset": unset, "beam_search": beam_search}
    return dataclasses.field(default=default, hash=hash, metadata=facts)


class OptionTable:
    """The options that a frozen dataclass declares, in order.

    Attributes:
        options: their declarations.
        defaults: their default values by name.
    """

    def __init__(self, owner: type[Any]) -> None:
        self.options = tuple(
            Option(item.name, item.default, **item.metadata)
            for item in dataclasses.fields(owner)
            if item.metadata
        )
        self.defaults = {item.name: item.default for item in self.options}
        self._values = attrgetter(*self.defaults)

    def check(self, owner: object) -> None:
        """Replace the options of a new object by their normal form.

        Raises:
            InvalidRequest: one is of the wrong type or out of range.
        """
        values = self._values(owner)
        if not any(map(is_not, values, self.defaults.values())):  # in C: most requests give few
            return
        for item, value in zip(self.options, values, strict=True):
            if value is not item.default:
                object.__setattr__(owner, item.name, item.type.check(item.name, value))
