"""Tells Redis which requests have a reader, for requests that end when their last reader leaves.

One task per process reports for all of its streams together, three times in each grace period. A
process that dies stops reporting, and nothing else is needed to notice that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from penstock.shared.errors import PenstockError
from penstock.shared.local.tasks import end_tasks
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import Operations

__all__ = ["ReaderHeartbeat", "Registration"]

_log = logging.getLogger(__name__)

_BEATS_PER_GRACE = 3


class Registration:
    """One reader of one request. Made by :meth:`ReaderHeartbeat.register`."""

    __slots__ = ("ended", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False


class ReaderHeartbeat:
    """The heartbeat of a process's readers.

    Args:
        client: the connection.
        operations: the scripts of the shard.
        grace_ms: how long a reader counts as present after its last heartbeat.
        inbox: of this process; empty if it has none.
    """

    def __init__(
        self, client: RetryingClient, operations: Operations, *, grace_ms: int, inbox: str
    ) -> None:
        self._client = client
        self._operations = operations
        self._grace_ms = grace_ms
        self._inbox = inbox
        self._readers: Counter[str] = Counter()
        self._new: set[str] = set()
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def register(self, request_id: str, *, is_known: bool = False) -> Registration:
        """Add a reader. Returns at once; the first heartbeat follows at once, others regularly.

        Args:
            request_id: what it reads.
            is_known: Redis knows of it already, so that the next regular heartbeat is soon enough.
        """
        self._readers[request_id] += 1
        if not is_known:
            self._new.add(request_id)
            self._registered.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(
                self._run(beats_at_once=not is_known), name="penstock-reader-heartbeat"
            )
        return Registration(request_id)

    def unregister(self, registration: Registration) -> None:
        """Remove a reader; its heartbeats end. Repeating it is harmless."""
        if registration.ended:
            return
        registration.ended = True
        self._readers[registration.request_id] -= 1
        if self._readers[registration.request_id] <= 0:
            del self._readers[registration.request_id]
            self._new.discard(registration.request_id)

    def has_reader(self, request_id: str) -> bool:
        """Whether this process reads a request."""
        return request_id in self._readers

    async def hold(self, request_id: str, grace_ms: int) -> None:
        """Let a request go on without a reader for so long: one comes back, perhaps elsewhere.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        await self._client.call(
            lambda: self._operations.reader_heartbeat(
                [request_id], grace_ms=grace_ms, inbox=self._inbox
            )
        )

    async def aclose(self) -> None:
        """End all heartbeats."""
        self._readers.clear()
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _run(self, *, beats_at_once: bool) -> None:
        loop = asyncio.get_running_loop()
        interval = self._grace_ms / 1000 / _BEATS_PER_GRACE
        next_beat = loop.time() + (0 if beats_at_once else interval)
        while self._readers:
            self._registered.clear()
            if loop.time() >= next_beat:
                next_beat = loop.time() + interval
                ids = list(self._readers)
            else:
                ids = list(self._new)
            self._new.clear()
            await self._send(ids)
            try:
                async with asyncio.timeout_at(next_beat):
                    await self._registered.wait()
            except TimeoutError:
                continue

    async def _send(self, ids: list[str]) -> None:
        if not ids:
            return
        try:
            await self._client.call(
                lambda: self._operations.reader_heartbeat(
                    ids, grace_ms=self._grace_ms, inbox=self._inbox
                )
            )
        except PenstockError as error:
            # The next beat tries again; the grace bounds how long that may go on.
            _log.warning("could not report %d readers to Redis: %s", len(ids), error)
