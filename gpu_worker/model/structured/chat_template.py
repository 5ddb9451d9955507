"""Compiles and renders a checkpoint's chat template as transformers does, but without transformers.

A template is a program in Jinja's language. Its compiler folds constants, so compiling alone may
compute: ``{{ 9 ** 999999999 }}`` takes hours and holds the interpreter lock. Rendering may do so,
too, with what a request brings. So both run in processes with limits, which import little.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .matcher import ConstraintError, first_line

__all__ = ["compile_chat_template", "new_chat_template", "template_variables"]


class _Generation(Extension):
    """The tag by which transformers marks an assistant's words; here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements inside the tag, whose variables stay inside."""
        next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _TemplateNamespace(Namespace):
    """Variables that a loop may set; private names, which lead out of Jinja's sandbox, are refused.

    Raises:
        SecurityError: a name begins with an underscore.
    """

    def __init__(*args: Any, **values: Any) -> None:  # as in Jinja: `self` may be a variable
        for name in dict(*args[1:], **values):
            _check_public(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _DictMaker:
    """What a template calls as ``dict``: the class itself would lead out of Jinja's sandbox."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """A new dict."""
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A new dict with these keys."""
        return dict.fromkeys(*args)


def compile_chat_template(source: str) -> None:
    """Compile a template, and throw the result away.

    Raises:
        ConstraintError: it is malformed.
    """
    try:
        _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ConstraintError(first_line(str(error))) from None


def new_chat_template(source: str) -> Template:
    """A template to render, with the names that transformers gives to chat templates.

    Raises:
        TemplateSyntaxError: it is malformed.
    """
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_DictMaker(),
        namespace=_TemplateNamespace,
    )
    return environment.from_string(source)


def template_variables(source: str) -> frozenset[str]:
    """Names of the variables that a template reads and does not set; none if it is malformed.

    Call it only for a template that :func:`compile_chat_template` took: this folds constants, too.
    """
    environment = _environment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except (TemplateSyntaxError, RecursionError):
        return frozenset()


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore in front: {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """As transformers: Jinja's own filter escapes what HTML reserves, and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
