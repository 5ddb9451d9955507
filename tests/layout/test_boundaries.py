"""Who may import whom, and that modules hold no state."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys

import pytest
from layout.sources import FOLDERS, modules, of_penstock, targets

MOST_FILES_OF_SCHEDULER = 20
"""Files of the project that importing the scheduler loads, ``__init__`` among them: below it."""

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
