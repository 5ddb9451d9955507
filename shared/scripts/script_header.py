"""The header of a Lua script: its keys and arguments in order, and the role that runs it.

The header is the one place that lists them. The typed calls take arguments by name, and get their
order and the keys' names from here. So do the doctor and the tests of the protocol page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..redis.resp import Argument

__all__ = ["ArgumentSpec", "Header", "KeySpec", "Value", "Values"]

Value: TypeAlias = Argument | Sequence[Argument]
"""An argument; a sequence of them for a repeated one."""

Values: TypeAlias = Mapping[str, Value]
"""Arguments by name."""

_SECTION = re.compile(r"^-- (KEYS|ARGV)\n((?:--   .*\n)*)", re.MULTILINE)
_LINE = re.compile(r"^--   (\S+) +(\S+) *(.*)$")
_ROLE = re.compile(r"^-- For (\w+); (runs|is refused) at maxmemory\.", re.MULTILINE)
_COMMAND = re.compile(r"""(?:redis\.p?call\(|attempt\((?:nil|also|'[^']*'),)\s*'([A-Z]+)'""")
_PLACEHOLDER = re.compile(r"<(\w+)>")


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One line of KEYS.

    Attributes:
        template: the name after the shard's prefix, with arguments in angle brackets.
        kind: the Redis type.
        repeated: there is one for each value of its argument.
    """

    template: str
    kind: str
    repeated: bool

    def names(self, prefix: str, values: Values) -> Iterator[str]:
        """The key's names for these arguments."""
        if not self.repeated:
            yield prefix + _PLACEHOLDER.sub(lambda found: str(values[found[1]]), self.template)
            return
        (argument,) = _PLACEHOLDER.findall(self.template)
        for value in _several(values[argument]):
            yield prefix + self.template.replace(f"<{argument}>", str(value))


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One line of ARGV.

    Attributes:
        name: the argument's name.
        kind: ``whole`` (an integer from 0 to 2^40), ``name`` (a text that is not empty), ``text``
            or ``entry`` (a stream entry's id). Or the allowed texts with ``|`` between them, of
            which one may be ``whole``.
        repeated: the call ends with any number of them.
        comment: what it is.
    """

    name: str
    kind: str
    repeated: bool
    comment: str


@dataclass(frozen=True, slots=True)
class Header:
    """What a script's header says.

    Attributes:
        role: that runs it: ``producer``, ``worker``, ``operator`` or ``doctor``.
        runs_at_maxmemory: whether it runs when Redis has no memory left.
        keys: its declared keys, in order.
        arguments: its arguments, in order.
        commands: every Redis command that it or its libraries may run, in upper case.
    """

    role: str
    runs_at_maxmemory: bool
    keys: tuple[KeySpec, ...]
    arguments: tuple[ArgumentSpec, ...]
    commands: frozenset[str]

    @classmethod
    def parse(cls, source: str) -> Header:
        """Read the header of a script whose libraries are already in place.

        Raises:
            ValueError: the header lacks a part.
        """
        sections = dict(_SECTION.findall(source))
        role = _ROLE.search(source)
        if role is None or sections.keys() != {"KEYS", "ARGV"}:
            raise ValueError("a script's header has the parts `For ROLE; ...`, KEYS and ARGV")
        return cls(
            role=role[1],
            runs_at_maxmemory=role[2] == "runs",
            keys=tuple(
                KeySpec(name.removesuffix("..."), kind, name.endswith("..."))
                for name, kind, _ in _lines(sections["KEYS"])
            ),
            arguments=tuple(
                ArgumentSpec(name.removesuffix("..."), kind, name.endswith("..."), comment)
                for name, kind, comment in _lines(sections["ARGV"])
            ),
            commands=frozenset(_COMMAND.findall(source)),
        )

    def key_names(self, prefix: str, values: Values) -> list[str]:
        """KEYS of a call; a repeated key whose argument is not among the values is left out."""
        return [
            name
            for key in self.keys
            if not key.repeated or _PLACEHOLDER.findall(key.template)[0] in values
            for name in key.names(prefix, values)
        ]

    def argument_values(self, values: Values) -> list[Argument]:
        """ARGV of a call.

        Raises:
            KeyError: an argument is missing.
        """
        found: list[Argument] = []
        for argument in self.arguments:
            value = values[argument.name]
            found += _several(value) if argument.repeated else _one(value)
        return found


def _one(value: Value) -> Sequence[Argument]:
    assert isinstance(value, str | bytes | int)
    return (value,)


def _several(value: Value) -> Sequence[Argument]:
    assert not isinstance(value, str | bytes | int)
    return value


def _lines(section: str) -> list[tuple[str, str, str]]:
    # A line that is indented further continues the comment before it.
    found = [line for line in section.splitlines() if not line.startswith("--    ")]
    matches = [_LINE.match(line) for line in found]
    return [(match[1], match[2], match[3]) for match in matches if match]
