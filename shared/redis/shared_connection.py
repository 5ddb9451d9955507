"""One connection for all commands of a client; those of one turn of the event loop go together.

A pool gives each command a connection of its own, with a timer and a health check. That costs more
than the command does. Here commands of any number of callers go out in one write, and replies
come back in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..local.tasks import end_tasks
from .resp import Exchanger

__all__ = ["SharedConnection"]


class _Exchange:
    """The commands of one caller, and the replies that have come."""

    __slots__ = ("commands", "done", "replies")

    def __init__(self, commands: Sequence[bytes], done: asyncio.Future[list[Any]]) -> None:
        self.commands = commands
        self.replies: list[Any] = []
        self.done = done


class SharedConnection(Exchanger):
    """A separate connection to a client's server; each exchange opens it where it is not open.

    When it breaks, every exchange that is under way fails: its commands may have been executed.
    A caller that is cancelled leaves the others alone.

    Args:
        redis: the client whose connection parameters are used; its time limit for replies bounds
            each exchange.
    """

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._timeout_s: float | None = self._pool.connection_kwargs.get("socket_timeout")
        self._outgoing: list[_Exchange] = []
        self._sent: deque[_Exchange] = deque()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """See :class:`Exchanger`."""
        if not commands:
            return []
        done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._outgoing.append(_Exchange(commands, done))
        self._work.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="penstock-shared-connection")
        task = self._task
        try:
            async with asyncio.timeout(self._timeout_s):
                return await done
        except TimeoutError:
            task.cancel()  # the next replies would come late, too
            raise RedisTimeoutError(f"no answer within {self._timeout_s:g} s") from None

    async def aclose(self) -> None:
        """Close the connection; exchanges under way fail."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _run(self) -> None:
        """Serve until the connection breaks."""
        connection = self._open()
        why: BaseException = RedisConnectionError("the connection was closed")
        try:
            await connection.connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(connection))
                group.create_task(self._read(connection))
        except* Exception as group:
            why = group.exceptions[0]
        finally:
            waiting = [*self._sent, *self._outgoing]
            self._sent.clear()
            self._outgoing.clear()
            for one in waiting:
                if not one.done.done():
                    one.done.set_exception(why)
            self._task = None
            await connection.disconnect(nowait=True)

    def _open(self) -> Any:
        parameters = {
            **self._pool.connection_kwargs,
            "protocol": 2,
            "socket_timeout": None,  # each caller has its own; silence between them is normal
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
            "health_check_interval": 0,
        }
        if parameters.get("socket_connect_timeout") is None:
            parameters["socket_connect_timeout"] = self._timeout_s
        return self._pool.connection_class(**parameters)

    async def _write(self, connection: Any) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            outgoing, self._outgoing = self._outgoing, []
            self._sent.extend(outgoing)
            commands = [command for one in outgoing for command in one.commands]
            if commands:
                await connection.send_packed_command(commands, check_health=False)

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                reply = await connection.read_response()
            except ResponseError as error:
                reply = error
            one = self._sent[0]
            one.replies.append(reply)
            if len(one.replies) == len(one.commands):
                self._sent.popleft()
                if not one.done.done():
                    one.done.set_result(one.replies)
