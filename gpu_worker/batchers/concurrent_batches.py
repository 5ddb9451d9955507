"""Several batches of an asynchronous model at once, each waited for by a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.shared.errors import PenstockError

from ..engine.requests.engine_request import Finish
from .batch_queue import Batch
from .halving import Result

__all__ = ["BatchHangs", "ConcurrentBatches", "Ended"]

Results = Sequence[Result | Finish]


class BatchHangs(PenstockError):
    """A batch has run for too long: the process must be replaced."""


class Ended(NamedTuple):
    """A batch that has ended.

    Attributes:
        batch: which.
        results: of its items, in their order; or what ended the model.
        seconds: how long it ran.
    """

    batch: Batch
    results: Results | BaseException
    seconds: float


@dataclass(slots=True)
class _Running:
    batch: Batch
    began: float
    pass_began: float


class ConcurrentBatches:
    """Runs up to ``most`` batches at once. Its methods are for one thread.

    Args:
        run: computes a batch, and blocks; called from any thread. A batch that fails is computed
            in several passes: ``run`` calls its second argument between them.
        most: batches at once.
        wake: called in any thread when a batch has ended.
        hang_timeout_s: a batch of which one pass runs for longer hangs, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: Callable[[Batch, Callable[[], None]], Results],
        most: int,
        wake: Callable[[], None],
        *,
        hang_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._most = most
        self._wake = wake
        self._hang_timeout_s = hang_timeout_s
        self._clock = clock
        self._running: dict[int, _Running] = {}
        self._ended: queue.SimpleQueue[tuple[int, Results | BaseException]] = queue.SimpleQueue()
        self._count = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_items(self) -> int:
        """Items of all batches that run."""
        return sum(len(running.batch.items) for running in self._running.values())

    def has_room(self, *, alone: bool) -> bool:
        """Whether another batch may begin. One of a suspect shares the process with none.

        Args:
            alone: it is a suspect's.
        """
        if alone:
            return not self._running
        suspected = any(running.batch.items[0].alone for running in self._running.values())
        return len(self._running) < self._most and not suspected

    def start(self, batch: Batch) -> None:
        """Begin a batch, for which there is room."""
        self._count += 1
        now = self._clock()
        running = self._running[self._count] = _Running(batch, began=now, pass_began=now)
        name, work = f"batch-{self._count}", (self._count, running)
        threading.Thread(target=self._work, args=work, name=name, daemon=True).start()

    def take_ended(self) -> list[Ended]:
        """The batches that have ended since the last call."""
        ended: list[Ended] = []
        while True:
            try:
                number, results = self._ended.get_nowait()
            except queue.Empty:
                return ended
            running = self._running.pop(number)
            ended.append(Ended(running.batch, results, self._clock() - running.began))

    def check_progress(self) -> None:
        """Check that no batch hangs.

        Raises:
            BatchHangs: one has run for too long.
        """
        limit = self._clock() - self._hang_timeout_s
        if any(running.pass_began < limit for running in self._running.values()):
            raise BatchHangs(f"a batch has run for over {self._hang_timeout_s:g} s")

    def _work(self, number: int, running: _Running) -> None:
        results: Results | BaseException

        def on_pass() -> None:
            running.pass_began = self._clock()

        try:
            results = self._run(running.batch, on_pass)
        except BaseException as error:
            results = error
        self._ended.put((number, results))
        self._wake()
