"""A grammar of answers that call tools, derived from how the model writes calls.

It is text in Lark's notation as llguidance reads it, and is compiled as any grammar of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["CallFormat", "UnknownCallFormat", "tool_grammar"]

_NAME_GROUP = re.compile(r"\(\?P<name>(?:[^()\\]|\\.)*\)")
_PLACE = "\0"
_WHITESPACE = {"whitespace_pattern": " ?"}


class UnknownCallFormat(Exception):
    """No grammar can be derived from this template; the message says what is missing."""


class Field(Protocol):
    """What is read of a field of transformers' response template."""

    open_re: Any
    open_literals: list[str] | None
    close_re: Any
    close_literals: list[str] | None
    content: str
    content_args: dict[str, Any]
    transform: Any
    transform_each: bool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes reasoning and calls.

    Attributes:
        calls: the field of calls.
        reasoning: the field of reasoning, if it has one.
        has_begun: whether the prompt has opened the reasoning.
        marks: added tokens of the tokenizer that a grammar names by id, by their text.
    """

    calls: Field
    reasoning: Field | None
    has_begun: bool
    marks: Mapping[str, int]


def tool_grammar(
    format: CallFormat, tools: Sequence[Mapping[str, Any]], *, must_call: bool, parallel: bool
) -> str:
    """Return the grammar of an answer.

    Args:
        format: of the model.
        tools: those that may be called, at least one.
        must_call: whether the answer is calls and nothing but reasoning before them; else text may
            come first, or alone.
        parallel: whether there may be several calls.

    Raises:
        UnknownCallFormat: the template's calls have no form that is known here.
    """
    rules = [_call_rule(format, number, tool) for number, tool in enumerate(tools)]
    calls = "call (GAP call)*" if parallel else "call"
    thought = _thought(format)
    if must_call:
        body = f"GAP {calls}"
    else:
        mark = _open(format.calls, tools[0]["function"]["name"])
        if not any(mark.startswith(name) for name in format.marks):
            raise UnknownCallFormat("its calls begin with no token of their own")
        body = f"TEXT? ({calls})?"
    heads = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join(
        [
            f"start: {thought}{body}",
            f"call: {heads}",
            *rules,
            r"GAP: /[ \n]{0,2}/",
            r"TEXT: /(.|\n)+/",
            "",
        ]
    )


def _thought(format: CallFormat) -> str:
    """What may come before all else."""
    field = format.reasoning
    if field is None:
        return ""
    end = _literal(_one("close", field.close_re, field.close_literals), format.marks)
    if not end.startswith("<["):
        raise UnknownCallFormat("its reasoning ends with no token of its own")
    if format.has_begun:
        return f"TEXT? {end} "
    begin = _literal(_one("open", field.open_re, field.open_literals), format.marks)
    return f"({begin} TEXT? {end})? "


def _call_rule(format: CallFormat, number: int, tool: Mapping[str, Any]) -> str:
    function, field = tool["function"], format.calls
    name = function["name"]
    schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": _WHITESPACE}
    arguments = f"%json {json.dumps(schema, ensure_ascii=False)}"
    begin, end = _open(field, name), _one("close", field.close_re, field.close_literals)
    keys = _body_keys(field)
    if keys is None:
        before, after = begin, end
    else:
        (of_name, of_arguments), shown = keys, json.dumps(name)
        before = f'{begin}\n{{"{of_name}": {shown}, "{of_arguments}": '
        after = f"}}\n{end}"
    parts = _literal(before, format.marks), f"args_{number}", _literal(after, format.marks)
    return f"call_{number}: {' '.join(parts)}\nargs_{number}: {arguments}"


def _body_keys(field: Field) -> tuple[str, str] | None:
    """Keys of name and arguments in a call's JSON; None if it is the arguments alone."""
    if field.content != "json" or field.content_args or field.transform_each:
        raise UnknownCallFormat("its calls are not plain JSON")
    function = (field.transform or {}).get("function")
    if function == "{content}":
        return "name", "arguments"
    if isinstance(function, dict):
        name, arguments = function.get("name"), function.get("arguments")
        if (name, arguments) == ("{name}", "{content}"):
            return None
        found = [re.fullmatch(r"\{content\.(\w+)\}", str(item)) for item in (name, arguments)]
        if found[0] is not None and found[1] is not None:
            return found[0][1], found[1][1]
    raise UnknownCallFormat("its template says nothing about name and arguments")


def _open(field: Field, name: str) -> str:
    return _one("open", field.open_re, field.open_literals, name)


def _one(side: str, pattern: Any, literals: Sequence[str] | None, name: str = "") -> str:
    """The plainest text that a delimiter matches."""
    if literals:
        return literals[0]
    if pattern is None:
        raise UnknownCallFormat(f"its template has no {side} for them")
    text = _NAME_GROUP.sub(_PLACE, pattern.pattern)
    text = re.sub(r"\\s[*?]", "", text)
    text = re.sub(r"\\([^a-zA-Z0-9])", lambda match: match[1], text.replace(r"\n", "\n"))
    text = text.replace(_PLACE, name)
    if pattern.fullmatch(text) is None:
        raise UnknownCallFormat(f"the pattern {pattern.pattern!r} stands for many texts")
    return text


def _literal(text: str, marks: Mapping[str, int]) -> str:
    """A text in a grammar; added tokens in it are named by id, as llguidance wants it."""
    names = sorted(marks, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names)) or '(?!)'})", text)
    return " ".join(
        f"<[{marks[piece]}]>" if piece in marks else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )
