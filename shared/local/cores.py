"""How many CPU cores this process may use: what it is bound to, and its container's CPU quota.

A quota (``docker run --cpus=2``) hides no core. Once a container's threads have used up their time,
the kernel stops them for the rest of the period. Threads that wait for each other by looking, as
those of matrix products do, use it up while they wait.
"""

from __future__ import annotations

import os

from .control_groups import quota_cores

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Whole cores, at least one."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = quota_cores()
    return max(1, min(bound or 1, bound or 1 if quota is None else quota))
