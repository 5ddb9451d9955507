"""Deltas: an answer taken apart into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "CONTENT",
    "REASONING",
    "TOOL_CALL",
    "Delta",
    "ReasoningCount",
    "cut_deltas",
    "moved_deltas",
    "packed_deltas",
    "read_deltas",
]

CONTENT, REASONING, TOOL_CALL = "content", "reasoning", "tool_call"
_KINDS = frozenset({CONTENT, REASONING, TOOL_CALL})


class Delta(NamedTuple):
    """What one token adds to the parsed answer.

    The deltas of an output are a function of its tokens alone, as its text is.

    Attributes:
        kind: ``content``, ``reasoning`` or ``tool_call``.
        text: what is added to the content or the reasoning; of a tool call, a fragment of its
            arguments, which together are JSON text.
        index: which tool call of the output, from 0 on.
        name: the name of the function, with the first fragment of a call; else empty.
        token: the token it came with, as an offset into the tokens of its chunk.
    """

    kind: str
    text: str
    index: int = 0  # type: ignore[assignment]  # a field in place of tuple.index
    name: str = ""
    token: int = 0


class ReasoningCount:
    """How many tokens of one output have brought reasoning.

    Those before each of them count, too, that had no text of their own, such as the mark with
    which reasoning begins. The mark behind reasoning does not.

    Attributes:
        tokens: how many so far.
    """

    __slots__ = ("_stop", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._stop = 0

    def add(self, deltas: Iterable[Delta], start: int = 0) -> None:
        """Take the next deltas, whose tokens are counted from the output's token ``start`` on."""
        for delta in deltas:
            stop = start + delta.token + 1
            if delta.kind == REASONING:
                self.tokens += stop - self._stop
            self._stop = stop


def read_deltas(wire: Any, num_tokens: int) -> tuple[Delta, ...]:
    """Read the deltas of a chunk of ``num_tokens`` tokens from msgpack or JSON.

    Raises:
        TypeError, ValueError, LookupError: the value is malformed.
    """
    if not wire:  # nil or empty: none
        return ()
    deltas = tuple(_delta(row) for row in wire)
    before = 0
    for kind, text, index, name, token in deltas:
        if not (type(text) is type(name) is str and type(index) is type(token) is int):
            raise TypeError("a delta with a field of another type")
        if kind not in _KINDS or index < 0 or not before <= token < num_tokens:
            raise ValueError("a delta of another kind, or of no token")
        before = token
    return deltas


def _delta(row: Any) -> Delta:
    if isinstance(row, Mapping):  # JSON
        return Delta(*(row[name] for name in Delta._fields))
    token, kind, text, index, name = row[:5]
    return Delta(kind, text, index, name, token)


def packed_deltas(deltas: Iterable[Delta]) -> list[tuple[int, str, str, int, str]]:
    """Return deltas as they stand in a msgpack chunk: ``[token, kind, text, index, name]``."""
    return [(delta.token, delta.kind, delta.text, delta.index, delta.name) for delta in deltas]


def moved_deltas(deltas: Iterable[Delta], tokens: int) -> tuple[Delta, ...]:
    """Return deltas of a chunk whose tokens stand behind ``tokens`` others now."""
    return tuple(delta._replace(token=delta.token + tokens) for delta in deltas)


def cut_deltas(deltas: Iterable[Delta], first: int, stop: int) -> tuple[Delta, ...]:
    """Return the deltas of the tokens ``[first, stop)``, which become a chunk of their own."""
    return tuple(
        delta._replace(token=delta.token - first) for delta in deltas if first <= delta.token < stop
    )
