"""Cores and memory that a process may use, by control groups of both versions as files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.shared.local.control_groups import memory_left, quota_cores
from penstock.shared.local.cores import usable_cores


def written(folder: Path, membership: str, files: Mapping[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    (folder / "membership").write_text(membership, encoding="ascii")
    return folder / "cgroup", folder / "membership"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        # Version 2, a container that sees its own group as the root.
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        # Rounded down, and never to nothing.
        ("0::/\n", {"cpu.max": "270000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        # The least of the group and of those above it.
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 50000", "a/cpu.max": "300000 100000"}, 2),
        # A group of another is no limit, and a name from outside the container leads nowhere.
        ("0::/a\n", {"b/cpu.max": "100000 100000"}, None),
        ("0::/docker/1f\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/../c\n", {"c/cpu.max": "100000 100000", "cpu.max": "500000 100000"}, 5),
        # Version 1.
        (
            "4:cpu,cpuacct:/docker/1f\n3:memory:/docker/1f\n",
            {"cpu/docker/1f/cpu.cfs_quota_us": "150000",
             "cpu/docker/1f/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "400000",
                               "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        # Files that say nothing.
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_quota(
    membership: str, files: Mapping[str, str], cores: int | None, tmp_path: Path
) -> None:
    assert quota_cores(*written(tmp_path, membership, files)) == cores


def memory(folder: str, limit: str, used: int, cache: int, version: int = 2) -> dict[str, str]:
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    parts = (limit, str(used), f"anon 5\n{key} {cache}\nactive_file 7")
    return {
        f"{folder}memory.{name}": part for name, part in zip((*names, "stat"), parts, strict=True)
    }


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        # A container that sees its own group as the root; its cache is given back on demand.
        ("0::/\n", memory("", "1000", 600, 100), 500),
        ("0::/\n", memory("", "max", 600, 100), None),
        ("0::/\n", memory("", "1000", 1200, 100), 0),
        # A service's own limit, and that of the slice above it.
        ("0::/a/b\n", memory("a/b/", "1000", 600, 0) | memory("", "max", 9000, 0), 400),
        ("0::/a/b\n", memory("a/b/", "1000", 600, 0) | memory("a/", "2000", 1900, 0), 100),
        ("0::/a\n", memory("b/", "1000", 600, 0), None),
        # Version 1.
        ("3:memory:/d\n", memory("memory/d/", "1000", 600, 50, version=1), 450),
        ("0::/\n", {"memory.max": "1000"}, None),
    ],
)
def test_memory(
    membership: str, files: Mapping[str, str], left: int | None, tmp_path: Path
) -> None:
    assert memory_left(*written(tmp_path, membership, files)) == left


def test_no_control_groups(tmp_path: Path) -> None:
    assert quota_cores(tmp_path / "nowhere", tmp_path / "none") is None
    assert memory_left(tmp_path / "nowhere", tmp_path / "none") is None


def test_the_process_may_use_no_more_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
