"""Reads one page of a request's log together with its record, in one round trip."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from penstock.shared.errors import ProtocolError, RedisUnavailable, StreamError
from penstock.shared.keys import Keys
from penstock.shared.protocol import Chunk, End, OnDisconnect, State, unpack_event
from penstock.shared.protocol.states import TERMINAL_STATES
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import Operations

__all__ = ["LogReader", "Page"]

_log = logging.getLogger(__name__)

_PAGE = 256


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the log, and the record as it was just before.

    Attributes:
        known: the record exists.
        events: chunks, from the entry that ends at the wanted index, and perhaps the end.
        more: the log goes on after this page.
        end: the terminal event in the record; None if it has none.
        needs_reader: the request ends when its last reader leaves.
        inbox: the inbox whose channel it is published in; None: its own channel.
        time_left_ms: until it expires, by Redis' clock; None if it has ended, or if that cannot be
            seen.
    """

    known: bool
    events: list[Chunk | End]
    more: bool
    end: End | None
    needs_reader: bool
    inbox: str | None
    time_left_ms: int | None


class LogReader:
    """Reads logs and records of one shard.

    Args:
        client: the connection.
        operations: the scripts of the shard.
        keys: names of the shard.
    """

    def __init__(self, client: RetryingClient, operations: Operations, keys: Keys) -> None:
        self._client = client
        self._operations = operations
        self._keys = keys

    async def read(self, request_id: str, index: int) -> Page:
        """Read from token ``index`` on.

        The record is read before the log, so all tokens that a terminal record counts are in the
        log, unless the log is gone. The first entry may be the chunk that ends at ``index``; its
        digest shows whether the reader has read this log before.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
            StreamError: a key of the request has the wrong type.
        """
        record, log = self._keys.request(request_id), self._keys.log(request_id)

        async def send() -> list[Any]:
            pipeline = self._client.redis.pipeline(transaction=False)
            names = ["state", "end", "on_disconnect", "inbox"]
            times = ["deadline", "queue_deadline", "claimed_at"]
            pipeline.hmget(record, names + times)
            pipeline.xrange(log, f"{index}-0", "+", count=_PAGE)
            pipeline.time()
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        *replies, now = await self._client.call(send)
        for reply in replies:
            if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
                raise StreamError(f"keys of {request_id!r} were overwritten: {reply}")
            if isinstance(reply, Exception):
                raise reply
        (state, packed_end, on_disconnect, inbox, *times), entries = replies
        end = None
        if (
            packed_end is not None
            and state is not None
            and State(state.decode()) in TERMINAL_STATES
        ):
            end = _end(packed_end)
        events = [event for _, fields in entries for event in _events(fields)]
        needs_reader = on_disconnect == OnDisconnect.CANCEL.value.encode()
        return Page(
            known=state is not None,
            events=events,
            more=len(entries) == _PAGE,
            end=end,
            needs_reader=needs_reader,
            inbox=None if inbox is None else inbox.decode(),
            time_left_ms=_time_left_ms(now, *times) if end is None else None,
        )

    async def expire(self, request_id: str) -> bool:
        """End a request whose time is over; returns whether it has ended.

        Workers do it, too, so a failure here is not the reader's.
        """
        try:
            return await self._client.call(lambda: self._operations.expire(request_id))
        except RedisUnavailable as error:
            _log.info("could not end %r, whose time is over: %s", request_id, error)
            return False


def _time_left_ms(
    now: Any, deadline: bytes | None, queue_deadline: bytes | None, claimed: bytes | None
) -> int | None:
    """Time until a request that has not ended expires."""
    if isinstance(now, Exception) or deadline is None:
        return None
    at = int(deadline)
    if claimed is None and queue_deadline is not None and (queue_at := int(queue_deadline)) > 0:
        at = min(at, queue_at)
    seconds, microseconds = int(now[0]), int(now[1])
    return at - seconds * 1000 - microseconds // 1000


def _events(fields: dict[bytes, bytes]) -> list[Chunk | End]:
    """The events of one entry: a chunk, the end, or both."""
    return [unpack_event(fields[name]) for name in (b"chunk", b"end") if name in fields]


def _end(packed: bytes) -> End:
    event = unpack_event(packed)
    if not isinstance(event, End):
        raise ProtocolError("end", packed, "a packed End")
    return event
