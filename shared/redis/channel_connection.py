"""The connection that subscribes to channels."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["ChannelConnection"]

_CONNECT_TIMEOUT_S = 10.0


class ChannelConnection:
    """A separate connection to a client's server: commands go out, messages come in.

    It does less per message than redis-py's ``PubSub``, which sets a timer and checks the
    connection's health for each one. Here the reader watches the connection as a whole. It speaks
    RESP2, in which messages are plain arrays.

    Replies come in the order of the commands, one per channel. A command that the server refuses,
    or that names no channel, has a single reply. A reply does not name its command, so the
    connection counts: the reader reports each reply with :meth:`answered` or :meth:`refused`.

    Args:
        redis: the client whose connection parameters are used; its own connections stay in its
            pool.
    """

    def __init__(self, redis: Redis) -> None:
        pool = redis.connection_pool
        parameters = {
            **pool.connection_kwargs,
            "protocol": 2,
            # A silent channel is normal. The reader alone decides when to reconnect: redis-py
            # would retry in whichever of reader and writer fails first and disturb the other.
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
            "health_check_interval": 0,
        }
        self._timeout_s = pool.connection_kwargs.get("socket_connect_timeout") or _CONNECT_TIMEOUT_S
        self._connection = pool.connection_class(**parameters)
        self._commands: deque[tuple[str, tuple[bytes, ...]]] = deque()  # not completely answered
        self._replies = 0  # to the first of them

    async def connect(self) -> None:
        """Connect and log in.

        Raises:
            redis.exceptions.ConnectionError, TimeoutError, AuthenticationError: it failed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            raise RedisTimeoutError(f"no connection within {self._timeout_s:g} s") from None

    async def send(self, command: str, *channels: bytes) -> None:
        """Send a command; its replies arrive among the messages."""
        self._commands.append((command, channels))
        await self._connection.send_command(command, *channels, check_health=False)

    def answered(self) -> None:
        """A reply arrived that is no error."""
        if not self._commands:
            return
        self._replies += 1
        if self._replies >= len(self._commands[0][1]):
            self._commands.popleft()
            self._replies = 0

    def refused(self) -> tuple[str, tuple[bytes, ...]]:
        """An error reply arrived: the refused command and its channels."""
        self._replies = 0
        return self._commands.popleft() if self._commands else ("", ())

    def receive(self) -> Awaitable[Any]:
        """To be awaited: the next message or reply, a list that begins with its kind.

        Raises:
            redis.exceptions.ConnectionError: the connection is broken.
            redis.exceptions.ResponseError: a command was refused.
        """
        reply: Awaitable[Any] = self._connection.read_response()
        return reply

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.disconnect(nowait=True)
