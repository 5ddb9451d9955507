"""What is installed: every file, under names that shadow nothing of an application's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from layout.sources import FOLDERS, ROOT


def test_every_package_is_listed_for_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
    names = ["penstock." + ".".join(folder.relative_to(ROOT).parts) for folder in folders]
    assert project["tool"]["setuptools"]["packages"] == sorted(names)


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
