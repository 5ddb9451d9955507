"""The bell: an entry in a stream tells workers that there is something to claim."""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis

from ..monitoring.heartbeat import HeartbeatWatch
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import GuardedTask

__all__ = ["Bell"]

_BLOCK_MS = 1000


class Bell:
    """Listens on a connection of its own, since waiting blocks it.

    Args:
        listener: that connection.
        key: the stream.
        heard: called after each entry.
        metrics, watch: for the task.
    """

    def __init__(
        self,
        listener: Redis,
        key: str,
        heard: Callable[[], object],
        *,
        metrics: WorkerMetrics,
        watch: HeartbeatWatch,
    ) -> None:
        self._listener = listener
        self._key = key
        self._heard = heard
        self._last_entry = "0-0"
        self._task = GuardedTask(
            "bell", self._listen, metrics=metrics, watch=watch, patience_s=2 * _BLOCK_MS / 1000
        )

    def start(self) -> None:
        """Listen from now on."""
        self._task.start()

    def stop(self) -> None:
        """End soon, without waiting for it."""
        self._task.stop()

    async def close(self) -> None:
        """End, and wait for that."""
        await self._task.close()

    def has_rung_since(self, entry: str) -> bool:
        """Whether an entry was heard that is younger than this one."""
        return _position(self._last_entry) > _position(entry)

    async def _listen(self) -> float:
        entries = await self._listener.xread(
            {self._key: self._last_entry}, count=1, block=_BLOCK_MS
        )
        if entries:
            self._last_entry = entries[0][1][-1][0].decode()
            self._heard()
        return 0.0


def _position(entry: str) -> tuple[int, int]:
    """An id of a stream's entry, to be compared."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)
