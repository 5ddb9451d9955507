"""The client's connections to Redis: opened, checked, retried, and named in errors.

Everything the client sends may be sent twice without harm: reads are reads, a submit is
idempotent by its id, a cancel of what has ended changes nothing. So a broken connection is
repaired by trying again, until an outage has lasted too long. A server that refuses for now is an
outage, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis, RedisCluster, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import ConfigurationError, RedisUnavailable
from penstock.shared.redis.cluster import Route, follow, named_node, open_pool
from penstock.shared.redis.transient_errors import NotNow

__all__ = ["Link", "check_loop"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PAUSE_S = (0.02, 0.5)
_CONNECTIONS = 8


class Link:
    """A Redis client, and how failures of it are met.

    At most eight commands are under way at once, so that a thousand streams that all read their
    log after a reconnection do not open a thousand connections.

    Args:
        redis: a client of the caller's, which stays the caller's to close; or a URL. Of a cluster
            the URL may name any node; a client must be one of the node that serves the shard.
        socket_timeout_s: for a client made from a URL: bound on connecting and on each reply.
        outage_s: how long commands are tried again while the server cannot be reached.

    Raises:
        ConfigurationError: the URL is not one, or the client decodes responses or is one of a
            whole cluster.
    """

    def __init__(
        self, redis: Redis | str, *, socket_timeout_s: float = 5.0, outage_s: float = 10.0
    ) -> None:
        self._owned = isinstance(redis, str)
        if isinstance(redis, RedisCluster):
            raise ConfigurationError(
                "a RedisCluster client is not taken, since a shard lies on one node: give the URL "
                "of any node instead, from which the right one is found"
            )
        self.redis = _open(redis, socket_timeout_s) if isinstance(redis, str) else redis
        self.outage_s = outage_s
        parameters = self.redis.connection_pool.connection_kwargs
        if parameters.get("decode_responses"):
            raise ConfigurationError(
                "the Redis client decodes responses, but penstock's payloads are binary; "
                "make it without decode_responses"
            )
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """The server's address without its password."""
        at = self.redis.connection_pool.connection_kwargs
        if "path" in at:
            return f"unix://{at['path']}"
        scheme = "rediss" if self._encrypted else "redis"
        return f"{scheme}://{at.get('host', 'localhost')}:{at.get('port', 6379)}/{at.get('db', 0)}"

    @property
    def _encrypted(self) -> bool:
        return issubclass(self.redis.connection_pool.connection_class, SSLConnection)

    @property
    def node(self) -> str | None:
        """The node of a cluster that serves the shard, as host:port; None: the address names it."""
        route = self.redis.connection_pool.connection_kwargs.get("route")
        if not isinstance(route, Route) or route.node is None:
            return None
        return f"{route.node[0]}:{route.node[1]}"

    async def connect(self, key: str) -> None:
        """Reach the server once and look at its version; nothing is tried again.

        Args:
            key: any key of the shard: of a cluster, the node that serves it is reached.

        Raises:
            RedisUnavailable: not reachable, access refused, too old, or a client of the caller's
                is connected to another node of a cluster.
        """
        from penstock.shared.local.server_binary import check_server

        try:
            await self._find_node(key)
            facts = await self._attempt(lambda: self.redis.info("server"))
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        except NoPermissionError:
            _log.info("the server's version is not checked: its user may not run INFO")
            return
        except ResponseError as error:
            raise RedisUnavailable(
                f"Redis at {self.address} refuses: {error}; check database and user in REDIS_URL "
                "or --redis"
            ) from error
        check_server(str(facts["redis_version"]))

    async def _find_node(self, key: str) -> None:
        try:
            await self._attempt(lambda: self.redis.exists(key))
        except NoPermissionError:
            return  # then what is sent first finds the node
        except ResponseError as error:
            node = named_node(error)
            if node is None:
                raise
            raise RedisUnavailable(
                f"Redis at {self.address} does not serve this shard, {node[0]}:{node[1]} does: "
                "connect your client to that node, or give the URL of any node instead of a client"
            ) from error

    async def call(self, send: Callable[[], Awaitable[_T]]) -> _T:
        """Run a repeatable command; on a broken connection run it again.

        Raises:
            RuntimeError: the connections were closed, or belong to another event loop.
            RedisUnavailable: the server could not be reached for ``outage_s`` seconds, refuses
                access, or refuses the command.
        """
        loop = asyncio.get_running_loop()
        pause_s, longest_pause_s = _PAUSE_S
        broken_since: float | None = None
        while True:
            try:
                return await self._attempt(send)
            except AuthenticationError as error:
                raise self._unreachable(error) from error
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                broken_since = loop.time() if broken_since is None else broken_since
                if loop.time() + pause_s - broken_since > self.outage_s:
                    raise self._unreachable(error) from error
                _log.info("Redis at %s: %s; trying again", self.address, error)
            except RedisError as error:
                raise RedisUnavailable(
                    f"Redis at {self.address} refused a command: {error}"
                ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)

    async def _attempt(self, send: Callable[[], Awaitable[_T]]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._loop = self._loop or task.get_loop()
        check_loop(self._loop)
        async with self._places:
            if self._closed:  # redis-py would open new connections, which nobody closes
                raise RuntimeError("this producer is closed")
            cancelled_before = task.cancelling()
            reply = await follow(send)
        # redis-py sends within asyncio.wait_for, which in Python 3.11 swallows a cancellation
        # that comes just when the sending is done: the caller would go on for ever.
        if task.cancelling() > cancelled_before:
            raise asyncio.CancelledError
        return reply

    def check_loop(self) -> None:
        """See that the running loop is the one in which this was first used, if it was.

        Raises:
            RuntimeError: it is another.
        """
        if self._loop is not None:
            check_loop(self._loop)

    async def aclose(self) -> None:
        """Close the connections, if they are our own; nothing can be sent any more."""
        self._closed = True
        if self._owned:
            await self.redis.aclose()

    def _unreachable(self, error: Exception) -> RedisUnavailable:
        if isinstance(error, AuthenticationError):
            return RedisUnavailable(
                f"Redis at {self.address} refuses access: {error}; "
                "check user and password in REDIS_URL"
            )
        reason = str(error) or type(error).__name__
        if isinstance(error, NotNow | BusyLoadingError):
            remedy = (
                "point REDIS_URL or --redis to its primary"
                if "read only replica" in reason
                else "wait until it does, and look at its log"
            )
            return RedisUnavailable(
                f"Redis at {self.address} answers, but serves nobody now: {reason}; {remedy}"
            )
        tls = ", which must be redis:// unless it speaks TLS on that port"
        return RedisUnavailable(
            f"cannot reach Redis at {self.address}: {reason}; start the server, "
            f"or set REDIS_URL or --redis to its address{tls if self._encrypted else ''}"
        )


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """See that this is the running loop.

    Raises:
        RuntimeError: it is not, with the remedy.
    """
    if asyncio.get_running_loop() is not loop:
        raise RuntimeError(
            "this producer belongs to another event loop; make one for each loop, "
            "or a BlockingProducer, which threads may share"
        )


def _open(url: str, socket_timeout_s: float) -> Redis:
    pool = open_pool(
        url,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        # Retried here, so that every kind of connection and error is met the same way.
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)
