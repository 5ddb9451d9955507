"""What supervisor and edge tell the process below them, and what its exit code tells them."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.settings import Settings

__all__ = ["EXIT_BROKEN", "EXIT_REFUSED", "Launch", "describe_exit", "stall_limit_s"]

EXIT_REFUSED = 2
"""Configuration or model refused: a restart would meet the same."""

EXIT_BROKEN = 70
"""The engine hangs or broke (EX_SOFTWARE of sysexits.h): restart."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the supervisor tells the edge process, and the edge process the engine process.

    Attributes:
        settings: the whole tree; ``redis.url`` is resolved.
        worker_id: unique to this incarnation.
        ready_file: written when the worker serves; None for none.
    """

    settings: Settings
    worker_id: str
    ready_file: Path | None = None

    def to_line(self) -> bytes:
        """One line of JSON."""
        data = {
            "settings": self.settings.model_dump(mode="json"),
            "worker_id": self.worker_id,
            "ready_file": str(self.ready_file) if self.ready_file else None,
        }
        return json.dumps(data).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Launch:
        """The inverse of :meth:`to_line`."""
        data = json.loads(line)
        ready = data["ready_file"]
        settings = Settings.model_validate(data["settings"])
        return cls(settings, data["worker_id"], Path(ready) if ready else None)


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code as :class:`subprocess.Popen` gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"signal {-code}"


def stall_limit_s(settings: Settings) -> float:
    """How long a loop of the edge may take for one turn, in seconds, before it counts as hung.

    It exceeds the time that the user allows by one turn's operations on Redis, each of which may
    end by its timeout.
    """
    return settings.worker.hang_timeout_s + 4 * settings.redis.socket_timeout_s
