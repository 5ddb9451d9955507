"""Compiles a checkpoint's chat template as transformers does, but without transformers.

A template is a program in Jinja's language. Its compiler folds constants, so compiling alone may
compute: ``{{ 9 ** 999999999 }}`` takes hours and holds the interpreter lock.
"""

from __future__ import annotations

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .matcher import ConstraintError, first_line

__all__ = ["compile_chat_template", "template_variables"]


class _Generation(Extension):
    """The tag by which transformers marks an assistant's words; here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_chat_template(source: str) -> None:
    """Compile a template, and throw the result away.

    Raises:
        ConstraintError: it is malformed.
    """
    try:
        _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ConstraintError(first_line(str(error))) from None


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
