"""The flags of ``penstock submit``, made from the declarations of the request options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.fields.collection_types import JsonSchema
from penstock.shared.protocol.fields.field_types import Flag, FlagOrWord, Option, Text, Word
from penstock.shared.protocol.request import REQUEST_OPTIONS

__all__ = ["read_request_options", "with_request_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_request_options(command: _Command) -> _Command:
    """Give a command one flag for each request option, in place of its ``**options``.

    They come after ``chat``, the last of the command's own parameters that describe the request.
    """
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    at, kind = 1 + list(signature.parameters).index("chat"), signature.parameters["chat"].kind
    flags = (_parameter(item).replace(kind=kind) for item in REQUEST_OPTIONS)
    parameters = [*own[:at], *flags, *own[at:]]
    signature = inspect.Signature(parameters, return_annotation=signature.return_annotation)
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def read_request_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the options that the command line gives; the others keep their defaults.

    Raises:
        InvalidRequest: one has no such form, or its file cannot be read.
    """
    values: dict[str, Any] = {}
    for item in REQUEST_OPTIONS:
        value = given[item.name]
        if value is None or value == [] or (isinstance(item.type, Flag) and not value):
            continue
        if isinstance(item.type, Flag):
            values[item.name] = not item.default
        elif item.type.repeated:
            values[item.name] = [item.type.read(item.name, text) for text in value]
        else:
            values[item.name] = item.type.read(item.name, _text(item, value))
    return values


def _parameter(item: Option) -> inspect.Parameter:
    # A flag changes the default: one that is true has a flag for false.
    negative = "no-" if item.default is True else ""
    flags = [f"--{negative}{item.name.replace('_', '-')}"]
    if len(item.name) == 1:
        flags.append(f"-{item.name}")
    kind: Any = str | None
    if isinstance(item.type, Flag):
        kind = bool
    elif item.type.repeated:
        kind = list[str] | None
    metavar = None if kind is bool else item.type.text.split()[0].strip(",").upper()
    info = typer.Option(*flags, help=_help(item), metavar=metavar, show_default=False)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, info],
    )


def _help(item: Option) -> str:
    words = [item.help]
    if isinstance(item.type, Word | FlagOrWord):
        words.append(f"One of: {item.type.range.replace('`', '')}.")
    if item.type.repeated:
        words.append("May be repeated.")
    elif _may_be_a_file(item):
        words.append("@FILE reads it from a file.")
    if item.unset or item.default not in ((), None):
        words.append(f"Default: {item.unset or str(item.default).lower()}.")
    return " ".join(words)


def _may_be_a_file(item: Option) -> bool:
    return isinstance(item.type, Text | JsonSchema)


def _text(item: Option, argument: str) -> str:
    """The option's text: the argument, or the file that ``@FILE`` names."""
    if not _may_be_a_file(item) or not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(item.name, argument, f"a text, or @ and a file of it: {why}") from None
