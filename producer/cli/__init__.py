"""The program ``penstock``: a thin layer of commands over the client."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.shared.local.gc_tuning import without_collector

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, or the process's own; returns the exit code."""
    try:
        with without_collector():
            from .app import main as run  # takes a moment, in which Ctrl-C is no error either
    except KeyboardInterrupt:
        return 130
    return run(arguments)
