"""Makes the logs of ended requests compact, beside the worker's steps.

A task of its own with a connection of its own: no exchange waits for it. Any worker does it for
any request of the shard, some time after its end, so that those who read it live have read it.
"""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError
from penstock.shared.protocol.compaction import compacted
from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.scripts.log_operations import LogOperations

from ..metrics import WorkerMetrics

__all__ = ["Compactor"]

_log = logging.getLogger("penstock.compactor")

_INTERVAL_S = 1.0
_RIPE = 64
_AT_ONCE = 8
"""Logs held at the same time: with the longest outputs there may be, some 100 MB."""


class Compactor:
    """Looks for ended logs once a second until closed.

    Args:
        connection: its connection; closed with it.
        operations: on that connection.
        metrics: counts what was made compact.
        after_ms: how long after the end of a request; None: never.
    """

    def __init__(
        self,
        connection: BatchConnection,
        operations: LogOperations,
        *,
        metrics: WorkerMetrics,
        after_ms: int | None,
    ) -> None:
        self._connection = connection
        self._operations = operations
        self._metrics = metrics
        self._after_ms = after_ms
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop at once, and close the connection. A log is compact by then, or as it was."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            # redis-py may lose the cancellation; then the flag ends the loop.
            await asyncio.wait([self._task], timeout=_INTERVAL_S)
        await self._connection.aclose()

    async def _run(self) -> None:
        complaint = ""
        while not self._stopping:
            seen = 0
            try:
                seen = await self._round()
                complaint = ""
            except (RedisError, PenstockError, OSError) as error:
                self._metrics.redis_errors.inc()
                if str(error) != complaint:
                    _log.warning("logs are not made compact for now: %s", error)
                complaint = str(error)
            if seen < _RIPE and not self._stopping:
                await asyncio.sleep(_INTERVAL_S)

    async def _round(self) -> int:
        """Make some logs compact; how many were looked at."""
        due = await self._operations.list_compactable(after_ms=self._after_ms, count=_RIPE)
        for start in range(0, len(due), _AT_ONCE):
            logs = []
            for log in await self._operations.read(due[start : start + _AT_ONCE]):
                logs.append((log, compacted(log.chunks)))
                await asyncio.sleep(0)  # the steps of the worker go before
            self._metrics.compacted_logs.inc(await self._operations.compact(logs))
        return len(due)
