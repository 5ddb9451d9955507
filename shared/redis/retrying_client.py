"""A client whose repeatable commands survive an outage of the server.

Everything that a producer sends may arrive twice without harm. Reads change nothing, a submit is
idempotent by its id, and cancelling an ended request changes nothing. So the client retries a
command on a broken connection until the outage has lasted too long. A transient refusal counts as
an outage, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import ConfigurationError
from .cluster import Route, follow_moved
from .opening import open_client
from .server_check import check_server
from .shared_connection import SharedConnection
from .unavailable import describe_address, refused_command, unavailable

__all__ = ["RetryingClient", "check_loop"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PAUSE_S = (0.02, 0.5)
_CONCURRENT_COMMANDS = 8


class RetryingClient:
    """A Redis client with retries, a limit on concurrent commands, and readable errors.

    At most eight commands run at once. A thousand streams that all read their log after a
    reconnection must not open a thousand connections.

    Args:
        redis: the caller's own client, which the caller closes; or a URL. In a cluster the URL
            may name any node, but a client must be connected to the node that serves the shard.
        socket_timeout_s: for a URL: limit on connecting and on each reply.
        outage_s: how long to retry commands while the server is unreachable.

    Attributes:
        redis: the client.
        shared: one more connection, for commands that are many.

    Raises:
        ConfigurationError: the URL is malformed, or the client decodes responses or belongs to a
            whole cluster.
    """

    def __init__(
        self, redis: Redis | str, *, socket_timeout_s: float = 5.0, outage_s: float = 10.0
    ) -> None:
        self._owned = isinstance(redis, str)
        if isinstance(redis, RedisCluster):
            raise ConfigurationError(
                "a RedisCluster client cannot be used, since a shard lies on one node: give the "
                "URL of any node instead, from which the right one is found"
            )
        if isinstance(redis, str):
            redis = open_client(redis, timeout_s=socket_timeout_s)
        self.redis = redis
        self.outage_s = outage_s
        if redis.connection_pool.connection_kwargs.get("decode_responses"):
            raise ConfigurationError(
                "the Redis client decodes responses, but penstock's payloads are binary; "
                "make it without decode_responses"
            )
        self.shared = SharedConnection(redis)
        self._slots = asyncio.Semaphore(_CONCURRENT_COMMANDS)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """The server's address without its password."""
        return describe_address(self.redis.connection_pool)

    @property
    def node(self) -> str | None:
        """The cluster node that serves the shard, as host:port; None: the address names it."""
        route = self.redis.connection_pool.connection_kwargs.get("route")
        if not isinstance(route, Route) or route.node is None:
            return None
        return f"{route.node[0]}:{route.node[1]}"

    async def connect(self, key: str) -> None:
        """Reach the server once, without retries, and check its version.

        Args:
            key: any key of the shard; in a cluster it finds the node.

        Raises:
            RedisUnavailable: see :func:`~.server_check.check_server`.
        """
        if await self._attempt(lambda: check_server(self.redis, key, "server")) is None:
            _log.info("the server's version is not checked: its user may not run INFO")

    async def call(self, send: Callable[[], Awaitable[_T]]) -> _T:
        """Run a repeatable command; run it again when the connection breaks.

        Raises:
            RuntimeError: the client is closed, or belongs to another event loop.
            RedisUnavailable: the server was unreachable for ``outage_s`` seconds, refuses access,
                or refuses the command.
        """
        loop = asyncio.get_running_loop()
        pool = self.redis.connection_pool
        pause_s, longest_pause_s = _PAUSE_S
        broken_since: float | None = None
        while True:
            try:
                return await self._attempt(send)
            except (AuthenticationError, InvalidResponse) as error:
                raise unavailable(error, pool) from error
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                broken_since = loop.time() if broken_since is None else broken_since
                if loop.time() + pause_s - broken_since > self.outage_s:
                    raise unavailable(error, pool) from error
                _log.info("Redis at %s: %s; trying again", self.address, error)
            except RedisError as error:
                raise refused_command(error, pool) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)

    async def _attempt(self, send: Callable[[], Awaitable[_T]]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._loop = self._loop or task.get_loop()
        check_loop(self._loop)
        async with self._slots:
            if self._closed:  # redis-py would open new connections and never close them
                raise RuntimeError("this producer is closed")
            cancelled_before = task.cancelling()
            reply = await follow_moved(send)
        # redis-py sends within asyncio.wait_for. In Python 3.11 that swallows a cancellation which
        # comes just when the send completes, and the caller would go on for ever.
        if task.cancelling() > cancelled_before:
            raise asyncio.CancelledError
        return reply

    def check_loop(self) -> None:
        """Check that the running loop is the one in which this client was first used, if any.

        Raises:
            RuntimeError: it is another.
        """
        if self._loop is not None:
            check_loop(self._loop)

    async def aclose(self) -> None:
        """Refuse further commands, and close the connections unless they are the caller's."""
        self._closed = True
        await self.shared.aclose()
        if self._owned:
            await self.redis.aclose()


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Check that this loop is running here.

    Raises:
        RuntimeError: it is not; the text names the remedy.
    """
    if asyncio.get_running_loop() is not loop:
        raise RuntimeError(
            "this producer belongs to another event loop; make one for each loop, "
            "or a BlockingProducer, which threads may share"
        )
