"""The oldest Redis version that works."""

from __future__ import annotations

import re

from ..errors import RedisUnavailable

__all__ = ["MINIMUM_VERSION", "check_version"]

MINIMUM_VERSION = (6, 2)
"""Oldest Redis whose commands and scripting suffice."""


def check_version(version: str) -> None:
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
