"""The logs of ended requests: read, and made compact; see :mod:`.compaction`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .replies import accepted
from .script_loader import Command
from .shard_scripts import ShardScripts

__all__ = ["EndedLog", "LogOperations"]

_PAGE = 1024


@dataclass(frozen=True, slots=True)
class EndedLog:
    """A log as it was read.

    Attributes:
        id: the request.
        entries: how many it had, the end included.
        chunks: its packed chunks, in order.
    """

    id: str
    entries: int
    chunks: tuple[bytes, ...]


class LogOperations(ShardScripts):
    """The logs of ended requests of one shard."""

    async def list_compactable(self, *, after_ms: int | None, count: int) -> list[str]:
        """Ids of requests whose logs are to be made compact; no other worker gets them for 30 s.

        Args:
            after_ms: how long after the end; None: never, and the notes are deleted.
            count: how many at most.

        Raises:
            RedisUnavailable: the server refuses.
        """
        after: str | int = "" if after_ms is None else after_ms
        reply = await self._one("list_compactable", after_ms=after, count=count)
        return [name.decode() for name in reply]

    async def read(self, ids: Sequence[str]) -> list[EndedLog]:
        """Read the logs of these requests, in pages, so that no reply holds the server for long.

        A log that is gone, or no stream any more, has no entries.

        Raises:
            RedisUnavailable: the server refuses.
        """
        found: dict[str, list[Any]] = {request_id: [] for request_id in ids}
        unread = dict.fromkeys(ids, "-")
        while unread:
            commands = [
                Command(("XRANGE", self._keys.log(request_id), start, "+", "COUNT", _PAGE))
                for request_id, start in unread.items()
            ]
            replies = await self.run(commands)
            pages = dict(zip(unread, replies, strict=True))
            unread = {}
            for request_id, page in pages.items():
                if isinstance(page, Exception) and "WRONGTYPE" in str(page):
                    continue
                accepted("XRANGE", page)
                found[request_id] += page
                if len(page) == _PAGE:
                    unread[request_id] = f"({page[-1][0].decode()}"
        return [_ended_log(request_id, entries) for request_id, entries in found.items()]

    async def compact(self, logs: Sequence[tuple[EndedLog, bytes | None]]) -> int:
        """Replace each log by one chunk; None keeps its entries and frees its spare room.

        A reader sees the old log or the new one. A log that has changed since it was read stays.

        Returns:
            How many are compact now.

        Raises:
            RedisUnavailable: the server refuses.
        """
        calls = [
            self._call(
                "compact",
                id=log.id,
                entries=log.entries,
                last_chunk=log.chunks[-1] if log.chunks else b"",
                chunk=whole or b"",
            )
            for log, whole in logs
        ]
        replies = await self.run(calls)
        for reply in replies:
            accepted("compact", reply)
        return sum(replies)


def _ended_log(request_id: str, entries: Sequence[tuple[bytes, Any]]) -> EndedLog:
    # As the server sends them, or as redis-py reads them for its own commands.
    chunks = tuple(
        fields[b"chunk"] if isinstance(fields, Mapping) else fields[1]
        for _, fields in entries
        if (b"chunk" in fields if isinstance(fields, Mapping) else fields[0] == b"chunk")
    )
    return EndedLog(request_id, len(entries), chunks)
