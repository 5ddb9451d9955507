"""Looks at processes: whose child is it, does it still run."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["children", "identity", "is_running"]


def children(pid: int) -> list[int]:
    """Process ids of the children of a process that have not ended."""
    folder = Path(f"/proc/{pid}/task")
    if (Path("/proc/self/task").is_dir()) and _lists_children():
        found: list[int] = []
        try:
            for thread in folder.iterdir():
                found += [int(word) for word in (thread / "children").read_text().split()]
        except OSError:  # it has ended
            return []
        return [child for child in found if is_running(child)]
    return [child for child, parent, state in _ps() if parent == pid and state != "Z"]


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; a zombie has ended."""
    if Path("/proc/self/stat").exists():
        state = _stat(pid)
        return state is not None and state[0] not in "ZX"
    return any(other == pid and state != "Z" for other, _, state in _ps())


def identity(pid: int) -> tuple[int, str]:
    """What tells a process from a later one that was given the same id."""
    state = _stat(pid)
    return pid, state[19] if state else ""


def _lists_children() -> bool:
    # A kernel may be built without it.
    return next(Path("/proc/self/task").glob("*/children"), None) is not None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on, which is the third."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _ps() -> list[tuple[int, int, str]]:
    """Process, parent and state of all processes, where there is no /proc."""
    command = ["ps", "-A", "-o", "pid=,ppid=,state="]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return [(int(row[0]), int(row[1]), row[2][0]) for row in rows]
