"""The distribution on PyPI that this package comes from: its name, its version, its extras.

The import name and the command are ``penstock``; on PyPI that name belongs to another project.
"""

from __future__ import annotations

import importlib.metadata

__all__ = ["install_command", "version"]

_NAME = "penstock-llm"


def install_command(extra: str) -> str:
    """Return the command that adds an extra, for an error's remedy.

    Raises:
        ValueError: the installed distribution has no such extra.
    """
    try:
        extras = importlib.metadata.metadata(_NAME).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        extras = [extra]
    if extra not in extras:
        raise ValueError(f"{_NAME} has no extra {extra!r}, only {', '.join(extras)}")
    return f"pip install '{_NAME}[{extra}]'"


def version() -> str | None:
    """Return the version that is installed, None when run from a source tree."""
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
