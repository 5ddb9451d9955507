"""Tells Redis that somebody reads, for requests that are cancelled when nobody does.

One task per process says so for all of its streams together, three times in each grace period. A
process that dies falls silent with all of them; nothing else is needed to tell that it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from penstock.shared.errors import PenstockError
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import Operations

__all__ = ["Attendance", "Presence"]

_log = logging.getLogger(__name__)

_IDS_PER_CALL = 256
_BEATS_PER_GRACE = 3


class Attendance:
    """One reader of one request. Made by :meth:`Presence.attend`, ended by ``leave``."""

    __slots__ = ("ended", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False


class Presence:
    """The heartbeat of a process's readers.

    Args:
        client: the connection.
        operations: the scripts of the shard.
        grace_ms: how long Redis is to believe in a reader that has fallen silent.
    """

    def __init__(self, client: RetryingClient, operations: Operations, *, grace_ms: int) -> None:
        self._client = client
        self._operations = operations
        self._grace_ms = grace_ms
        self._readers: Counter[str] = Counter()
        self._new: set[str] = set()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def attended(self) -> int:
        """Requests that have a reader here."""
        return len(self._readers)

    def attend(self, request_id: str) -> Attendance:
        """A reader has come. Returns at once; Redis is told at once, too, and then regularly."""
        self._readers[request_id] += 1
        self._new.add(request_id)
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock-presence")
        return Attendance(request_id)

    def leave(self, attendance: Attendance) -> None:
        """The reader has left; Redis is told no more. Again is harmless."""
        if attendance.ended:
            return
        attendance.ended = True
        self._readers[attendance.request_id] -= 1
        if self._readers[attendance.request_id] <= 0:
            del self._readers[attendance.request_id]
            self._new.discard(attendance.request_id)

    async def aclose(self) -> None:
        """Fall silent."""
        self._readers.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        interval = self._grace_ms / 1000 / _BEATS_PER_GRACE
        next_beat = loop.time()
        while self._readers:
            self._news.clear()
            if loop.time() >= next_beat:
                next_beat = loop.time() + interval
                ids = list(self._readers)
            else:
                ids = list(self._new)
            self._new.clear()
            await self._say(ids)
            try:
                async with asyncio.timeout_at(next_beat):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _say(self, ids: list[str]) -> None:
        for start in range(0, len(ids), _IDS_PER_CALL):
            page = ids[start : start + _IDS_PER_CALL]
            try:
                await self._client.call(
                    lambda page=page: self._operations.reader_heartbeat(  # type: ignore[misc]
                        page, grace_ms=self._grace_ms
                    )
                )
            except PenstockError as error:
                # The next beat tries again; how long that may go on is what the grace is for.
                _log.warning("could not tell Redis of %d readers: %s", len(page), error)
