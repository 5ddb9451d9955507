"""Whether the kernel killed for want of memory, which looks like any other SIGKILL from outside.

Linux counts such kills per memory cgroup (a container is one) and for the whole system. Kills by
systemd-oomd, earlyoom or a Kubernetes eviction are in neither count and cannot be told from a kill
by hand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["OomWatch", "find_counter", "read_counter"]

_CGROUPS = Path("/sys/fs/cgroup")
_WHOLE_SYSTEM = Path("/proc/vmstat")

_WINDOW_S = 10.0
"""A large process may end this long after its kill was counted."""


def find_counter(process: int | str = "self") -> Path | None:
    """The file that counts kills in a process's memory cgroup, or else those of the whole system.

    Returns:
        None where there is no such file (not Linux, or before 4.13).
    """
    try:
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # In a container the mount may show its own part alone, under names of the host.
        if controllers == "":  # version 2
            places = (_CGROUPS / path.lstrip("/"), _CGROUPS)
            found += [place / "memory.events" for place in places]
        elif "memory" in controllers.split(","):
            mount = _CGROUPS / "memory"
            found += [place / "memory.oom_control" for place in (mount / path.lstrip("/"), mount)]
    return next((file for file in (*found, _WHOLE_SYSTEM) if read_counter(file) is not None), None)


def read_counter(file: Path) -> int | None:
    """How many processes were killed; None if the file does not say."""
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class OomWatch:
    """Remembers the count of the last seconds, so that a rise can be told.

    Args:
        counter: the file; None: nothing is ever noticed.
        clock: monotonic seconds.
    """

    def __init__(self, counter: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> None:
        """Remember the present count; to be called every second or so."""
        count = None if self._counter is None else read_counter(self._counter)
        if count is None:
            return
        now = self._clock()
        self._seen.append((now, count))
        while len(self._seen) > 1 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()

    def killed_lately(self) -> bool:
        """Whether there was a kill within the last ten seconds, or since the first look."""
        self.look()
        return bool(self._seen) and self._seen[-1][1] > self._seen[0][1]
