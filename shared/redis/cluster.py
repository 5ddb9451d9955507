"""Connections that follow a shard to the node of a Redis Cluster that serves it.

All keys of a shard lie in one slot, so a client needs one node and no map of the cluster. A node
that does not own the slot executes nothing and answers ``MOVED slot host:port``. The connection
then breaks, and the next one goes to the named node. Clients thus treat a moved slot (failover,
resharding) like any broken connection: they send the same commands again. If the named node is
unreachable, the next connection goes to the URL's address, which may know a new owner by then.

A standalone server never answers ``MOVED``, and nothing is asked beforehand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import AuthenticationError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .transient_errors import RetryableConnection

__all__ = [
    "ClusterConnection",
    "ClusterSSLConnection",
    "Rerouted",
    "Route",
    "follow_moved",
    "moved_to",
]

_T = TypeVar("_T")

_HOPS = 5
"""Redirects in a row before nodes that name each other count as unreachable."""


class Rerouted(RedisConnectionError):
    """Another node serves this shard; the next connection goes there."""


class Route:
    """The node that a client's connections go to.

    Attributes:
        node: host and port that a ``MOVED`` named; None: the URL's address.
    """

    __slots__ = ("node",)

    def __init__(self) -> None:
        self.node: tuple[str, int] | None = None

    def forget(self, node: tuple[str, int]) -> None:
        """A node is unreachable: go to the URL's address again."""
        if self.node == node:
            self.node = None


class ClusterConnection(RetryableConnection, Connection):
    """A connection to the node that its route names.

    Args:
        route: shared by all connections of a client or of a process.
        **options: those of ``redis.asyncio.Connection``; host and port are the URL's.
    """

    def __init__(self, *, route: Route, **options: Any) -> None:
        super().__init__(**options)
        self._home = (str(self.host), int(self.port))
        self._route = route

    async def connect(self) -> None:
        """Connect, unless connected."""
        if self.is_connected:
            return
        node = self._route.node or self._home
        self.host, self.port = node
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            if node == self._home or isinstance(error, AuthenticationError):
                raise
            self._route.forget(node)
            raise RedisConnectionError(
                f"{error} (the cluster's node at {_text(self._home)} names {_text(node)} as the "
                "one that serves this shard; it must be reachable from here under that name: "
                "see cluster-announce-ip of redis.conf)"
            ) from error

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply; a ``MOVED`` breaks the connection.

        Raises:
            Rerouted: another node serves the shard. The server executed nothing of the command.
            TransientRefusal: see :class:`RetryableConnection`.
        """
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            here = (str(self.host), int(self.port))
            node = moved_to(error, here)
            if node is not None:
                self._route.node = node
                await self.disconnect(nowait=True)
                raise Rerouted(
                    f"{_text(here)} does not serve this shard, {_text(node)} does"
                ) from error
            raise


class ClusterSSLConnection(ClusterConnection, SSLConnection):
    """The same with TLS."""


async def follow_moved(send: Callable[[], Awaitable[_T]]) -> _T:
    """Run a repeatable command, and again at each node that a ``MOVED`` names.

    Raises:
        Rerouted: after five redirects nodes still name each other.
    """
    for _ in range(_HOPS):
        try:
            return await send()
        except Rerouted:
            continue
    return await send()


def moved_to(error: object, here: tuple[str, int] = ("", 0)) -> tuple[str, int] | None:
    """Host and port that a ``MOVED`` names; None for any other error or reply.

    Args:
        error: the server's answer.
        here: the server that answered; a node that does not know its own name sends no host,
            which means this one.
    """
    if isinstance(error, MovedError):
        host, port = error.host, str(error.port)
    elif isinstance(error, ResponseError) and str(error).startswith("MOVED "):
        host, _, port = str(error).split(" ")[-1].rpartition(":")
    else:
        return None
    return (host if host not in ("", "?") else here[0]), int(port)


def _text(node: tuple[str, int]) -> str:
    return f"{node[0]}:{node[1]}"
