"""Names: no module's twice, and those that docstrings and ``__all__`` give."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from layout.sources import FOLDERS, ROOT, modules, of_penstock

# Names that say what a module is in its room, and that every room may have.
GENERIC = {"__init__", "__main__", "command", "main", "options"}


def test_no_module_name_stands_twice() -> None:
    places = defaultdict(list)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.stem not in GENERIC:
                places[path.stem].append(path.relative_to(ROOT).as_posix())
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_modules_named_in_docstrings_exist() -> None:
    wrong = []
    for module in modules().values():
        for name in re.findall(r":mod:`~?([^`]+)`", module.path.read_text(encoding="utf-8")):
            above = module.package.split(".")
            dots = len(name) - len(name.lstrip("."))
            inside = [*above[: len(above) - dots + 1], name.lstrip(".")]
            full = ".".join(inside) if dots else name.removeprefix("penstock.")
            if full not in modules():
                wrong.append(f"{module.path.relative_to(ROOT)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_packages_export_an_explicit_sorted_list() -> None:
    for module in modules().values():
        lists = [
            ast.literal_eval(node.value)
            for node in module.tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        for exported in lists:
            assert len(set(exported)) == len(exported), module.name
        if module.path.name == "__init__.py" and any(of_penstock(i) for i in module.imports):
            assert lists, f"{module.path} imports names and has no __all__"
