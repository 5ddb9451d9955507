"""Heartbeats: every loop of a worker shows that it still turns, and a watch notices when one stops.

A process that exists is not a process that works. So each loop counts its turns, a thread of its
own compares the counts, and what stands still is replaced instead of looking healthy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

__all__ = ["Heartbeat", "HeartbeatWatch", "SilenceTimer", "Watchdog"]

_LOOK_S = 0.25
"""Seconds between two looks of a watchdog, and between two bytes to the supervisor."""

_LONGEST_LOOK_S = 1.0


class Heartbeat:
    """The sign of life of one loop. A beat costs one addition.

    Attributes:
        name: of the loop, for logs and ``/healthz``.
        limit_s: seconds without a beat after which the loop counts as standing still.
        beats: how many there were.
    """

    __slots__ = ("beats", "limit_s", "name")

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.beats = 0

    def beat(self) -> None:
        """Show that the loop turns."""
        self.beats += 1


class SilenceTimer:
    """Measures for how long a count has not risen, in time during which the measurer itself ran.

    A process that was stopped, or a machine that slept, saw no beat meanwhile; that says nothing
    about the loops. So one look counts for a second at most, however long ago the last one was.
    """

    __slots__ = ("_looked_at", "_seen", "silent_s")

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._seen = -1
        self.silent_s = 0.0

    def look(self, count: int, now: float) -> float:
        """Seconds of silence up to ``now`` (monotonic), given the present count."""
        passed = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        self.silent_s = 0.0 if count != self._seen else self.silent_s + passed
        self._seen = count
        return self.silent_s


class HeartbeatWatch:
    """Knows all loops of a process, and which of them stand still. Safe to use from any thread.

    Args:
        limit_s: how long a loop may stand still, unless it is added with a limit of its own.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._timers: dict[Heartbeat, SilenceTimer] = {}
        self._problem: str | None = None

    def add(self, name: str, limit_s: float | None = None) -> Heartbeat:
        """Watch a loop from now on; it must beat at least once in ``limit_s`` seconds."""
        heartbeat = Heartbeat(name, self._limit_s if limit_s is None else limit_s)
        with self._lock:
            self._timers[heartbeat] = SilenceTimer(self._clock())
        return heartbeat

    def remove(self, heartbeat: Heartbeat) -> None:
        """Watch a loop no longer, because it ends as it should."""
        with self._lock:
            self._timers.pop(heartbeat, None)

    def look(self) -> str | None:
        """Why the process must be replaced; None if all loops turn. To be called regularly."""
        now, problem = self._clock(), None
        with self._lock:
            for heartbeat, timer in self._timers.items():
                silent_s = timer.look(heartbeat.beats, now)
                if silent_s > heartbeat.limit_s and problem is None:
                    problem = f"{heartbeat.name} has stood still for {silent_s:.1f} s"
            self._problem = problem
        return problem

    @property
    def problem(self) -> str | None:
        """What the last look found."""
        return self._problem


class Watchdog:
    """A thread that looks at the heartbeats, and tells the supervisor while all is well.

    It depends on no event loop. If the whole process stops, the supervisor hears nothing more.

    Args:
        watch: the loops.
        end: called, once, with what stands still. It must end the process.
        supervisor: file descriptor of a pipe that gets a byte after each look that found nothing;
            None: there is no supervisor.
    """

    def __init__(
        self, watch: HeartbeatWatch, end: Callable[[str], None], supervisor: int | None = None
    ) -> None:
        self._watch = watch
        self._end = end
        self._supervisor = supervisor
        self._closed = threading.Event()
        if supervisor is not None:
            os.set_blocking(supervisor, False)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            problem = self._watch.look()
            if problem is not None:
                self._end(problem)
                return
            if self._supervisor is not None:
                with contextlib.suppress(OSError):  # full, or the supervisor is gone and we follow
                    os.write(self._supervisor, b".")
            self._closed.wait(_LOOK_S)
