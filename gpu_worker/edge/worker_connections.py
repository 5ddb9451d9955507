"""The worker's connections to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.redis.cluster import Route, open_pool
from penstock.shared.redis.resp import WireLink

__all__ = ["Link", "connect"]


def connect(url: str, *, timeout_s: float, route: Route | None = None) -> Redis:
    """A client as the worker uses it; no connection is made yet.

    Nothing is retried in it: who sends must know when an outcome is unknown.

    Args:
        url: address of the server.
        timeout_s: bound on connecting and on each reply, in seconds.
        route: which node of a cluster to go to, shared by all connections of a process.
    """
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return Redis.from_pool(open_pool(url, route=route, retry=Retry(NoBackoff(), 0), **limits))


class Link(WireLink):
    """The one connection on which a worker exchanges with Redis, one batch at a time.

    Does less for each batch than a ``redis.asyncio.Redis``: it does not take a connection from a
    pool and look whether it is still good (who exchanges must be able to send again anyway), and
    it has one time limit for a whole batch where redis-py has one for every write and read. That
    spares a turn of the event loop for each.

    Args:
        url: address of the server.
        timeout_s: bound on connecting, and on a batch from its first byte to its last reply.
        route: as of :func:`connect`.
    """

    def __init__(self, url: str, *, timeout_s: float, route: Route | None = None) -> None:
        self._timeout_s = timeout_s
        retry = Retry(NoBackoff(), 0)
        pool = open_pool(url, route=route, retry=retry, socket_connect_timeout=timeout_s)
        self._connection = pool.connection_class(**pool.connection_kwargs)
        self._free = asyncio.Lock()

    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """Send encoded commands and return their replies; see :class:`WireLink`."""
        connection, replies = self._connection, []
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await connection.send_packed_command(commands, check_health=False)
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
