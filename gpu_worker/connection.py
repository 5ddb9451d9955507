"""The worker's connections to Redis."""

from __future__ import annotations

import asyncio
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
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["Link", "connect"]


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
    return Redis.from_pool(_pool(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s))


def _pool(url: str, **options: Any) -> ConnectionPool:
    pool: ConnectionPool = ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **options)
    pool.connection_class = _CLASSES[pool.connection_class]
    return pool


class Link:
    """The one connection on which a worker exchanges with Redis, one batch at a time.

    Takes the place of a ``redis.asyncio.Redis`` where only pipelines are needed, and does less for
    each: it does not take a connection from a pool and look whether it is still good (who
    exchanges must be able to send again anyway), and it has one time limit for a whole batch where
    redis-py has one for every write and read. That spares a turn of the event loop for each.

    Args:
        url: address of the server.
        timeout_s: bound on connecting, and on a batch from its first byte to its last reply.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        pool = _pool(url, socket_connect_timeout=timeout_s)
        self._connection = pool.connection_class(**pool.connection_kwargs)
        self._free = asyncio.Lock()

    def pipeline(self, transaction: bool = False) -> _Batch:
        """An empty batch; batches are never transactions, since scripts are atomic themselves."""
        assert not transaction
        return _Batch(self)

    async def exchange(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands and return their replies; an error reply is returned, not raised.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError: what the
                commands did is unknown.
        """
        connection, replies = self._connection, []
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    packed = connection.pack_commands(commands)
                    await connection.send_packed_command(packed, check_health=False)
                    for _ in commands:
                        try:
                            replies.append(await connection.read_response())
                        except ResponseError as error:
                            replies.append(error)
            except TimeoutError:
                await connection.disconnect(nowait=True)
                raise RedisTimeoutError(f"no answer within {self._timeout_s:g} s") from None
            except BaseException:
                # Replies may be left on it, which the next batch would take for its own.
                await connection.disconnect(nowait=True)
                raise
        return replies

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.disconnect()


class _Batch:
    """Commands to be sent together; the part of redis-py's pipelines that is needed here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._commands: list[tuple[Any, ...]] = []

    def execute_command(self, *words: Any) -> None:
        self._commands.append(words)

    async def execute(self, raise_on_error: bool = False) -> list[Any]:
        assert not raise_on_error
        return await self._link.exchange(self._commands)
