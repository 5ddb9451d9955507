"""Builds the native library for an instruction set of this machine, once."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "FLAGS", "INSTRUCTION_SETS", "OPTIONAL", "SOURCES", "NativeUnavailable", "build",
    "cache_folder", "cpu_flags", "machine_flags", "supported_sets",
]  # fmt: skip

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"

INSTRUCTION_SETS = {
    "avx512bf16": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "portable": (),
}
"""Best first: the CPU flags, as Linux names them, that each needs."""

OPTIONAL = {
    "avx512bf16": ("avx512vbmi", "avx512_vnni"),
    "avx512": ("avx512vbmi", "avx512_vnni"),
}
"""CPU flags that are used where they are."""

FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-pthread",
    # A product fuses with a sum only where the source says so: bits must not depend on a compiler's
    # mood. The other two promise that no code reads errno or relies on floating-point traps.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)

COMPILE_SECONDS = 300
SELF_TEST_SECONDS = 60

_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).penstock_self_test())"


class NativeUnavailable(RuntimeError):
    """The native library cannot be had on this machine; says why in one line."""


def supported_sets() -> tuple[str, ...]:
    """The instruction sets that this CPU has, best first; ``portable`` is always among them."""
    have = cpu_flags()
    return tuple(name for name, needs in INSTRUCTION_SETS.items() if have.issuperset(needs))


def cache_folder() -> Path:
    """Where built libraries are kept: ``penstock/native`` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "native"


def build(
    instruction_set: str, *, folder: Path | None = None, extra_flags: tuple[str, ...] = ()
) -> Path:
    """The library for ``instruction_set``, built now if it has not been before.

    Builds are kept by source, compiler, flags and CPU. Of several processes that need one at the
    same time, one builds and the others wait for it.

    Args:
        instruction_set: one of :func:`supported_sets`.
        folder: where libraries are kept; None: :func:`cache_folder`.
        extra_flags: for the compiler, such as a sanitiser's.

    Raises:
        NativeUnavailable: no compiler, it failed, or the library fails its self-test.
    """
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found (g++, c++ or clang++)")
    flags = (*FLAGS, *machine_flags(instruction_set, cpu_flags()), *extra_flags)
    key = _key(compiler, flags)
    try:
        target = _folder(folder) / f"penstock-{instruction_set}-{key}.so"
        if target.exists():
            return target
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build(compiler, flags, target, instruction_set)
    except OSError as error:
        raise NativeUnavailable(f"the native library cannot be stored: {error}") from error
    return target


def _folder(wanted: Path | None) -> Path:
    """A folder that can be written: the one wanted, or one of this user's for temporary files."""
    folder = cache_folder() if wanted is None else wanted
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    # Only the user's own: a library is code, and it must not be somebody else's.
    fallback = Path(tempfile.gettempdir()) / f"penstock-native-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    owner = fallback.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise OSError(f"{fallback} belongs to somebody else")
    return fallback


def _build(compiler: str, flags: tuple[str, ...], target: Path, name: str) -> None:
    log.info("building the native library for %s, which takes seconds, once", name)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        sources = sorted(SOURCES.rglob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
        if not any("sanitize" in flag for flag in flags):
            _self_test(library)
        library.replace(target)
    log.info("built %s in %.1f s", target, time.perf_counter() - begin)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"{command[0]} was not done after {COMPILE_SECONDS} seconds"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        log.debug("%s\n%s", " ".join(command), done.stderr)
        raise NativeUnavailable(f"{command[0]} failed: {lines[0].strip()}")


def _self_test(library: Path) -> None:
    """In a process of its own, which may die of an instruction that the CPU does not know."""
    command = [sys.executable, "-I", "-S", "-c", _SELF_TEST, str(library)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable("the native library hangs in its self-test") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailable(
            f"the native library fails its self-test (status {done.returncode}): {said}"
        )


def machine_flags(instruction_set: str, have: frozenset[str]) -> tuple[str, ...]:
    """The compiler's flags for ``instruction_set`` on a CPU that has the flags ``have``."""
    extra = [flag for flag in OPTIONAL.get(instruction_set, ()) if flag in have]
    needed = (*INSTRUCTION_SETS[instruction_set], *extra)
    return tuple(f"-m{flag.replace('_', '')}" for flag in needed)


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        name = path.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler} does not run: {error}") from error
    for text in (version, " ".join(flags), platform.machine(), " ".join(sorted(cpu_flags()))):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, by Linux' names; empty where they are not to be had."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
