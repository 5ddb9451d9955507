"""Guards of the edge's tasks: one bad item costs itself, and no task ends unnoticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError

from ..monitoring.heartbeat import HeartbeatWatch
from ..monitoring.logs import printable
from ..monitoring.metrics import WorkerMetrics

__all__ = ["Guard", "GuardedTask", "Ticker"]

_log = logging.getLogger("penstock.edge")

_PAUSE_S = 0.5
_MOST_SHOWN = 200


class Guard:
    """Counts and logs unexpected errors that concern one item of a task.

    A task that handles items from outside catches ``Exception`` around each item, reports it here,
    and continues with the next. Bytes from outside may raise anything: ``RecursionError`` by their
    depth, ``UnicodeEncodeError`` by half a surrogate, ``OverflowError`` by a huge number.

    Args:
        task: the label ``task`` of ``penstock_isolated_errors_total``.
        metrics: counts.
    """

    def __init__(self, task: str, metrics: WorkerMetrics) -> None:
        self._task = task
        self._errors = metrics.isolated_errors.labels(task)

    def isolated(self, item: str, error: Exception) -> str:
        """Report an error that concerns this item alone; returns the error in one short line."""
        self._errors.inc()
        what = _describe(error)
        _log.error(
            "%s: a bug was met and isolated at %s: %s",
            self._task, printable(item, _MOST_SHOWN), what, exc_info=error,
        )  # fmt: skip
        return what


def _describe(error: BaseException) -> str:
    """Its type and message in one printable line of bounded length."""
    try:
        return f"{type(error).__name__}: {printable(str(error), _MOST_SHOWN)}"
    except Exception:  # its message cannot be made
        return type(error).__name__


class GuardedTask:
    """A loop whose turns may fail and be followed by the next; only :meth:`close` ends it.

    Args:
        name: in logs and metrics.
        turn: one turn; returns the seconds to pause before the next.
        metrics: counts failed turns.
        watch: is shown a heartbeat before each turn.
        patience_s: how long :meth:`close` waits for a turn that outlives its cancellation.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], Awaitable[float]],
        *,
        metrics: WorkerMetrics,
        watch: HeartbeatWatch,
        patience_s: float,
    ) -> None:
        self._name = name
        self._turn = turn
        self._metrics = metrics
        self._watch = watch
        self._heartbeat = watch.add(name)
        self._patience_s = patience_s
        self._guard = Guard(name, metrics)
        self._complaint = ""
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take turns from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """End soon, without waiting for it."""
        self._stopping = True
        self._watch.remove(self._heartbeat)
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancel the present turn and wait for its end."""
        self.stop()
        if self._task is not None:
            # redis-py may lose the cancellation on Python 3.11 (asyncio.wait_for); then the flag
            # ends the loop when its read returns.
            await asyncio.wait([self._task], timeout=self._patience_s)

    async def _run(self) -> None:
        while not self._stopping:
            self._heartbeat.beat()
            pause_s = await self._guarded_turn()
            if pause_s > 0 and not self._stopping:
                await asyncio.sleep(pause_s)

    async def _guarded_turn(self) -> float:
        try:
            pause_s = await self._turn()
        except (RedisError, PenstockError, OSError) as error:
            self._metrics.redis_errors.inc()
            if str(error) != self._complaint:
                _log.warning("%s pauses: %s", self._name, error)
            self._complaint = str(error)
            return _PAUSE_S
        except Exception as error:
            self._guard.isolated("a turn", error)
            return _PAUSE_S
        self._complaint = ""
        return pause_s


class Ticker:
    """Calls a function at regular intervals, until closed.

    Args:
        interval_s: between two calls, in seconds.
        call: the function; it does not raise.
    """

    def __init__(self, interval_s: float, call: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._call = call
        self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._call()
        self._schedule()

    def close(self) -> None:
        """Call no more."""
        self._next.cancel()
