"""Makes the logs of ended requests compact, beside the worker's steps.

A task of its own with a connection of its own: no exchange waits for it. Any worker does it for
any request of the shard. It waits some time after the end, so that live readers have read the log.
"""

from __future__ import annotations

import asyncio

from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.scripts.compaction import compacted
from penstock.shared.scripts.log_operations import EndedLog, LogOperations

from ..monitoring.heartbeat import HeartbeatWatch
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import Guard, GuardedTask

__all__ = ["Compactor"]

_INTERVAL_S = 1.0
_LISTED = 64
_AT_ONCE = 8
"""Logs held at the same time: with the longest possible outputs, some 100 MB."""


class Compactor:
    """Looks for ended logs once a second until closed.

    Args:
        connection: its connection; closed with it.
        operations: on that connection.
        metrics: counts what was made compact.
        watch: for the task.
        after_ms: how long after the end of a request; None: never.
    """

    def __init__(
        self,
        connection: BatchConnection,
        operations: LogOperations,
        *,
        metrics: WorkerMetrics,
        watch: HeartbeatWatch,
        after_ms: int | None,
    ) -> None:
        self._connection = connection
        self._operations = operations
        self._metrics = metrics
        self._after_ms = after_ms
        self._guard = Guard("compactor", metrics)
        self._task = GuardedTask(
            "compactor", self._compact_some, metrics=metrics, watch=watch, patience_s=_INTERVAL_S
        )

    def start(self) -> None:
        """Begin."""
        self._task.start()

    async def close(self) -> None:
        """Stop at once, and close the connection. A log is compact by then, or as it was."""
        await self._task.close()
        await self._connection.aclose()

    async def _compact_some(self) -> float:
        """Make some logs compact; returns the seconds until the next look."""
        ids = await self._operations.list_compactable(after_ms=self._after_ms, count=_LISTED)
        for start in range(0, len(ids), _AT_ONCE):
            logs = []
            for log in await self._operations.read(ids[start : start + _AT_ONCE]):
                logs.append((log, self._compacted(log)))
                await asyncio.sleep(0)  # tokens go first
            self._metrics.compacted_logs.inc(await self._operations.compact(logs))
        return 0.0 if len(ids) == _LISTED else _INTERVAL_S

    def _compacted(self, log: EndedLog) -> bytes | None:
        """One chunk in the place of the log; None leaves it as it is, and is not tried again."""
        try:
            return compacted(log.chunks)
        except Exception as error:
            self._guard.isolated(log.id, error)
            return None
