"""The connection on which a worker exchanges batches of encoded commands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .cluster import Route
from .opening import open_pool
from .resp import Exchanger

__all__ = ["BatchConnection"]


class BatchConnection(Exchanger):
    """One connection, one batch of commands at a time.

    It does less per batch than ``redis.asyncio.Redis``. It takes no connection from a pool and
    does not check its health, because callers must be able to send a batch again anyway. It has
    one time limit per batch; redis-py sets one per write and read, each of which costs a turn of
    the event loop.

    Args:
        url: address of the server.
        timeout_s: limit in seconds on connecting, and on a batch from its first byte to its last
            reply.
        route: see :func:`~.opening.open_pool`.

    Raises:
        ConfigurationError: see :func:`~.opening.open_pool`.
    """

    def __init__(self, url: str, *, timeout_s: float, route: Route | None = None) -> None:
        self._timeout_s = timeout_s
        pool = open_pool(url, route=route, socket_connect_timeout=timeout_s)
        self._connection = pool.connection_class(**pool.connection_kwargs)
        self._free = asyncio.Lock()

    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """See :class:`Exchanger`."""
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
                # The next batch would read the replies that are still to come as its own.
                await connection.disconnect(nowait=True)
                raise
        return replies

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.disconnect()
