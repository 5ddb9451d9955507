"""The worker's connections to Redis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import (
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

__all__ = ["connect"]


class _PackedInC:
    """Encodes commands in C.

    redis-py's asynchronous connections do it in Python, argument by argument: for the five hundred
    keys of one append that is half of all the CPU time the worker spends on it.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        # What stands before the arguments may be two words ("CONFIG GET").
        return [hiredis.pack_command((*args[0].split(), *args[1:]))]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join(piece for command in commands for piece in self.pack_command(*command))]


class _Tcp(_PackedInC, Connection):
    pass


class _Tls(_PackedInC, SSLConnection):
    pass


class _Unix(_PackedInC, UnixDomainSocketConnection):
    pass


_CLASSES: dict[type, type] = {
    Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix,
}  # fmt: skip


def connect(url: str, *, timeout_s: float) -> Redis:
    """A client as the worker uses it; no connection is made yet.

    Nothing is retried in it: who sends must know when an outcome is unknown.

    Args:
        url: address of the server.
        timeout_s: bound on connecting and on each reply, in seconds.
    """
    pool: ConnectionPool = ConnectionPool.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    pool.connection_class = _CLASSES[pool.connection_class]
    return Redis.from_pool(pool)
