"""The house's boundaries, read from the source: who may import whom, and what a file may hold."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gpu_worker", "kernels", "producer", "shared", "tools")
MOST_LINES = 400
MOST_FILES_OF_SCHEDULER = 20
"""Files of the project that importing the scheduler loads, ``__init__`` among them: below it."""
MOST_MODULES = 12
"""Modules in one room, without ``__init__`` and ``__main__``; rooms inside it are not counted."""

# Names that say what a module is in its room, and that every room may have.
GENERIC = {"__init__", "__main__", "command", "main", "options"}

# Packages beyond the standard library and penstock itself that a folder may name, first match wins.
THIRD_PARTY = {
    "gpu_worker.engine": set(),
    "gpu_worker.model": {
        "gguf", "jinja2", "llguidance", "numpy", "onnx", "safetensors", "tokenizers", "torch",
        "transformers",
    },
    "gpu_worker": {"hiredis", "prometheus_client", "redis", "rich", "typer"},
    "kernels": {"torch", "triton"},
    "producer.batches": {
        "arq", "croniter", "fsspec", "httpx", "msgpack", "prometheus_client", "pydantic", "redis",
    },
    "producer.gateway": {"fastapi", "httptools", "prometheus_client", "starlette", "uvicorn"},
    "producer": {"redis", "rich", "typer"},
    "shared": {"msgpack", "pydantic", "redis"},
    # transformers' generate() is what several of them compare with.
    # So is sentence-transformers' encode(). A load by openai's client is what its users send.
    "tools": {
        "httpx", "matplotlib", "numpy", "openai", "redis", "rich", "sentence_transformers",
        "tokenizers", "torch", "transformers", "typer", "uvloop",
    },
}  # fmt: skip
SIBLINGS = {
    "gpu_worker": {"kernels", "shared"},
    "kernels": set(),
    "producer": {"shared"},
    "shared": set(),
    "tools": {"gpu_worker", "kernels", "producer", "shared"},
}
NEVER_IN_ENGINE = {"asyncio", "redis", "torch", "transformers"}
CONTAINERS = {"Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set"}


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


def test_sources_are_seen() -> None:
    assert {module.folder for module in modules().values()} == set(FOLDERS)
    assert len(modules()["shared.local.embedded"].imports) > 10


def test_arrows_between_folders() -> None:
    wrong = [
        f"{module.at(item.line)}: {module.folder} may not import {item.module}"
        for module in modules().values()
        for item in module.imports
        if of_penstock(item)
        and item.module.split(".")[1] not in SIBLINGS[module.folder] | {module.folder}
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_relative_inside_a_folder_and_absolute_across() -> None:
    wrong = [
        f"{module.at(item.line)}: {item.module}"
        for module in modules().values()
        for item in module.imports
        if of_penstock(item) and item.relative != (item.module.split(".")[1] == module.folder)
    ]
    assert not wrong, "\n".join(wrong)


def test_third_party_packages_stay_in_their_rooms() -> None:
    wrong = []
    for module in modules().values():
        room = next(r for r in THIRD_PARTY if f"{module.name}.".startswith(f"{r}."))
        wrong += [
            f"{module.at(item.line)}: {room} may not import {item.module}"
            for item in module.imports
            if not of_penstock(item)
            and item.module.split(".")[0] not in sys.stdlib_module_names | THIRD_PARTY[room]
        ]
    assert not wrong, "\n".join(wrong)


def test_engine_is_pure() -> None:
    wrong = []
    seen: set[str] = set()
    todo = [name for name in modules() if f"{name}.".startswith("gpu_worker.engine.")]
    assert todo
    while todo:
        module = modules()[todo.pop()]
        if module.name in seen:
            continue
        seen.add(module.name)
        for item in module.imports:
            if item.module.split(".")[0] in NEVER_IN_ENGINE:
                wrong.append(f"{module.at(item.line)}: {item.module}")
            todo += targets(item)
    assert not wrong, "reached from gpu_worker/engine:\n" + "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {
        module.name: {
            target
            for item in module.imports
            if item.at_load and of_penstock(item)
            for target in targets(item)
        }
        - {module.name}
        for module in modules().values()
    }
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_private_name_of_another_module_is_imported() -> None:
    wrong = [
        f"{module.at(item.line)}: {item.module}.{name}"
        for module in modules().values()
        for item in module.imports
        if of_penstock(item)
        for name in item.names
        if name.startswith("_")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_private_module_is_imported_only_by_its_neighbours() -> None:
    wrong = [
        f"{module.at(item.line)}: {target}"
        for module in modules().values()
        for item in module.imports
        if of_penstock(item)
        for target in targets(item)
        if target.rpartition(".")[2].startswith("_") and target.rpartition(".")[0] != module.package
    ]
    assert not wrong, "\n".join(wrong)


def test_no_mutable_state_in_modules() -> None:
    wrong = []
    for module in modules().values():
        wrong += [
            f"{module.at(node.lineno)}: global"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Global)
        ]
        for node in module.tree.body:
            if isinstance(node, ast.Assign):
                names, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                names, value = [node.target], node.value
            else:
                continue
            if _is_mutable(value):
                wrong += [
                    f"{module.at(node.lineno)}: {ast.unparse(name)}"
                    for name in names
                    if ast.unparse(name) != "__all__" and not ast.unparse(name).isupper()
                ]
    assert not wrong, "\n".join(wrong)


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in CONTAINERS
    return isinstance(
        value, ast.Dict | ast.DictComp | ast.List | ast.ListComp | ast.Set | ast.SetComp
    )


def test_files_fit_in_a_head() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    sources = [path for path in files if path.suffix in {".py", ".lua", ".cpp", ".h"}]
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


def test_rooms_hold_a_dozen_modules_at_most() -> None:
    # A header and its source are one module.
    found = {
        path.relative_to(ROOT).with_suffix("")
        for folder in (*FOLDERS, "tests/model")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h"} and not path.name.startswith("__")
    }
    rooms = Counter(module.parent.as_posix() for module in found)
    assert not {room: count for room, count in rooms.items() if count > MOST_MODULES}


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


def test_every_package_is_listed_for_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
    names = ["penstock." + ".".join(folder.relative_to(ROOT).parts) for folder in folders]
    assert project["tool"]["setuptools"]["packages"] == sorted(names)


IMPORT_SCHEDULER = """\
import sys
import penstock.gpu_worker.engine.scheduling.scheduler
files = {m.__file__ for n, m in sys.modules.items() if n.startswith("penstock.")}
print(*sorted(files), sep="\\n")
"""


def test_the_scheduler_can_be_read_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_SCHEDULER], capture_output=True, text=True, check=True
    )
    files = run.stdout.splitlines()
    assert any(file.endswith("scheduler.py") for file in files)
    assert len(files) < MOST_FILES_OF_SCHEDULER, run.stdout


@pytest.fixture
def foreign_folder(tmp_path: Path) -> Path:
    """An application's directory with folders named like ours, which break when imported."""
    folder = tmp_path / "application"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('the wrong folder')\n")
    return folder


IMPORT_CLIENT = """\
import sys
import penstock.producer
from penstock.producer import Producer
heavy = {"torch", "transformers", "triton", "prometheus_client"} & set(sys.modules)
assert not heavy, heavy
assert not {"shared", "kernels", "producer"} & set(sys.modules)
print(penstock.producer.__file__)
"""


def test_client_imports_nothing_heavy_and_nothing_of_the_application(foreign_folder: Path) -> None:
    # -c puts the current directory first on the path, as a script's own directory would be.
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_CLIENT], cwd=foreign_folder, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_wheel_holds_all_sources_and_data_and_imports(tmp_path: Path, foreign_folder: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    skip = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, checkout / folder, ignore=skip)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), "."], cwd=checkout, check=True)
    (wheel,) = tmp_path.glob("penstock_llm-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {f"penstock/{p.relative_to(ROOT)}" for p in files if "__pycache__" not in p.parts}
    assert names == wanted
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_CLIENT],
        cwd=foreign_folder,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "site"))
