"""How many CPU cores this process may use: what it is bound to, and its container's CPU quota.

A quota (``docker run --cpus=2``) hides no core: the kernel stops all threads of a container for the
rest of a period once they have used up their time. Threads that wait for each other by looking, as
those of matrix products do, use it up while they wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["quota_cores", "usable_cores"]

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def usable_cores() -> int:
    """Whole cores, at least one."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = quota_cores()
    return max(1, min(bound or 1, bound or 1 if quota is None else quota))


def quota_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """The least CPU quota of the process's control group and those above it, rounded down.

    Args:
        root: where control groups are mounted.
        membership: names the process's own groups, as ``/proc/self/cgroup`` does.

    Returns:
        Cores, at least 1; None where there is no quota, or no control groups.
    """
    quotas = [quota for folder in _folders(root, membership) if (quota := _quota(folder))]
    return max(1, int(min(quotas))) if quotas else None


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    """The folders of the group and of all above it, of v2 and of v1."""
    own_v2, own_v1 = "/", "/"
    for line in (_text(membership) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own_v2 = path
        elif "cpu" in controllers.split(","):
            own_v1 = path
    yield from _upwards(root, own_v2)
    for name in _V1_FOLDERS:
        yield from _upwards(root / name, own_v1)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """From ``path`` under ``top`` to ``top`` itself, which in a container is the container's."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # the group lies beside what is mounted here
        parts = []
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _quota(folder: Path) -> float | None:
    """Cores as a fraction; None without a quota."""
    both = _text(folder / "cpu.max")
    if both is not None:
        quota, _, period = both.strip().partition(" ")
    else:
        quota, period = (
            (_text(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")
        )
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max", or -1 of v1: none
    return int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
