"""The connection on which channels are subscribed to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["ChannelLink"]

_CONNECT_WITHIN_S = 10.0


class ChannelLink:
    """A connection of its own to a client's server: commands go out, messages come in.

    Does less for each message than redis-py's ``PubSub``, which makes a timer and looks after
    the health of the connection for every one: whoever reads here watches the connection as a
    whole. It speaks RESP2, in which messages are plain arrays.

    Answers come in the order of the commands, one for each channel, or one in all if the command
    is refused or names none. Nothing in them says which command they belong to, so that is counted:
    whoever reads tells of every answer, by :meth:`answered` or by :meth:`refused`.

    Args:
        redis: the client whose connection parameters are used; none of its connections is taken.
    """

    def __init__(self, redis: Redis) -> None:
        pool = redis.connection_pool
        parameters = {
            **pool.connection_kwargs,
            "protocol": 2,
            # A silent channel is nothing bad. Reconnecting is decided by the reader alone: a
            # retry inside redis-py would be done by whichever of reader and writer fails first,
            # under the other's feet.
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
            "health_check_interval": 0,
        }
        self._within_s = pool.connection_kwargs.get("socket_connect_timeout") or _CONNECT_WITHIN_S
        self._connection = pool.connection_class(**parameters)
        self._commands: deque[tuple[str, tuple[bytes, ...]]] = deque()  # not wholly answered
        self._answers = 0  # to the first of them

    async def connect(self) -> None:
        """Connect and log in.

        Raises:
            redis.exceptions.ConnectionError, TimeoutError, AuthenticationError: it did not work.
        """
        try:
            async with asyncio.timeout(self._within_s):
                await self._connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            raise RedisTimeoutError(f"no connection within {self._within_s:g} s") from None

    async def send(self, command: str, *channels: bytes) -> None:
        """Send a command; what answers it comes among the messages."""
        self._commands.append((command, channels))
        await self._connection.send_command(command, *channels, check_health=False)

    def answered(self) -> None:
        """An answer came that is no error."""
        if not self._commands:
            return
        self._answers += 1
        if self._answers >= len(self._commands[0][1]):
            self._commands.popleft()
            self._answers = 0

    def refused(self) -> tuple[str, tuple[bytes, ...]]:
        """An error came as an answer: to which command, and its channels."""
        self._answers = 0
        return self._commands.popleft() if self._commands else ("", ())

    def receive(self) -> Awaitable[Any]:
        """To be awaited: the next message or answer, a list that begins with its kind.

        Raises:
            redis.exceptions.ConnectionError: the connection is broken.
            redis.exceptions.ResponseError: a command was refused.
        """
        reply: Awaitable[Any] = self._connection.read_response()
        return reply

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.disconnect(nowait=True)
