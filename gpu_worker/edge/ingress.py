"""The plain door: entries that plain Redis clients add become requests.

A loop of its own beside the edge's, on a connection of its own: it waits for entries of all intake
streams at once, has each read by :func:`read_entry`, and acts on it with one atomic script. Entries
read and not acted on, here or by a worker that died, are found by the next poll, so every failure
is met the same way: forget what is at hand, and poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from penstock.shared.errors import PenstockError
from penstock.shared.keys import GROUP
from penstock.shared.protocol import Reason
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry, refused
from penstock.shared.scripts.ingress_operations import IngressOperations, IngressReply
from penstock.shared.scripts.replies import accepted
from penstock.shared.scripts.script_loader import run_calls, run_commands

from ..metrics import WorkerMetrics

__all__ = ["Door"]

_log = logging.getLogger("penstock.door")

_ENTRIES = 64
"""Taken at a time over all doors. Each may hold a megabyte."""

_PAUSE_S = 0.5


class Door:
    """Takes entries in on behalf of one worker.

    Args:
        redis: a client of the door's own, without ``decode_responses``: reading blocks it.
        operations: the door's scripts.
        worker_id: unique to this process; never reused.
        metrics: counts entries by verdict.
        admitted: called when there is a new request to claim.
        interval_s: how often to poll; the longest that a dead worker's entries lie.
    """

    def __init__(
        self,
        redis: Redis,
        operations: IngressOperations,
        worker_id: str,
        *,
        metrics: WorkerMetrics,
        admitted: Callable[[], object],
        interval_s: float,
    ) -> None:
        # As the server sends it: redis-py's own parser keeps one of several fields of one name.
        redis.set_response_callback("XREADGROUP", _as_sent)
        self._redis = redis
        self._operations = operations
        self._worker_id = worker_id
        self._metrics = metrics
        self._admitted = admitted
        self._interval_s = interval_s
        self._doors: tuple[str | None, ...] = ()
        self._broken: tuple[str | None, ...] = ()
        self._next_poll = 0.0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take entries in from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop, and close the connection. What is at hand, other workers find."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            # redis-py may lose the cancellation; then the flag ends the loop when its read returns.
            await asyncio.wait([self._task], timeout=self._interval_s)
        await self._redis.aclose()

    async def _run(self) -> None:
        complaint = ""
        while not self._stopping:
            try:
                await self._take_in(await self._next_entries())
                complaint = ""
            except (RedisError, PenstockError, OSError) as error:
                self._metrics.redis_errors.inc()
                if str(error) != complaint:
                    _log.warning("the plain door pauses: %s", error)
                complaint = str(error)
                self._next_poll = 0.0
                await asyncio.sleep(_PAUSE_S)

    async def _next_entries(self) -> Sequence[Entry]:
        wait_s = self._next_poll - time.monotonic()
        if wait_s <= 0:
            self._next_poll = time.monotonic() + self._interval_s
            return await self._poll()
        if not self._doors:
            await asyncio.sleep(wait_s)
            return ()
        return await self._listen(wait_s)

    async def _poll(self) -> Sequence[Entry]:
        call = self._operations.poll(self._worker_id, entries=_ENTRIES)
        (reply,) = await run_calls(self._redis, [call])
        poll = self._operations.read_poll(reply)
        self._doors = poll.tenants
        if poll.broken != self._broken:
            for tenant in poll.broken:
                name = self._operations.keys.ingress(tenant)
                _log.error("not served: %s is no stream, or no name for a door", name)
            self._broken = poll.broken
        return poll.entries

    async def _listen(self, wait_s: float) -> Sequence[Entry]:
        """Wait for entries that no other worker has been given."""
        tenants = {self._operations.keys.ingress(tenant).encode(): tenant for tenant in self._doors}
        count = max(1, _ENTRIES // len(tenants))
        command: tuple[str | bytes | int, ...] = (
            "XREADGROUP", "GROUP", GROUP, self._worker_id, "COUNT", count,
            "BLOCK", max(1, round(wait_s * 1000)), "STREAMS", *tenants, *[">"] * len(tenants),
        )  # fmt: skip
        (reply,) = await run_commands(self._redis, [command])
        accepted("XREADGROUP", reply)
        # A list of pairs in RESP2, a map in RESP3.
        streams = reply.items() if isinstance(reply, dict) else reply or ()
        return [
            Entry(tenants[stream], name.decode(), fields)
            for stream, entries in streams
            for name, fields in entries
        ]

    async def _take_in(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        calls = [self._operations.resolve(entry, _judge(entry)) for entry in entries]
        replies = await run_calls(self._redis, calls)
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        for entry, reply in zip(entries, replies, strict=True):
            if not isinstance(reply, ResponseError):
                self._count(entry, self._operations.read_resolved(reply))
        if errors:
            _log.error("%d of %d entries stay: %s", len(errors), len(entries), errors[0])
        if len(errors) == len(entries):
            raise errors[0]

    def _count(self, entry: Entry, admitted: IngressReply) -> None:
        self._metrics.door_entries.labels(admitted.verdict).inc()
        if admitted.verdict == "ok":
            self._admitted()
        elif admitted.verdict not in ("dup", "gone"):
            facts = {"request": admitted.id}
            _log.info("entry %s: %s", entry.own_id, admitted.verdict, extra=facts)


def _judge(entry: Entry) -> Admission | Refusal:
    try:
        return read_entry(entry)
    except Exception as error:  # one entry's trouble must not keep the others waiting
        _log.exception("an entry can not be read", extra={"request": entry.own_id})
        return refused(entry, Reason.ENGINE_ERROR, f"the entry can not be read: {error}")


def _as_sent(response: Any, **kwargs: Any) -> Any:
    del kwargs
    return response
