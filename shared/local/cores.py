"""How many CPU cores this process may use: what it is bound to, and its container's CPU quota.

A quota (``docker run --cpus=2``) hides no core. Once a container's threads have used up their time,
the kernel stops them for the rest of the period. Threads that wait for each other by looking, as
those of matrix products do, use it up while they wait.
"""

from __future__ import annotations

import os

from ..errors import ConfigurationError
from .control_groups import quota_cores

__all__ = ["bind_to_cores", "usable_cores"]


def usable_cores() -> int:
    """Whole cores, at least one."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = quota_cores()
    return max(1, min(bound or 1, bound or 1 if quota is None else quota))


def bind_to_cores(setting: str, text: str) -> None:
    """Let this process, and all it starts, run on these cores alone.

    Args:
        setting: the name of the setting, for errors.
        text: numbers and ranges of the system's cores, such as ``0-3,8``.

    Raises:
        ConfigurationError: a core is named that the process may not use.
    """
    wanted: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores = range(int(first), int(last or first) + 1)
        if not cores:
            raise ConfigurationError(f"{setting}: got {text!r}; allowed: ranges that go up: {part}")
        wanted |= set(cores)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(f"{setting}: got {text!r}; allowed: off, on this system")
    usable = os.sched_getaffinity(0)
    if not wanted <= usable:
        named = ",".join(map(str, sorted(usable)))
        raise ConfigurationError(
            f"{setting}: got {text!r}; allowed: cores that this process may use: {named}"
        )
    os.sched_setaffinity(0, wanted)
