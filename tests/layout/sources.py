"""The source files of the product, parsed: modules, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gpu_worker", "kernels", "producer", "shared", "tools")


@dataclass(frozen=True)
class Import:
    """One imported module, with its absolute name."""

    module: str
    names: tuple[str, ...]
    relative: bool
    at_load: bool  # or for types alone, but not inside a function
    line: int


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str  # gpu_worker.engine.scheduler: without the namespace
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def folder(self) -> str:
        return self.name.partition(".")[0]

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


@cache
def modules() -> dict[str, Module]:
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            package = name if is_package else name.rpartition(".")[0]
            imports = tuple(_imports(tree.body, package, at_load=True))
            found[name] = Module(name, path, tree, imports)
    return found


def _imports(body: list[ast.stmt], package: str, *, at_load: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), False, at_load, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = f"penstock.{package}".split(".")
                above = above[: len(above) - node.level + 1]
                module = ".".join([*above, *([module] if module else [])])
            names = tuple(alias.name for alias in node.names)
            yield Import(module, names, bool(node.level), at_load, node.lineno)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                for child in getattr(node, field, None) or []:
                    body = child.body if hasattr(child, "pattern") else [child]
                    if isinstance(child, ast.ExceptHandler):
                        body = child.body
                    yield from _imports(body, package, at_load=at_load and not inside)


def targets(item: Import) -> Iterator[str]:
    """Modules of penstock that an import loads: the module named, or submodules taken from it."""
    name = item.module.removeprefix("penstock.")
    submodules = [f"{name}.{part}" for part in item.names if f"{name}.{part}" in modules()]
    yield from submodules
    if name in modules() and len(submodules) < max(1, len(item.names)):
        yield name


def of_penstock(item: Import) -> bool:
    return item.module == "penstock" or item.module.startswith("penstock.")
