"""How much a file and a room hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from layout.sources import FOLDERS, ROOT

MOST_LINES = 400
MOST_ENTRIES = 12
"""Entries of one room: modules, and the rooms inside it. ``__init__`` and ``__main__`` are none."""

# Rooms with more, and how many: none may grow, and one that has shrunk leaves this list.
FULLER_ROOMS = {
    "gpu_worker/model": 14,
    # Each script is one operation of the protocol; clients in any language look them up by name.
    "shared/scripts/lua": 18,
}
SOURCES = {".py", ".lua", ".cpp", ".h"}


def sources(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path.relative_to(ROOT) for path in files if path.suffix in SOURCES]


def entries(path: Path) -> set[Path]:
    """What a file adds to rooms: itself, and every folder on its way."""
    # A header and its source are one module.
    module = set() if path.name.startswith("__") else {path.with_suffix("")}
    return module | {folder for folder in path.parents if folder.parent != folder}


def test_files_fit_in_a_head() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in sources(*FOLDERS)}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


def test_rooms_hold_a_dozen_entries_at_most() -> None:
    found = {entry for path in sources(*FOLDERS) for entry in entries(path)}
    rooms = Counter(entry.parent.as_posix() for entry in found if entry.parent.parts)
    assert {room: count for room, count in rooms.items() if count > MOST_ENTRIES} == FULLER_ROOMS


def test_rooms_of_the_models_tests_hold_a_dozen_modules_at_most() -> None:
    rooms = Counter(path.parent for path in sources("tests/model"))
    assert not {room: count for room, count in rooms.items() if count > MOST_ENTRIES}
