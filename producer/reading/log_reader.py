"""Reads pages of requests' logs together with their records, in one round trip."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from penstock.shared.errors import PenstockError, ProtocolError, RedisUnavailable, StreamError
from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import TERMINAL_STATES, OnDisconnect, State
from penstock.shared.redis.resp import Argument, encode
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import Operations

__all__ = ["LogReader", "Look", "Page"]

_log = logging.getLogger(__name__)

_PAGE_ENTRIES = 256
_PAGE_FIELDS = ("state", "end", "on_disconnect", "inbox")
_TIMES = ("deadline", "queue_deadline", "claimed_at")


@dataclass(frozen=True, slots=True)
class Look:
    """Where a request stands.

    Attributes:
        has_ended: it has, or is not known any more.
        tokens: output tokens in its log.
        time_left_ms: see :class:`Page`.
    """

    has_ended: bool
    tokens: int
    time_left_ms: int | None


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
        (page,) = await self.read_many([(request_id, index)])
        if isinstance(page, Exception):
            raise page
        return page

    async def read_many(self, wanted: Sequence[tuple[str, int]]) -> list[Page | PenstockError]:
        """The same of several requests in one round trip; errors of single ones are returned.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        commands = []
        for request_id, index in wanted:
            commands += [
                _command("HMGET", self._keys.request(request_id), *_PAGE_FIELDS, *_TIMES),
                _command(
                    "XRANGE", self._keys.log(request_id), f"{index}-0", "+", "COUNT", _PAGE_ENTRIES
                ),
            ]
        *replies, now = await self._exchange([*commands, _command("TIME")])
        pages: list[Page | PenstockError] = []
        for (request_id, _), record, entries in zip(
            wanted, replies[::2], replies[1::2], strict=True
        ):
            try:
                pages.append(_page(request_id, record, entries, now))
            except PenstockError as error:
                pages.append(error)
        return pages

    async def look_at(self, ids: Sequence[str]) -> list[Look]:
        """Where these requests stand, without their logs, in one round trip.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        commands = [
            _command("HMGET", self._keys.request(request_id), "state", "tokens", *_TIMES)
            for request_id in ids
        ]
        *replies, now = await self._exchange([*commands, _command("TIME")])
        looks = []
        for reply in replies:
            if isinstance(reply, Exception) or reply[0] is None or reply[1] is None:
                looks.append(Look(True, 0, None))
                continue
            state, tokens, *times = reply
            has_ended = State(state.decode()) in TERMINAL_STATES
            left_ms = None if has_ended else _time_left_ms(now, *times)
            looks.append(Look(has_ended, int(tokens), left_ms))
        return looks

    async def _exchange(self, commands: list[bytes]) -> list[Any]:
        return await self._client.call(lambda: self._client.shared.exchange(commands))

    async def expire(self, request_id: str) -> bool:
        """End a request whose time is over; returns whether it has ended.

        Workers do it, too, so a failure here is not the reader's.
        """
        try:
            return await self._client.call(lambda: self._operations.expire(request_id))
        except RedisUnavailable as error:
            _log.info("could not end %r, whose time is over: %s", request_id, error)
            return False


def _command(*words: Argument) -> bytes:
    return b"*%d\r\n%b" % (len(words), encode(words))


def _page(request_id: str, record: Any, entries: Any, now: Any) -> Page:
    for reply in (record, entries):
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            raise StreamError(f"keys of {request_id!r} were overwritten: {reply}")
        if isinstance(reply, Exception):
            raise RedisUnavailable(f"Redis refuses to show {request_id!r}: {reply}")
    state, packed_end, on_disconnect, inbox, *times = record
    end = None
    if packed_end is not None and state is not None and State(state.decode()) in TERMINAL_STATES:
        end = _end(packed_end)
    return Page(
        known=state is not None,
        events=[event for _, fields in entries for event in _events(fields)],
        more=len(entries) == _PAGE_ENTRIES,
        end=end,
        needs_reader=on_disconnect == OnDisconnect.CANCEL.value.encode(),
        inbox=None if inbox is None else inbox.decode(),
        time_left_ms=_time_left_ms(now, *times) if end is None else None,
    )


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


def _events(fields: list[bytes]) -> list[Chunk | End]:
    """The events of one entry: a chunk, the end, or both."""
    by_name = dict(zip(fields[::2], fields[1::2], strict=True))
    return [unpack_event(by_name[name]) for name in (b"chunk", b"end") if name in by_name]


def _end(packed: bytes) -> End:
    event = unpack_event(packed)
    if not isinstance(event, End):
        raise ProtocolError("end", packed, "a packed End")
    return event
