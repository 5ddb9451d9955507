"""The ingress: entries that plain Redis clients add become requests.

A task of its own on a connection of its own. It waits for entries of all ingress streams at once,
has each read by :func:`read_entry`, and acts on it with one atomic script. Entries that were read
and not acted on, here or by a worker that died, are found by the next look. So every failure is met
in the same way: forget what is at hand, and look again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.shared.keys import GROUP
from penstock.shared.protocol.plain_entry import Entry, Refusal, read_entry, refused
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.ingress_operations import IngressOperations, IngressReply
from penstock.shared.scripts.replies import accepted
from penstock.shared.scripts.script_loader import Call, run_calls, run_commands

from ..monitoring.heartbeat import HeartbeatWatch
from ..monitoring.logs import printable
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import Guard, GuardedTask

__all__ = ["Ingress"]

_log = logging.getLogger("penstock.ingress")

_ENTRIES = 64
"""Taken at a time over all ingress streams. Each may hold a megabyte."""

_PARSED_AT_ONCE = 16_384
"""Bytes of entries that are parsed on the event loop, in a millisecond or so; more in a thread."""


class Ingress:
    """Takes entries in on behalf of one worker.

    Args:
        redis: a client of its own, without ``decode_responses``: waiting blocks it.
        operations: the scripts of the ingress.
        worker_id: unique to this process; never reused.
        metrics: counts entries by verdict.
        watch: for the task.
        admitted: called when there is a new request to claim.
        interval_s: how often to look for new streams and left entries; the longest that a dead
            worker's entries lie.
    """

    def __init__(
        self,
        redis: Redis,
        operations: IngressOperations,
        worker_id: str,
        *,
        metrics: WorkerMetrics,
        watch: HeartbeatWatch,
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
        self._tenants: tuple[str | None, ...] = ()
        self._broken: tuple[str | None, ...] = ()
        self._next_poll = 0.0
        self._guard = Guard("ingress", metrics)
        self._task = GuardedTask(
            "ingress", self._turn, metrics=metrics, watch=watch, patience_s=interval_s
        )

    def start(self) -> None:
        """Take entries in from now on."""
        self._task.start()

    async def close(self) -> None:
        """Stop, and close the connection. Other workers find what is at hand."""
        await self._task.close()
        await self._redis.aclose()

    async def _turn(self) -> float:
        try:
            await self._take_in(await self._next_entries())
        except Exception:
            self._next_poll = 0.0
            raise
        return 0.0

    async def _next_entries(self) -> Sequence[Entry]:
        wait_s = self._next_poll - time.monotonic()
        if wait_s <= 0:
            self._next_poll = time.monotonic() + self._interval_s
            return await self._poll()
        if not self._tenants:
            await asyncio.sleep(wait_s)
            return ()
        return await self._listen(wait_s)

    async def _poll(self) -> Sequence[Entry]:
        """Find the ingress streams, and the entries that were read and not acted on."""
        call = self._operations.poll(self._worker_id, entries=_ENTRIES)
        (reply,) = await run_calls(self._redis, [call])
        found = self._operations.read_poll(reply)
        self._tenants = found.tenants
        if found.broken != self._broken:
            for tenant in found.broken:
                name = self._operations.keys.ingress(tenant)
                _log.error("not served: %s is no stream, or no name of a tenant", name)
            self._broken = found.broken
        return found.entries

    async def _listen(self, wait_s: float) -> Sequence[Entry]:
        """Wait for entries that no other worker has been given."""
        streams = {
            self._operations.keys.ingress(tenant).encode(): tenant for tenant in self._tenants
        }
        count = max(1, _ENTRIES // len(streams))
        command: tuple[str | bytes | int, ...] = (
            "XREADGROUP", "GROUP", GROUP, self._worker_id, "COUNT", count,
            "BLOCK", max(1, round(wait_s * 1000)), "STREAMS", *streams, *[">"] * len(streams),
        )  # fmt: skip
        (reply,) = await run_commands(self._redis, [command])
        accepted("XREADGROUP", reply)
        # A list of pairs in RESP2, a map in RESP3.
        pairs = reply.items() if isinstance(reply, dict) else reply or ()
        return [
            Entry(streams[stream], name.decode(), fields)
            for stream, entries in pairs
            for name, fields in entries
        ]

    async def _take_in(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        if sum(len(part) for entry in entries for part in entry.fields) <= _PARSED_AT_ONCE:
            calls = self._judge(entries)
        else:
            # Meanwhile the event loop gets the interpreter every few milliseconds. Otherwise tokens
            # and the lease's renewal would wait while 64 entries of a megabyte are parsed.
            calls = await asyncio.to_thread(self._judge, entries)
        replies = await run_calls(self._redis, calls)
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        for entry, reply in zip(entries, replies, strict=True):
            if not isinstance(reply, ResponseError):
                self._count(entry, self._operations.read_resolved(reply))
        if errors:
            _log.error("%d of %d entries stay: %s", len(errors), len(entries), errors[0])
        if len(errors) == len(entries):
            raise errors[0]

    def _judge(self, entries: Sequence[Entry]) -> list[Call]:
        """What to do with each entry. Whatever it holds, the call can be sent."""
        return [self._judge_one(entry) for entry in entries]

    def _judge_one(self, entry: Entry) -> Call:
        try:
            verdict = read_entry(entry)
            if isinstance(verdict, Refusal):  # its message quotes the entry
                verdict = replace(verdict, message=printable(verdict.message))
            return _sendable(self._operations.resolve(entry, verdict))
        except Exception as error:
            message = f"the entry cannot be read: {self._guard.isolated(entry.own_id, error)}"
        refusal = Refusal(entry.own_id, Answer.MSGPACK, Reason.ENGINE_ERROR, message)
        with contextlib.suppress(Exception):
            refusal = refused(entry, refusal.reason, message)  # where and how the entry asks for it
        return self._operations.resolve(entry, refusal)

    def _count(self, entry: Entry, admitted: IngressReply) -> None:
        self._metrics.ingress_entries.labels(admitted.verdict).inc()
        if admitted.verdict == "ok":
            self._admitted()
        elif admitted.verdict not in ("dup", "gone"):
            facts = {"request": admitted.id}
            _log.info("entry %s: %s", entry.own_id, admitted.verdict, extra=facts)


def _sendable(call: Call) -> Call:
    """The same call.

    Raises:
        Exception: an argument cannot be encoded. All calls travel together, so this must show
            here, where it concerns one entry.
    """
    call.wire()
    return call


def _as_sent(response: Any, **kwargs: Any) -> Any:
    del kwargs
    return response
