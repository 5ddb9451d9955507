"""Runs a worker's loop without a process around it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from penstock.gpu_worker.engine_process.worker import Worker
from penstock.gpu_worker.messages import Broken, StepReport, unpacked_updates
from penstock.shared.protocol.states import Reason


class Heard:
    """Takes what a worker says: the ends of runs, and why its loop broke."""

    def __init__(self) -> None:
        self.ends: dict[str, Reason] = {}
        self.last: StepReport | None = None
        self.is_idle = False
        self.broken: str | None = None

    def __call__(self, message: StepReport | Broken) -> None:
        if isinstance(message, Broken):
            self.broken = message.error
            return
        self.last, self.is_idle = message, not message.records
        for update in unpacked_updates(message.updates):
            if update.finish is not None:
                self.ends[update.id] = update.finish.reason


class Quiet:
    """Nothing comes; a wait is short, and what another thread has ordered is looked at then."""

    def poll(self) -> None:
        """Nothing to read."""

    def wait(self, timeout_s: float | None) -> bool:
        del timeout_s
        time.sleep(0.001)
        return True


@contextlib.contextmanager
def running(worker: Worker) -> Iterator[None]:
    """The loop, on a thread of its own until the ``with`` ends."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive()
