"""Workers that a command starts on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.shared.settings import environment_name

from .child import Child

__all__ = ["WorkerChild", "WorkerFacts", "worker_command"]


def worker_command(model: str) -> list[str]:
    """How to start a worker with the Python that runs this, wherever its programs are."""
    return [sys.executable, "-m", "penstock.gpu_worker", "worker", "--model", model]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself when it is ready.

    Attributes:
        worker_id: of this incarnation.
        pid: of the process that talks to Redis; its engine process ends with it.
        metrics_port: of its pages; None if it serves none.
    """

    worker_id: str
    pid: int
    metrics_port: int | None


class WorkerChild(Child):
    """A worker for the time of a ``with`` block; see :class:`Child`.

    Args:
        command: program and arguments; ``--ready-file PATH`` is added.
        settings: values by name (``redis.url``) which the worker gets beside the environment.
        on_line: see :class:`Child`.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, object],
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        given = {environment_name(name): str(value) for name, value in settings.items()}
        super().__init__("worker", command, os.environ | given, on_line)

    async def wait_until_serving(self, timeout_s: float | None = None) -> WorkerFacts:
        """Wait until the model is loaded.

        Raises:
            PenstockError: the worker ended instead, or takes longer than ``timeout_s``.
        """
        facts = await self.wait_until_ready(timeout_s)
        return WorkerFacts(facts["worker_id"], facts["pid"], facts["metrics_port"])
