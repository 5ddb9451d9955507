"""How the native library comes to be: built once, tested, and refused with a reason."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.kernels.cpu import NativeUnavailable, compiler, load_library, supported_sets


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one line, which builds in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int penstock_self_test() { return 0; }')
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


def test_built_once_and_again_when_the_source_changes(sources: Path, tmp_path: Path) -> None:
    first = compiler.build("portable", folder=tmp_path)
    made = first.stat().st_mtime_ns
    assert compiler.build("portable", folder=tmp_path) == first
    assert first.stat().st_mtime_ns == made
    (sources / "one.cpp").write_text('extern "C" int penstock_self_test() { return 0; } // more')
    assert compiler.build("portable", folder=tmp_path) != first
    assert not list(tmp_path.glob("build-*"))


def test_two_processes_build_it_once(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, logging; logging.basicConfig(level=20);"
        "import compiler;"  # alone: its package waits for torch
        "compiler.SOURCES = pathlib.Path(sys.argv[1]);"
        "compiler.build('portable', folder=pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(sources), str(tmp_path)]
    folder = Path(compiler.__file__).parent
    running = [
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(text.count("INFO:compiler:built") for text in said) == 1


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found"):
        compiler.build("portable", folder=tmp_path)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int f( {", "failed: .*error"),
        ('extern "C" int penstock_self_test() { return 1; }', r"self-test \(status 1\)"),
        ('extern "C" int penstock_self_test() { __builtin_trap(); }', r"self-test \(status -\d+\)"),
        ("int other() { return 0; }", "self-test.*penstock_self_test"),
    ],
)
def test_what_does_not_work_is_not_kept(
    sources: Path, tmp_path: Path, source: str, reason: str
) -> None:
    (sources / "one.cpp").write_text(source)
    with pytest.raises(NativeUnavailable, match=reason) as caught:
        compiler.build("portable", folder=tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.so"))


def test_a_library_without_its_functions(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"does not load: .*penstock_"):
        load_library("portable")


def test_a_folder_that_cannot_be_written(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "file").touch()
    built = compiler.build("portable", folder=tmp_path / "file" / "below")
    assert built.parent == tmp_path / f"penstock-native-{os.getuid()}"
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    built.parent.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="belongs to somebody else"):
        compiler.build("portable", folder=tmp_path / "file" / "below")


def test_unknown_instruction_sets_are_refused() -> None:
    assert supported_sets()[-1] == "portable"
    with pytest.raises(NativeUnavailable, match="not sse9"):
        load_library("sse9")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one set of flags is all there is")
def test_every_instruction_set_compiles_without_warnings(tmp_path: Path) -> None:
    compile_with = shutil.which("g++") or shutil.which("clang++")
    if compile_with is None:
        pytest.skip("no compiler")
    here = compiler.cpu_flags()
    every = frozenset(flag for flags in compiler.OPTIONAL.values() for flag in flags)
    kinds = {
        compiler.machine_flags(name, optional)
        for name in compiler.INSTRUCTION_SETS
        for optional in (frozenset[str](), every)
    }
    # What this CPU can run is built whole by the next test.
    kinds -= {compiler.machine_flags(name, here) for name in supported_sets()}

    # What most sources include takes half of a compiler's time: each set of flags reads it once.
    common = ("immintrin.h", "algorithm", "cmath", "cstdint", "memory", "stdexcept", "vector")
    headers = {flags: tmp_path / str(number) / "common.h" for number, flags in enumerate(kinds)}

    def errors(flags: tuple[str, ...], *arguments: object) -> str:
        options = (*compiler.FLAGS, "-O0", "-Wall", "-Wextra", "-Werror", *flags)
        command = [str(compile_with), *options, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    def read_once(flags: tuple[str, ...]) -> str:
        header = headers[flags]
        header.parent.mkdir()
        header.write_text("".join(f"#include <{name}>\n" for name in common))
        return errors(flags, "-x", "c++-header", header, "-o", f"{header}.gch")

    def errors_of(flags: tuple[str, ...], source: Path) -> str:
        made = headers[flags].with_name(f"{source.stem}.s")  # assembling adds nothing
        return errors(flags, "-include", headers[flags], "-S", source, "-o", made)

    # The others are the same on all.
    sources = [path for path in compiler.SOURCES.rglob("*.cpp") if "Vec " in path.read_text()]
    work = [(flags, source) for flags in kinds for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = list(threads.map(read_once, kinds))
        found += threads.map(lambda item: errors_of(*item), work)
    assert work
    assert not [text for text in found if text]


def test_the_library_says_what_it_was_built_for() -> None:
    for name in supported_sets():
        assert load_library(name).name == name
