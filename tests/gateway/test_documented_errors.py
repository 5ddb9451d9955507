"""The table of errors in docs/gateway.md has every code that the gateway gives, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.producer.gateway.api_errors import end_error
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason

ROOT = Path(__file__).resolve().parents[2]


def expressions_of_codes(node: ast.AST) -> list[ast.expr]:
    """What is the code of an error: an argument, its default, or a variable of that name."""
    match node:
        case ast.Call(func=ast.Name(id="ApiError" | "invalid"), args=[_, _, code, *_]):
            return [code]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="codes"))):
            return node.args
        case ast.Assign(targets=[ast.Name(id="code" | "codes")]):
            return [node.value]
        case ast.arguments():
            last = node.args[len(node.args) - len(node.defaults) :]
            pairs = zip(last, node.defaults, strict=True)
            return [default for argument, default in pairs if argument.arg == "code"]
    return []


def texts(node: ast.AST) -> Iterator[str]:
    """The texts that it may be; those that it is compared with are none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Compare):
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def codes_in_source() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "producer" / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for expression in expressions_of_codes(node):
                found.update(texts(expression))
    return found


def codes_of_ends() -> set[str]:
    errors = [end_error(End(n=0, reason=reason), {}, "prompt") for reason in Reason]
    return {error.code for error in errors if error is not None}


def test_the_documentation_has_every_code() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text("utf-8").partition("\n## Errors\n")[2]
    table = page.partition("\n## ")[0]
    rows = re.findall(r"^\| (?:\d{3}|other) \| ([^|]*) \|", table, re.MULTILINE)
    told = [code for row in rows for code in re.findall(r"`(\w+)`", row)]
    assert len(told) == len(set(told))
    assert set(told) == codes_in_source() | codes_of_ends()
