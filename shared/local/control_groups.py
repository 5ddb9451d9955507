"""What the control groups of this process leave it: CPU time and memory.

A container or a systemd service may have less than the machine. Linux shows the limits of a group
as files, in version 2 of its interface (``cpu.max``, ``memory.max``) or in version 1. The limits of
the groups above bind it, too. See ``Documentation/admin-guide/cgroup-v2.rst``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_left", "quota_cores"]

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1_FOLDERS = {"cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"), "memory": ("memory",)}

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, what is used, and in ``memory.stat`` the cache that is given back on demand."""


def quota_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """The least CPU quota of the process's control group and those above it, rounded down.

    Args:
        root: where control groups are mounted.
        membership: names the process's own groups, as ``/proc/self/cgroup`` does.

    Returns:
        Cores, at least 1; None where there is no quota, or no control groups.
    """
    folders = _folders("cpu", root, membership)
    quotas = [quota for folder in folders if (quota := _quota(folder))]
    return max(1, int(min(quotas))) if quotas else None


def memory_left(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the process may still take within the limits of its group and those above it.

    Args:
        root: see :func:`quota_cores`.
        membership: see there.

    Returns:
        None where there is no limit, or no control groups.
    """
    folders = _folders("memory", root, membership)
    left = [spare for folder in folders if (spare := _spare(folder)) is not None]
    return min(left, default=None)


def _folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of the group and of all above it, of v2 and of v1."""
    own_v2, own_v1 = "/", "/"
    for line in (_text(membership) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own_v2 = path
        elif controller in controllers.split(","):
            own_v1 = path
    yield from _upwards(root, own_v2)
    for name in _V1_FOLDERS[controller]:
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


def _spare(folder: Path) -> int | None:
    """Bytes below the folder's own limit; None without a limit."""
    for limit_name, used_name, cache_name in _MEMORY_FILES:
        limit, used = ((_text(folder / name) or "").strip() for name in (limit_name, used_name))
        if limit.isdigit() and used.isdigit():
            stat = _text(folder / "memory.stat") or ""
            cache = re.search(rf"^{cache_name} (\d+)$", stat, re.MULTILINE)
            reclaimable = int(cache.group(1)) if cache else 0
            return max(int(limit) - int(used) + reclaimable, 0)
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
