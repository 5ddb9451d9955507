"""The pages of the documentation, and what stands in their tables."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def tracked(pattern: str) -> list[Path]:
    """Files of the repository; those that only this machine has are not its documentation."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", pattern],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:  # an unpacked archive
        return [p for p in sorted(ROOT.rglob(pattern)) if p.relative_to(ROOT).parts[0][0] != "."]
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


PAGES = tracked("*.md")


def tables(page: str) -> Iterator[list[list[str]]]:
    """Every table of a page: rows of cells, the head included, the rule left out."""
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        lines = block.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        yield [row for row in rows if not re.fullmatch(r"[:-]*", "".join(row))]


def table(page: str, *head: str) -> list[list[str]]:
    """Rows of the one table whose head begins so."""
    found = [rows[1:] for rows in tables(page) if tuple(rows[0][: len(head)]) == head]
    assert len(found) == 1, f"{len(found)} tables begin with {head}"
    return found[0]


def code(cell: str) -> str:
    """The first piece of code in a cell."""
    match = re.search(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]
