"""The directory in which a Redis server that we start keeps what was accepted."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["default_directory", "owned"]


def default_directory() -> Path:
    """``penstock/redis`` in the user's data directory, as the XDG specification names it."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "penstock" / "redis"


@contextlib.contextmanager
def owned(directory: Path) -> Iterator[Path]:
    """Create a directory and keep others out of it: two servers would spoil each other's file.

    Raises:
        ConfigurationError: it cannot be created, or another program has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {directory} cannot be used ({error.strerror}); "
            "give another with --data"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f"the data directory {directory} is in use by another penstock serve; "
                "give another with --data, or the address of its Redis with --redis"
            ) from None
        yield directory
