"""What is done with the logs of ended requests: each is made compact; see :mod:`.compaction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..keys import Keys
from ..redis.batch_connection import BatchConnection
from .replies import accepted
from .script_loader import Call, Command, Pipelined, Script, load_script, run_calls

__all__ = ["LOG_SCRIPTS", "EndedLog", "LogOperations"]

LOG_SCRIPTS = ("compact", "list_compactable")
"""Names of the scripts for ended logs."""

_PAGE = 1024


@dataclass(frozen=True, slots=True)
class EndedLog:
    """A log as it was read.

    Attributes:
        id: whose.
        entries: how many it had, the end among them.
        chunks: those of them that are chunks, packed, in order.
    """

    id: str
    entries: int
    chunks: tuple[bytes, ...]


class LogOperations:
    """Ended logs of one shard.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a BatchConnection.
        keys: names of the shard.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined | BatchConnection,
        keys: Keys,
        *,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = {name: load(name) for name in LOG_SCRIPTS}

    async def list_compactable(self, *, after_ms: int | None, count: int) -> list[str]:
        """Ids of requests whose logs are to be made compact; told to nobody else for 30 s.

        Args:
            after_ms: how long after the end; None: never, and what was noted is forgotten.
            count: how many at most.

        Raises:
            RedisUnavailable: the server refuses.
        """
        args = (self._keys.prefix, -1 if after_ms is None else after_ms, count)
        (reply,) = await run_calls(
            self._redis, [Call(self._scripts["list_compactable"], (self._keys.ended,), args)]
        )
        accepted("list_compactable", reply)
        return [name.decode() for name in reply]

    async def read(self, ids: Sequence[str]) -> list[EndedLog]:
        """The logs of these requests, by pages so that none of them holds the server.

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
            replies = await run_calls(self._redis, commands)
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
        """Put one chunk each in the place of logs, or None: leave it and forget the note.

        Whoever reads meanwhile sees the old log or the new one. Nothing happens to a log that is
        not what was read any more.

        Returns:
            How many are compact now.

        Raises:
            RedisUnavailable: the server refuses.
        """
        keys = self._keys
        calls = []
        for log, whole in logs:
            names = (
                keys.request(log.id), keys.log(log.id), keys.compacting(log.id), keys.ended,
            )  # fmt: skip
            last = log.chunks[-1] if log.chunks else b""
            args = (keys.prefix, log.id, log.entries, last, whole or b"")
            calls.append(Call(self._scripts["compact"], names, args))
        replies = await run_calls(self._redis, calls)
        for reply in replies:
            accepted("compact", reply)
        return sum(replies)


def _ended_log(request_id: str, entries: Sequence[tuple[bytes, Any]]) -> EndedLog:
    # As the server sends them, or as redis-py reads them for its own commands.
    chunks = tuple(
        fields[b"d"] if isinstance(fields, Mapping) else fields[1]
        for _, fields in entries
        if (b"d" in fields if isinstance(fields, Mapping) else fields[0] == b"d")
    )
    return EndedLog(request_id, len(entries), chunks)
